"""Device-resident state of the slots, and the rows of a step made from it.

A plan names slots; what those slots are at (block table, length, last token) is already on the device, so a step can
be prepared before the host has seen the tokens of the step before.
"""

from dataclasses import dataclass

import numpy as np
import torch

from configs.engine import PAGE_SIZE
from layers.attention.backend import AttentionBatch, DecodeRows, PrefillRows
from workers.step import StepPlan


@dataclass(frozen=True)
class StepBatch:
    """The rows of one forward pass, decode rows first, then the chunks in the plan's order."""

    token_ids: torch.Tensor  # [rows] int64
    positions: torch.Tensor  # [rows] int64
    attention: AttentionBatch
    chunk_offsets: list[int]  # first row of each chunk, and the number of rows
    sampled_rows: list[int]  # rows whose logits are sampled: decode rows, then last rows of chunks that sample
    sampled_slots: list[int]  # their slots


class SlotTables:
    """Block tables, lengths and last tokens by slot. Host copies hold what the host decides (pages, and lengths,
    which without speculation it knows); the device copies are what rows are built from."""

    def __init__(self, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        pages = -(-max_model_len // PAGE_SIZE)
        self.device = device
        self.block_table = torch.zeros(max_num_seqs, pages, dtype=torch.int32, device=device)
        self.length = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # positions in the cache
        self.last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._host_pages = np.zeros((max_num_seqs, pages), dtype=np.int64)
        self._num_pages = [0] * max_num_seqs
        self._host_length = [0] * max_num_seqs

    def apply(self, plan: StepPlan) -> None:
        """Takes in the plan's admissions and new pages."""
        for admission in plan.admitted:
            self._num_pages[admission.slot] = 0
            self._append_pages(admission.slot, admission.pages)
            self._host_length[admission.slot] = admission.num_computed
            self.length[admission.slot] = admission.num_computed
        for slot, pages in plan.new_pages:
            self._append_pages(slot, pages)

    def _append_pages(self, slot: int, pages: list[int]) -> None:
        if not pages:
            return
        first, last = self._num_pages[slot], self._num_pages[slot] + len(pages)
        self._host_pages[slot, first:last] = pages
        self.block_table[slot, first:last] = torch.tensor(pages, dtype=torch.int32)
        self._num_pages[slot] = last

    def batch(self, plan: StepPlan) -> StepBatch:
        """The plan's rows."""
        parts = []
        if plan.decode:
            parts.append(self._decode_rows(plan.decode))
        decode = self._decode_attention(plan.decode, parts[0][1]) if plan.decode else None
        prefill = None
        if plan.chunks:
            parts.append(self._chunk_rows(plan))
            prefill = self._prefill_attention(plan)
        token_ids, positions, cache_slots = (
            parts[0] if len(parts) == 1 else (torch.cat(pair) for pair in zip(*parts, strict=True))
        )
        offsets = [len(plan.decode)]
        for chunk in plan.chunks:
            offsets.append(offsets[-1] + len(chunk.token_ids))
        sampling = [(end - 1, chunk.slot) for chunk, end in zip(plan.chunks, offsets[1:], strict=True) if chunk.sample]
        return StepBatch(
            token_ids,
            positions,
            AttentionBatch(cache_slots, len(plan.decode), decode, prefill),
            offsets,
            [*range(len(plan.decode)), *(row for row, _ in sampling)],
            [*plan.decode, *(slot for _, slot in sampling)],
        )

    def advance(self, plan: StepPlan, batch: StepBatch, tokens: torch.Tensor) -> None:
        """After the pass: lengths grow by the rows run, and sampled slots [n] remember their token."""
        for slot in plan.decode:
            self._host_length[slot] += 1
        if plan.decode:
            self.length[torch.tensor(plan.decode, device=self.device)] += 1
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.token_ids)
            self._host_length[chunk.slot] = end
            self.length[chunk.slot] = end
        if batch.sampled_slots:
            self.last_token[torch.tensor(batch.sampled_slots, device=self.device)] = tokens

    def _decode_rows(self, slots: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        slot_ids = torch.tensor(slots, device=self.device)
        positions = self.length[slot_ids]
        pages = self.block_table[slot_ids, positions // PAGE_SIZE].long()
        return self.last_token[slot_ids], positions, pages * PAGE_SIZE + positions % PAGE_SIZE

    def _decode_attention(self, slots: list[int], positions: torch.Tensor) -> DecodeRows:
        longest = 1 + max(self._host_length[slot] for slot in slots)
        pages = -(-longest // PAGE_SIZE)
        table = self.block_table[torch.tensor(slots, device=self.device), :pages]
        return DecodeRows(table, (positions + 1).int(), longest)

    def _chunk_rows(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in plan.chunks])
        positions = np.concatenate([np.arange(c.start, c.start + len(c.token_ids)) for c in plan.chunks])
        slots = np.repeat([c.slot for c in plan.chunks], [len(c.token_ids) for c in plan.chunks])
        cache_slots = self._host_pages[slots, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        return self._to_device(tokens), self._to_device(positions), self._to_device(cache_slots)

    def _prefill_attention(self, plan: StepPlan) -> PrefillRows:
        ends = [chunk.start + len(chunk.token_ids) for chunk in plan.chunks]
        context = [
            (self._host_pages[chunk.slot, : -(-end // PAGE_SIZE), None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()[
                :end
            ]
            for chunk, end in zip(plan.chunks, ends, strict=True)
        ]
        q_offsets = np.cumsum([0, *(len(chunk.token_ids) for chunk in plan.chunks)]).tolist()
        k_offsets = np.cumsum([0, *ends]).tolist()
        return PrefillRows(q_offsets, k_offsets, self._to_device(np.concatenate(context)))

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
