"""Slot tables: rows of steps with drafts, and where writes past a slot's pages go."""

import pytest
import torch

from layers.attention.backend import PagedRows
from workers.step import Admission, PrefillChunk, SamplingParams, StepPlan
from workers.tables import SlotTables, StepBatch, overshoot

CPU = torch.device("cpu")
SCRATCH = 99


def tables(max_drafts: int = 2, max_model_len: int = 256, dense_context: int | None = None) -> SlotTables:
    return SlotTables(4, max_model_len, max_drafts, SCRATCH, dense_context, CPU)


def admit(slot: int, pages: list[int], num_computed: int = 0) -> Admission:
    return Admission(slot, 0, SamplingParams(), 1, num_computed, pages, [], [])


def start(state: SlotTables, slot: int, pages: list[int], length: int, last: int, drafts: list[int]) -> None:
    """A slot that decodes: `length` positions in the cache, then `last`, then drafts."""
    state.apply(StepPlan(0, [], [admit(slot, pages)], [], [], []))
    plan = StepPlan(0, [], [], [], [], [PrefillChunk(slot, 0, [7] * length, True)])
    state.advance(state.batch(plan), torch.tensor([[last]]), torch.tensor([1]))
    state.end_chunks(plan.chunks)
    state.set_drafts(torch.tensor([slot]), torch.tensor([drafts]))


def decode(state: SlotTables, slots: list[int], verify: int = 0) -> StepBatch:
    plan = StepPlan(1, [], [], [], slots, [], verify)
    return state.decode_batch(torch.tensor(slots), verify, state.bound(plan))


def test_rows_of_a_verification() -> None:
    state = tables()
    start(state, 2, [5, 6], 63, 40, [41, 42])
    start(state, 0, [8], 10, 30, [31, 32])
    batch = decode(state, [2, 0], verify=2)
    assert batch.token_ids.tolist() == [40, 41, 42, 30, 31, 32]
    assert batch.positions.tolist() == [63, 64, 65, 10, 11, 12]
    assert batch.attention.cache_slots.tolist() == [
        5 * 64 + 63,
        6 * 64,
        6 * 64 + 1,
        *(8 * 64 + i for i in (10, 11, 12)),
    ]
    (rows,) = batch.attention.paged
    assert rows.lengths.tolist() == [64, 65, 66, 11, 12, 13]
    assert (rows.per_sequence, rows.max_length, rows.block_table.tolist()) == (3, 66, [[5, 6], [8, SCRATCH]])
    assert batch.sampled_rows.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (batch.drafts.tolist(), batch.num_drafts.tolist()) == ([[41, 42], [31, 32]], [2, 2])


def test_after_a_verification() -> None:
    state = tables()
    start(state, 2, [5, 6], 63, 40, [41, 42])
    start(state, 0, [8], 10, 30, [31, 32])
    state.advance(decode(state, [2, 0], verify=2), torch.tensor([[41, 42, 50], [60, -5, -5]]), torch.tensor([3, 1]))
    step = state.launched(StepPlan(1, [], [], [], [2, 0], [], verify=2))
    assert decode(state, [2, 0]).max_length == 67  # not known yet
    assert decode(state, [0]).max_length == 14
    state.settle(step, [3, 1])
    assert decode(state, [0]).max_length == 12
    batch = decode(state, [2, 0])
    assert batch.token_ids.tolist() == [50, 60]
    assert batch.positions.tolist() == [66, 11]
    assert batch.num_drafts.tolist() == [0, 0]
    assert batch.attention.paged[0].max_length == 67


def test_a_slot_with_fewer_drafts_than_are_verified() -> None:
    state = tables()
    start(state, 1, [3], 5, 20, [21])
    start(state, 3, [4], 5, 25, [26, 27])
    batch = decode(state, [1, 3], verify=2)
    assert batch.num_drafts.tolist() == [1, 2]
    less = decode(state, [1, 3], verify=1)
    assert (less.num_drafts.tolist(), less.token_ids.tolist()) == ([1, 1], [20, 21, 25, 26])


