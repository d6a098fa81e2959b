"""Device-resident state of the slots, and the rows of a step made from it.

A plan names slots; what those slots are at (block table, length, last token, drafts) is already on the device, so a
step can be prepared before the host has seen how many tokens the step before it brought.
"""

from dataclasses import dataclass

import numpy as np
import torch

from configs.engine import PAGE_SIZE
from layers.attention.backend import AttentionBatch, PagedRows, PrefillRows
from workers.step import PrefillChunk, StepPlan


@dataclass(frozen=True)
class StepBatch:
    """The rows of one forward pass: `per_sequence` for each slot that decodes, then those of the chunks, of which long
    ones (paged rows) come before short ones."""

    token_ids: torch.Tensor  # [rows] int64
    positions: torch.Tensor  # [rows] int64
    attention: AttentionBatch
    per_sequence: int
    chunk_spans: list[tuple[int, int]]  # first row of each of the plan's chunks, and the one after its last
    slots: list[int]  # what is sampled: the slots that decode, then those of chunks that sample
    slot_ids: torch.Tensor  # [sampled] int64, the same
    sampled_rows: torch.Tensor  # [sampled, per_sequence] int64; a chunk's last row stands there several times
    num_drafts: torch.Tensor  # [sampled] int64, drafts that may be accepted
    drafts: torch.Tensor  # [sampled, per_sequence - 1] int64
    max_length: int  # bound on the length of any sampled sequence after the step


