"""Device-resident state of the slots, and the rows of a step made from it.

A plan names slots; what those slots are at (block table, length, last token, drafts) is already on the device, so a
step can be prepared before the host has seen how many tokens the step before it brought.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from configs.engine import PAGE_SIZE
from layers.attention.backend import AttentionBatch, PagedRows, PrefillRows
from workers.step import PrefillChunk, StepPlan


@dataclass(frozen=True)
class ChunkRows:
    """What is known of a step's prefill chunks, in the plan's order."""

    spans: list[tuple[int, int]]  # first row of each chunk, and the one after its last
    # Known tokens 1, 2, ... ahead of chunks' last rows: (rows [n] int64, tokens [n] int64) of those that have them.
    ahead: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class StepBatch:
    """The rows of one forward pass: `per_sequence` for each slot that decodes, then those of the chunks, of which long
    ones (paged rows) come before short ones."""

    token_ids: torch.Tensor  # [rows] int64
    positions: torch.Tensor  # [rows] int64
    attention: AttentionBatch
    per_sequence: int
    num_decoding: int
    slot_ids: torch.Tensor  # [sampled] int64: the slots that decode, then those of chunks that sample
    sampled_rows: torch.Tensor  # [sampled, per_sequence] int64; a chunk's last row stands there several times
    num_drafts: torch.Tensor  # [sampled] int64, drafts that may be accepted
    drafts: torch.Tensor  # [sampled, per_sequence - 1] int64
    max_length: int  # bound on the length of any sampled sequence after the step and its drafts
    chunks: ChunkRows | None = None


@dataclass(frozen=True)
class Unsettled:
    """A step whose accepted tokens the host does not know yet."""

    decode: list[int]
    rows: int  # of each slot in `decode`
    owners: list[int]  # which sequence each slot held


class SlotTables:
    """Block tables, lengths, last tokens and drafts by slot, and of one slot more (`padding`), always empty, for the
    rows that fill up a batch.

    The device copies are what rows are built from; the host knows pages, and bounds on lengths that are exact when no
    step is unsettled. Pages that a slot does not have are the scratch page, so that positions past a sequence's end
    can be written harmlessly.
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
        slots = max_num_seqs + 1
        self.device = device
        self.dense_context = dense_context
        self.padding = max_num_seqs
        self.max_length = columns * PAGE_SIZE
        self.block_table = torch.full((slots, columns), scratch_page, dtype=torch.int32, device=device)
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)  # positions in the cache
        self.last_token = torch.zeros(slots, dtype=torch.int64, device=device)
        self.drafts = torch.zeros(slots, max_drafts, dtype=torch.int64, device=device)
        self.num_drafts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._scratch_page = scratch_page
        self._host_pages = np.full((slots, columns), scratch_page, dtype=np.int64)
        self._num_pages = [0] * slots
        self._host_length = [0] * slots
        self._owner = [0] * slots  # counts the sequences that a slot has held

    def apply(self, plan: StepPlan) -> None:
        """Takes in the plan's admissions and new pages."""
        grown = [*plan.new_pages]
        for admission in plan.admitted:
            slot = admission.slot
            self._owner[slot] += 1
            self._num_pages[slot] = 0
            self._host_pages[slot] = self._scratch_page
            self._host_length[slot] = admission.num_computed
            self.block_table[slot] = self._scratch_page
            self.length[slot] = admission.num_computed
            self.num_drafts[slot] = 0
            grown.append((slot, admission.pages))
        self._append_pages([(slot, pages) for slot, pages in grown if pages])

    def _append_pages(self, grown: list[tuple[int, list[int]]]) -> None:
        if not grown:
            return
        cells = []
        for slot, pages in grown:
            first, last = self._num_pages[slot], self._num_pages[slot] + len(pages)
            self._host_pages[slot, first:last] = pages
            self._num_pages[slot] = last
            cells.append(np.stack((np.full(len(pages), slot), np.arange(first, last), np.asarray(pages))))
        slots, columns, pages_ = self.to_device(np.concatenate(cells, axis=1))
        self.block_table.index_put_((slots, columns), pages_.int())

    # ------------------------------------------------------------------------------------------ rows of a step

    def bound(self, plan: StepPlan) -> int:
        """Bound on the length of the plan's decoding sequences after the step and its drafts."""
        return 1 + plan.verify + plan.draft + max((self._host_length[slot] for slot in plan.decode), default=0)

    def decode_batch(self, slot_ids: torch.Tensor, verify: int, max_length: int) -> StepBatch:
        """Rows of slots [n] int64 that decode. Of the device's state alone, so that a CUDA graph can hold it;
        `max_length`: as in StepBatch."""
        n, count = 1 + verify, slot_ids.shape[0]
        tokens, positions, cache_slots, rows = self._decode_rows(slot_ids, verify, max_length)
        return StepBatch(
            token_ids=tokens,
            positions=positions,
            attention=AttentionBatch(cache_slots, (rows,)),
            per_sequence=n,
            num_decoding=count,
            slot_ids=slot_ids,
            sampled_rows=torch.arange(count * n, device=self.device).view(count, n),
            num_drafts=self.num_drafts[slot_ids].clamp(max=verify),
            drafts=self.drafts[slot_ids, :verify],
            max_length=max_length,
        )

    def batch(self, plan: StepPlan) -> StepBatch:
        """The rows of a plan with prefill chunks."""
        n, decoding = 1 + plan.verify, len(plan.decode)
        order = sorted(range(len(plan.chunks)), key=lambda i: not self._is_long(plan.chunks[i]))  # stable
        chunks = [plan.chunks[i] for i in order]
        spans = [(0, 0)] * len(chunks)
        end = decoding * n
        for i, chunk in zip(order, chunks, strict=True):
            spans[i] = (end, end + len(chunk.token_ids))
            end = spans[i][1]
        sampling = [(span[1] - 1, c) for span, c in zip(spans, plan.chunks, strict=True) if c.sample]
        slot_ids = self.ids([*plan.decode, *(chunk.slot for _, chunk in sampling)])
        parts, paged = [self._chunk_rows(chunks)], []
        max_length = self.bound(plan)
        if decoding:
            *columns, rows = self._decode_rows(slot_ids[:decoding], plan.verify, max_length)
            parts.insert(0, (columns[0], columns[1], columns[2]))
            paged.append(rows)
        long = [chunk for chunk in chunks if self._is_long(chunk)]
        paged += [self._paged_chunk(chunk) for chunk in long]
        short = chunks[len(long) :]
        token_ids, positions, cache_slots = (torch.cat(pair) for pair in zip(*parts, strict=True))
        sampled = [[i * n + j for j in range(n)] for i in range(decoding)] + [[row] * n for row, _ in sampling]
        verified = self.num_drafts[slot_ids].clamp(max=plan.verify)
        verified[decoding:] = 0
        ends = [chunk.start + len(chunk.token_ids) + 1 + plan.draft for _, chunk in sampling]
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            attention=AttentionBatch(cache_slots, tuple(paged), self._prefill_attention(short) if short else None),
            per_sequence=n,
            num_decoding=decoding,
            slot_ids=slot_ids,
            sampled_rows=self.ids(sampled).view(-1, n),
            num_drafts=verified,
            drafts=self.drafts[slot_ids, : plan.verify],
            max_length=max([max_length, *ends]),
            chunks=ChunkRows(spans, self._known_ahead(plan.chunks, spans)),
        )

    def cache_slots(self, slot_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Physical cache slots of positions [n, m] of slots [n] -> [n, m] int64."""
        pages = self.block_table[slot_ids[:, None], positions // PAGE_SIZE].long()
        return pages * PAGE_SIZE + positions % PAGE_SIZE

    def single_rows(self, slot_ids: torch.Tensor, positions: torch.Tensor, max_length: int) -> AttentionBatch:
        """One row [n] for each of these slots, at these positions."""
        rows = PagedRows(self._table(slot_ids, max_length), (positions + 1).int(), 1, max_length)
        return AttentionBatch(self.cache_slots(slot_ids, positions[:, None]).squeeze(1), (rows,))

    def _table(self, slot_ids: torch.Tensor, max_length: int) -> torch.Tensor:
        return self.block_table[slot_ids, : -(-max_length // PAGE_SIZE)]

    def _is_long(self, chunk: PrefillChunk) -> bool:
        return self.dense_context is not None and chunk.start + len(chunk.token_ids) > self.dense_context

    def _decode_rows(
        self, slot_ids: torch.Tensor, verify: int, max_length: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedRows]:
        tokens = self.last_token[slot_ids, None]
        positions = self.length[slot_ids, None]
        if verify:
            tokens = torch.cat((tokens, self.drafts[slot_ids, :verify]), dim=1)
            positions = positions + torch.arange(1 + verify, device=self.device)
        cache_slots, flat = self.cache_slots(slot_ids, positions).flatten(), positions.flatten()
        rows = PagedRows(self._table(slot_ids, max_length), (flat + 1).int(), 1 + verify, max_length)
        return tokens.flatten(), flat, cache_slots, rows

    def _chunk_rows(self, chunks: list[PrefillChunk]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks])
        positions = np.concatenate([np.arange(c.start, c.start + len(c.token_ids)) for c in chunks])
        slots = np.repeat([c.slot for c in chunks], [len(c.token_ids) for c in chunks])
        cache_slots = self._host_pages[slots, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        return self.to_device(tokens), self.to_device(positions), self.to_device(cache_slots)

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
        return PrefillRows(q_offsets, k_offsets, self.to_device(np.concatenate(context)))

    def _known_ahead(
        self, chunks: list[PrefillChunk], spans: list[tuple[int, int]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        known = []
        for ahead in range(max((len(chunk.next_ids) for chunk in chunks), default=0)):
            have = [(c, end) for c, (_, end) in zip(chunks, spans, strict=True) if len(c.next_ids) > ahead]
            known.append((self.ids([end - 1 for _, end in have]), self.ids([c.next_ids[ahead] for c, _ in have])))
        return known

    # ------------------------------------------------------------------------------------------ after a step

    def end_chunks(self, chunks: list[PrefillChunk]) -> None:
        """The positions of these chunks are in the cache now."""
        if not chunks:
            return
        ends = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        self.length[self.ids([chunk.slot for chunk in chunks])] = self.ids(ends)
        for chunk, end in zip(chunks, ends, strict=True):
            self._host_length[chunk.slot] = end

    def advance(self, batch: StepBatch, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Takes in what was sampled: tokens [sampled, per_sequence], of which the first counts [sampled] are valid.
        Lengths grow by the positions that hold committed tokens now, and slots remember their last token."""
        decoding = batch.slot_ids[: batch.num_decoding]
        self.length[decoding] += counts[: batch.num_decoding] * (decoding != self.padding)
        self.last_token[batch.slot_ids] = tokens.gather(1, counts[:, None] - 1).squeeze(1)
        self.num_drafts.index_fill_(0, batch.slot_ids, 0)

    def set_drafts(self, slot_ids: torch.Tensor, drafts: torch.Tensor) -> None:
        """What these slots verify in their next step: drafts [n, k]."""
        self.drafts[slot_ids, : drafts.shape[1]] = drafts
        self.num_drafts.index_fill_(0, slot_ids, drafts.shape[1])

    def launched(self, plan: StepPlan) -> Unsettled:
        """The host's bounds grow by all that the step can accept, until it is settled."""
        for slot in plan.decode:
            self._host_length[slot] += 1 + plan.verify
        return Unsettled(plan.decode, 1 + plan.verify, [self._owner[slot] for slot in plan.decode])

    def settle(self, step: Unsettled, counts: list[int]) -> None:
        """The counts of the step's decoding sequences are known."""
        for slot, owner, count in zip(step.decode, step.owners, counts, strict=False):
            if self._owner[slot] == owner:
                self._host_length[slot] -= step.rows - count

    def ids(self, values: Sequence) -> torch.Tensor:
        """A list of numbers (or of lists of them) -> int64 on the device, without waiting for it."""
        return self.to_device(np.asarray(values, dtype=np.int64))

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copies without waiting for the device."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def overshoot(max_drafts: int) -> int:
    """Positions past max_model_len that a step may write: a sequence can pass its end by the drafts accepted in the
    step that ends it, and be verified and drafted for once more before the driver knows."""
    return 4 * (1 + max_drafts) if max_drafts else 0
