"""The attention interface that kernels plug into, what a step tells it about its rows, and the torch reference.

A *row* is a query token of a batch. *Paged* rows attend, in latent space, to the cache entries of their sequence: all
of them, or those that an indexer selected. The rows of prefill chunks follow, packed; they attend to keys and values
expanded from the latents of their sequence, the chunk's own included.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

from configs.engine import PAGE_SIZE

QUERY_TILE = 128
# Cache entries gathered at a time by the reference: bounds its temporary at a few hundred MB.
_GATHER_LIMIT = 1 << 17


@dataclass(frozen=True)
class PagedRows:
    """Rows that attend to the paged cache directly: `per_sequence` neighbouring rows of each sequence, in order of
    position. A decode step has one row a sequence, a verification 1 + drafts, a long prefill chunk one sequence."""

    block_table: torch.Tensor  # [sequences, pages] int32; entries past a sequence's length are valid page numbers
    lengths: torch.Tensor  # [rows] int32, visible positions of each row, its own included
    per_sequence: int
    max_length: int  # bound on lengths, known on the host
    start: int | None = None  # position of the first row, where the host knows that rows are consecutive from there

    @cached_property
    def pages(self) -> int:
        """Pages that any row can see."""
        return -(-self.max_length // PAGE_SIZE)

    @cached_property
    def row_to_table(self) -> torch.Tensor | None:
        """Which block-table row each row uses, [rows] int32; None when row i uses the i-th."""
        if self.per_sequence == 1:
            return None
        sequences = torch.arange(self.block_table.shape[0], dtype=torch.int32, device=self.lengths.device)
        return sequences.repeat_interleave(self.per_sequence)

    @cached_property
    def length_bias(self) -> torch.Tensor:
        """0 on visible positions, -inf past a row's length: [rows, pages * page_size] float32, made once a step."""
        positions = torch.arange(self.pages * PAGE_SIZE, device=self.lengths.device)
        return torch.zeros((), device=self.lengths.device).masked_fill(positions >= self.lengths[:, None], -torch.inf)

    def num_within(self, length: int) -> int:
        """Leading rows known on the host to see no more than `length` positions."""
        return 0 if self.start is None else min(max(length - self.start, 0), self.lengths.shape[0])

    def share(self, rank: int, size: int) -> tuple[int, "PagedRows"]:
        """(number of rows in a full share, rank's share): sequences are dealt out whole, the rows of a single one by
        row. Shares of the last ranks may be smaller, or empty."""
        sequences, rows = self.block_table.shape[0], self.lengths.shape[0]
        if sequences == 1:
            full = -(-rows // size)
            lo, hi = min(rank * full, rows), min((rank + 1) * full, rows)
            start = None if self.start is None else self.start + lo
            return full, PagedRows(self.block_table, self.lengths[lo:hi], hi - lo, self.max_length, start)
        each = -(-sequences // size)
        lo, hi = min(rank * each, sequences), min((rank + 1) * each, sequences)
        n = self.per_sequence
        return each * n, PagedRows(self.block_table[lo:hi], self.lengths[lo * n : hi * n], n, self.max_length)


@dataclass(frozen=True)
class PrefillRows:
    """Packed rows of prefill chunks: chunk i has queries q_offsets[i:i+2] and keys k_offsets[i:i+2], whose last
    (q_offsets[i+1] - q_offsets[i]) positions are the queries' own (causal from there)."""

    q_offsets: list[int]
    k_offsets: list[int]
    context_slots: torch.Tensor  # [k_offsets[-1]] int64, physical cache slots of all the chunks' keys

    @cached_property
    def tiles(self) -> torch.Tensor:
        """The queries in tiles of up to QUERY_TILE, none with rows of two chunks: [tiles, 4] int32, its first row, the
        end of its chunk's rows, its chunk's first key, and the last key that a row sees less the row's number."""
        tiles = [
            (first, q_end, k_start, k_end - q_end)
            for q_start, q_end, k_start, k_end in zip(
                self.q_offsets, self.q_offsets[1:], self.k_offsets, self.k_offsets[1:], strict=False
            )
            for first in range(q_start, q_end, QUERY_TILE)
        ]
        host = torch.tensor(tiles, dtype=torch.int32)
        device = self.context_slots.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@dataclass(frozen=True)
class AttentionBatch:
    """One step's rows: the groups of paged rows in order, then the prefill rows."""

    cache_slots: torch.Tensor  # [rows] int64, where each row's entries are written: page * page_size + offset
    paged: tuple[PagedRows, ...]
    prefill: PrefillRows | None = None


# For each group of paged rows the physical cache slots that each row attends to, [rows, k] int32 ending in -1, or None
# where rows attend to all that they see.
Selection = tuple[torch.Tensor | None, ...]


class AttentionBackend(Protocol):
    """Kernels of the attention core. Chosen by name when the engine is built.

    q [rows, heads, d] meets cache [pages, page_size, d], whose entries' first value_dim channels are the values.
    """

    name: str

    def decode(
        self, q: torch.Tensor, cache: torch.Tensor, rows: PagedRows, *, scale: float, value_dim: int
    ) -> torch.Tensor:
        """Every row over all positions that it sees -> [rows, heads, value_dim]; zeros for a row of length 0."""

    def sparse(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        rows: PagedRows,
        *,
        scale: float,
        value_dim: int,
    ) -> torch.Tensor:
        """Every row over its own slots [rows, k] int32: min(its length, k) of them in any order, then -1
        -> [rows, heads, value_dim]; zeros for a row of length 0."""

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PrefillRows, *, scale: float
    ) -> torch.Tensor:
        """q [rows, heads, d], k [context, heads, d], v [context, heads, dv] -> [rows, heads, dv], causal per chunk."""


class TorchAttention:
    """The reference: plain torch, scores and softmax in float32."""

    name = "torch"

    def decode(
        self, q: torch.Tensor, cache: torch.Tensor, rows: PagedRows, *, scale: float, value_dim: int
    ) -> torch.Tensor:
        sequences, n, pages = rows.block_table.shape[0], rows.per_sequence, rows.pages
        heads = q.shape[1]
        at_once = max(1, _GATHER_LIMIT // (pages * PAGE_SIZE))
        grouped = q.view(sequences, n * heads, -1)
        bias = rows.length_bias.view(sequences, n, 1, -1)
        parts = []
        for lo in range(0, sequences, at_once):
            page_ids = rows.block_table[lo : lo + at_once, :pages].flatten()
            entries = cache.index_select(0, page_ids).view(-1, pages * PAGE_SIZE, cache.shape[-1])
            scores = torch.bmm(grouped[lo : lo + at_once], entries.transpose(1, 2)).float()
            biased = torch.add(bias[lo : lo + at_once], scores.unflatten(1, (n, heads)), alpha=scale)
            parts.append(torch.bmm(_probabilities(biased).to(q.dtype).flatten(1, 2), entries[..., :value_dim]))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(sequences * n, heads, value_dim)

    def sparse(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        rows: PagedRows,
        *,
        scale: float,
        value_dim: int,
    ) -> torch.Tensor:
        flat = cache.view(-1, cache.shape[-1])
        k = slots.shape[1]
        at_once = max(1, _GATHER_LIMIT // k)
        parts = []
        for lo in range(0, q.shape[0], at_once):
            chosen = slots[lo : lo + at_once]
            entries = flat.index_select(0, chosen.clamp(min=0).flatten()).view(-1, k, flat.shape[-1])
            scores = torch.bmm(q[lo : lo + at_once], entries.transpose(1, 2)).float() * scale
            probs = _probabilities(scores.masked_fill((chosen < 0)[:, None], -torch.inf))
            parts.append(torch.bmm(probs.to(q.dtype), entries[..., :value_dim]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PrefillRows, *, scale: float
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        for i in range(len(rows.q_offsets) - 1):
            q_span = slice(rows.q_offsets[i], rows.q_offsets[i + 1])
            k_span = slice(rows.k_offsets[i], rows.k_offsets[i + 1])
            queries, keys = q_span.stop - q_span.start, k_span.stop - k_span.start
            mask = None
            if queries < keys and queries > 1:
                mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
            attended = F.scaled_dot_product_attention(
                q[q_span].transpose(0, 1)[None],
                k[k_span].transpose(0, 1)[None],
                v[k_span].transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=queries == keys,
                scale=scale,
            )
            out[q_span] = attended[0].transpose(0, 1)
        return out


def _probabilities(scores: torch.Tensor) -> torch.Tensor:
    """softmax over the last dimension; zeros where all scores are -inf. Subtracting a finite maximum keeps exp(-inf)
    at 0 where softmax would give NaN."""
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)).exp_()
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