class SlotTables:
    """Block tables, lengths, last tokens and drafts by slot.

    The device copies are what rows are built from; the host knows pages, and lengths as of the last step it saw. Pages
    that a slot does not have are the scratch page, so that positions past a sequence's end can be written harmlessly.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        max_drafts: int,
        scratch_page: int,
        dense_context: int | None,
        device: torch.device,
    ) -> None:
        """`dense_context`: chunks that see more positions become paged rows (sparse attention); None = none does."""
        columns = -(-(max_model_len + overshoot(max_drafts)) // PAGE_SIZE)
        self.device = device
        self.dense_context = dense_context
        self.block_table = torch.full((max_num_seqs, columns), scratch_page, dtype=torch.int32, device=device)
        self.length = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # positions in the cache
        self.last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.drafts = torch.zeros(max_num_seqs, max_drafts, dtype=torch.int64, device=device)
        self.num_drafts = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._scratch_page = scratch_page
        self._host_pages = np.full((max_num_seqs, columns), scratch_page, dtype=np.int64)
        self._num_pages = [0] * max_num_seqs
        self._host_length = [0] * max_num_seqs

    def apply(self, plan: StepPlan) -> None:
        """Takes in the plan's admissions and new pages."""
        for admission in plan.admitted:
            slot = admission.slot
            self._num_pages[slot] = 0
            self._host_pages[slot] = self._scratch_page
            self.block_table[slot] = self._scratch_page
            self._append_pages(slot, admission.pages)
            self._host_length[slot] = admission.num_computed
            self.length[slot] = admission.num_computed
            self.num_drafts[slot] = 0
        for slot, pages in plan.new_pages:
            self._append_pages(slot, pages)

    def _append_pages(self, slot: int, pages: list[int]) -> None:
        if not pages:
            return
        first, last = self._num_pages[slot], self._num_pages[slot] + len(pages)
        self._host_pages[slot, first:last] = pages
        self.block_table[slot, first:last] = torch.tensor(pages, dtype=torch.int32)
        self._num_pages[slot] = last

    # ------------------------------------------------------------------------------------------ rows of a step

    def batch(self, plan: StepPlan) -> StepBatch:
        """The plan's rows."""
        n = 1 + plan.verify
        order = sorted(range(len(plan.chunks)), key=lambda i: not self._is_long(plan.chunks[i]))  # stable
        chunks = [plan.chunks[i] for i in order]
        spans = [(0, 0)] * len(chunks)
        end = len(plan.decode) * n
        for i, chunk in zip(order, chunks, strict=True):
            spans[i] = (end, end + len(chunk.token_ids))
            end = spans[i][1]
        sampling = [(span[1] - 1, c.slot) for span, c in zip(spans, plan.chunks, strict=True) if c.sample]
        slots = [*plan.decode, *(slot for _, slot in sampling)]
        slot_ids = self._ids(slots)
        parts, paged = [], []
        if plan.decode:
            parts.append(self._decode_rows(slot_ids[: len(plan.decode)], plan.verify))
            longest = n + max(self._host_length[slot] for slot in plan.decode)
            table = self.block_table[slot_ids[: len(plan.decode)], : -(-longest // PAGE_SIZE)]
            paged.append(PagedRows(table, (parts[0][1] + 1).int(), n, longest))
        if chunks:
            parts.append(self._chunk_rows(chunks))
        long = [chunk for chunk in chunks if self._is_long(chunk)]
        paged += [self._paged_chunk(chunk) for chunk in long]
        short = chunks[len(long) :]
        columns = parts[0] if len(parts) == 1 else tuple(torch.cat(pair) for pair in zip(*parts, strict=True))
        token_ids, positions, cache_slots = columns
        rows = [[i * n + j for j in range(n)] for i in range(len(plan.decode))] + [[row] * n for row, _ in sampling]
        verified = self.num_drafts[slot_ids].clamp(max=plan.verify)
        verified[len(plan.decode) :] = 0
        ends = [chunk.start + len(chunk.token_ids) for chunk in plan.chunks if chunk.sample]
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            attention=AttentionBatch(cache_slots, tuple(paged), self._prefill_attention(short) if short else None),
            per_sequence=n,
            chunk_spans=spans,
            slots=slots,
            slot_ids=slot_ids,
            sampled_rows=self._ids(rows).view(-1, n),
            num_drafts=verified,
            drafts=self.drafts[slot_ids, : plan.verify],
            max_length=max([*(self._host_length[slot] + n for slot in plan.decode), *ends], default=0),
        )

    def cache_slots(self, slot_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Physical cache slots of positions [n, m] of slots [n] -> [n, m] int64."""
        pages = self.block_table[slot_ids[:, None], positions // PAGE_SIZE].long()
        return pages * PAGE_SIZE + positions % PAGE_SIZE

    def single_rows(self, slot_ids: torch.Tensor, positions: torch.Tensor, max_length: int) -> AttentionBatch:
        """One row [n] for each of these slots, at these positions."""
        table = self.block_table[slot_ids, : -(-max_length // PAGE_SIZE)]
        rows = PagedRows(table, (positions + 1).int(), 1, max_length)
        return AttentionBatch(self.cache_slots(slot_ids, positions[:, None]).squeeze(1), (rows,))

    def _is_long(self, chunk: PrefillChunk) -> bool:
        return self.dense_context is not None and chunk.start + len(chunk.token_ids) > self.dense_context

    def _decode_rows(self, slot_ids: torch.Tensor, verify: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = self.last_token[slot_ids, None]
        positions = self.length[slot_ids, None]
        if verify:
            tokens = torch.cat((tokens, self.drafts[slot_ids, :verify]), dim=1)
            positions = positions + torch.arange(1 + verify, device=self.device)
        return tokens.flatten(), positions.flatten(), self.cache_slots(slot_ids, positions).flatten()

    def _chunk_rows(self, chunks: list[PrefillChunk]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks])
        positions = np.concatenate([np.arange(c.start, c.start + len(c.token_ids)) for c in chunks])
        slots = np.repeat([c.slot for c in chunks], [len(c.token_ids) for c in chunks])
        cache_slots = self._host_pages[slots, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        return self._to_device(tokens), self._to_device(positions), self._to_device(cache_slots)

    def _paged_chunk(self, chunk: PrefillChunk) -> PagedRows:
        rows = len(chunk.token_ids)
        end = chunk.start + rows
        table = self.block_table[chunk.slot : chunk.slot + 1, : -(-end // PAGE_SIZE)]
        lengths = torch.arange(chunk.start + 1, end + 1, dtype=torch.int32, device=self.device)
        return PagedRows(table, lengths, rows, end, chunk.start)

    def _prefill_attention(self, chunks: list[PrefillChunk]) -> PrefillRows:
        ends = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        context = [
            (self._host_pages[chunk.slot, : -(-end // PAGE_SIZE), None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()[
                :end
            ]
            for chunk, end in zip(chunks, ends, strict=True)
        ]
        q_offsets = np.cumsum([0, *(len(chunk.token_ids) for chunk in chunks)]).tolist()
        k_offsets = np.cumsum([0, *ends]).tolist()
        return PrefillRows(q_offsets, k_offsets, self._to_device(np.concatenate(context)))

    # ------------------------------------------------------------------------------------------ after a step

    def advance(self, plan: StepPlan, batch: StepBatch, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Takes in what was sampled: tokens [sampled, per_sequence], of which the first counts [sampled] are valid.
        Lengths grow by the positions that hold committed tokens now, and slots remember their last token."""
        for chunk in plan.chunks:
            self.length[chunk.slot] = chunk.start + len(chunk.token_ids)
        if not batch.slots:
            return
        decoding = len(plan.decode)
        self.length[batch.slot_ids[:decoding]] += counts[:decoding]
        self.last_token[batch.slot_ids] = tokens.gather(1, counts[:, None] - 1).squeeze(1)
        self.num_drafts[batch.slot_ids] = 0

    def set_drafts(self, slot_ids: torch.Tensor, drafts: torch.Tensor) -> None:
        """What these slots verify in their next step: drafts [n, k]."""
        self.drafts[slot_ids, : drafts.shape[1]] = drafts
        self.num_drafts[slot_ids] = drafts.shape[1]

    def settle(self, plan: StepPlan, counts: list[int]) -> None:
        """The host's part of `advance`, once it knows the counts of the sampled sequences."""
        for slot, count in zip(plan.decode, counts, strict=False):
            self._host_length[slot] += count
        for chunk in plan.chunks:
            self._host_length[chunk.slot] = chunk.start + len(chunk.token_ids)

    def _ids(self, values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def overshoot(max_drafts: int) -> int:
    """Positions past max_model_len that a step may write: a sequence can pass its end by the drafts accepted in the
    step that ends it, and be verified and drafted for once more before the driver knows."""
    return 4 * (1 + max_drafts) if max_drafts else 0