def test_positions_without_a_page_go_to_the_scratch_page() -> None:
    """Also as far past max_model_len as steps in flight can come, and after a slot had a longer owner."""
    state = tables(max_drafts=3, max_model_len=128)
    start(state, 0, [1, 2], 100, 20, [21, 22, 23])
    state.apply(StepPlan(0, [0], [admit(0, [7])], [], [], []))
    assert state.block_table[0].tolist() == [7] + [SCRATCH] * (state.block_table.shape[1] - 1)
    furthest = 128 + overshoot(3) - 1
    slots = state.cache_slots(torch.tensor([0]), torch.tensor([[0, 63, 64, 127, 128, furthest]]))
    want = [7 * 64, 7 * 64 + 63, *(SCRATCH * 64 + p % 64 for p in (64, 127, 128, furthest))]
    assert slots.tolist() == [want]


def test_chunks_and_drafts_in_one_step() -> None:
    """A chunk's last row is sampled without drafts; its row stands in every column."""
    state = tables()
    start(state, 1, [3], 5, 20, [21, 22])
    state.apply(StepPlan(0, [], [admit(2, [6]), admit(3, [9])], [], [], []))
    chunks = [PrefillChunk(2, 0, [50, 51, 52], True), PrefillChunk(3, 0, [60, 61], False, [62])]
    batch = state.batch(StepPlan(1, [], [], [], [1], chunks, verify=2))
    assert batch.token_ids.tolist() == [20, 21, 22, 50, 51, 52, 60, 61]
    assert (batch.slot_ids.tolist(), batch.sampled_rows.tolist()) == ([1, 2], [[0, 1, 2], [5, 5, 5]])
    assert batch.num_drafts.tolist() == [2, 0]
    assert batch.chunks is not None
    assert batch.chunks.spans == [(3, 6), (6, 8)]
    assert [(rows.tolist(), ids.tolist()) for rows, ids in batch.chunks.ahead] == [([7], [62])]
    assert batch.max_length == 8


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_long_chunks_are_paged_rows_and_come_first(order: list[int]) -> None:
    state = tables(dense_context=4)
    state.apply(StepPlan(0, [], [admit(0, [1]), admit(1, [2])], [], [], []))
    both = [PrefillChunk(0, 0, [10, 11, 12, 13], True), PrefillChunk(1, 0, [20, 21, 22, 23, 24], False)]
    batch = state.batch(StepPlan(1, [], [], [], [], [both[i] for i in order]))
    assert batch.token_ids.tolist() == [20, 21, 22, 23, 24, 10, 11, 12, 13]
    assert [batch.chunks.spans[order.index(i)] for i in (0, 1)] == [(5, 9), (0, 5)]
    (rows,) = batch.attention.paged
    assert isinstance(rows, PagedRows)
    assert (rows.lengths.tolist(), rows.start, rows.max_length) == ([1, 2, 3, 4, 5], 0, 5)
    assert [rows.num_within(k) for k in (0, 3, 5, 9)] == [0, 3, 5, 5]
    assert batch.attention.prefill is not None and batch.attention.prefill.q_offsets == [0, 4]
    assert batch.sampled_rows.tolist() == [[8]]


def test_a_slot_with_a_new_owner_is_not_settled() -> None:
    state = tables()
    start(state, 1, [5], 10, 40, [41, 42])
    step = state.launched(StepPlan(1, [], [], [], [1], [], verify=2))
    state.apply(StepPlan(2, [1], [admit(1, [6], num_computed=3)], [], [], []))
    state.settle(step, [1])
    assert decode(state, [1]).max_length == 4


def test_padding_stays_empty() -> None:
    state = tables()
    start(state, 1, [5], 10, 40, [41, 42])
    slots = torch.tensor([1, state.padding, state.padding])
    for _ in range(3):
        batch = state.decode_batch(slots, 1, 64)
        assert batch.attention.paged[0].lengths[2:].tolist() == [1, 2, 1, 2]
        assert batch.attention.cache_slots[2:].tolist() == [SCRATCH * 64, SCRATCH * 64 + 1] * 2
        state.advance(batch, torch.tensor([[8, 9]] * 3), torch.tensor([2, 1, 2]))
    assert state.length[[1, state.padding]].tolist() == [16, 0]
