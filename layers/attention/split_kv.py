"""Attention of paged rows by Shoal's own Triton kernel: split over positions, reduced by the last program to arrive."""

import torch

from configs.engine import PAGE_SIZE
from layers.attention.backend import PagedRows, PrefillRows
from layers.attention.counters import CounterBuffers
from layers.attention.prefill import make_prefill
from layers.kernels.mla import MAX_SPLITS, block_m, mla_decode, workspace_size
from layers.kernels.ops import sm_count

_PROGRAMS_PER_SM = 2


class SplitKVAttention:
    """Lengths are read on the device: nothing is planned, and one captured launch serves any lengths up to its
    bound. The workspace belongs to one stream and is made once, as are the counters."""

    name = "triton"

    def __init__(self, device: torch.device, heads: int, latent: int, max_rows: int, dtype: torch.dtype) -> None:
        sms = sm_count(device)
        self._programs = _PROGRAMS_PER_SM * sms
        self.counters = CounterBuffers(heads, sms, device)
        self.counters.reserve(max_rows)
        self._workspace = torch.empty(workspace_size(self._programs, latent), device=device)
        self._prefill = make_prefill(dtype)

    def decode(
        self, q: torch.Tensor, cache: torch.Tensor, rows: PagedRows, *, scale: float, value_dim: int
    ) -> torch.Tensor:
        table = rows.block_table[:, : rows.pages]
        return self._run(q, cache, rows.lengths, table, rows.per_sequence, rows.max_length, scale, value_dim)

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
        return self._run(q, cache, None, slots, 1, slots.shape[1], scale, value_dim)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PrefillRows, *, scale: float
    ) -> torch.Tensor:
        return self._prefill.prefill(q, k, v, rows, scale=scale)

    def _run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        lengths: torch.Tensor | None,
        table: torch.Tensor,
        per_group: int,
        max_length: int,
        scale: float,
        value_dim: int,
    ) -> torch.Tensor:
        rows, heads, _ = q.shape
        out = q.new_empty(rows, heads, value_dim)
        members = per_group * heads
        groups = rows // per_group * -(-members // block_m(members))
        splits = max(1, min(MAX_SPLITS, self._programs // max(groups, 1), -(-max_length // PAGE_SIZE)))
        counters = self.counters.take(rows).view(torch.int32)
        mla_decode(q, cache, lengths, table, per_group, splits, scale, value_dim, out, self._workspace, counters)
        return out
