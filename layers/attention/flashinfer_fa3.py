"""FlashInfer's persistent MLA kernel for Hopper (FlashAttention-3 style), planned on the device.

FlashInfer's own `plan` takes lengths from the host and bakes them into the plan, through one pinned buffer that the
next plan overwrites. A step here may be launched before the host knows its lengths, so `plan` is called once, for the
layout, and `layers.kernels.mla_plan` writes the lists. Every row is a query of its own, never masked: the kernel gives
NaN for rows that a causal mask hides in a whole tile.
"""

from importlib import import_module, metadata
from typing import Any

import torch

from configs.base import ConfigError
from configs.model import MLAConfig
from layers.attention.backend import PagedRows, PrefillRows
from layers.attention.flashinfer_version import require_flashinfer
from layers.attention.prefill import TritonPrefill
from layers.kernels.available import require_triton
from layers.kernels.mla_plan import TILE, PlanLayout, write_plan

NAME = "flashinfer_fa3"
MINIMUM_VERSION = "0.6.18"
_WORKSPACE_BYTES = 32 << 20  # twice a tile of partial results for each block of the grid: 17 MB on 132 SMs
_MAX_ROWS = 8192  # of one plan; with as many pieces more as there are clusters they must stay below _MAX_WORKS
_MAX_WORKS = 16384
_LATENT, _ROPE = 512, 64
_MAX_HEADS = 128


class FlashInferFA3:
    """The absorbed attention of bfloat16 models with 512 + 64 channels. The plan of a PagedRows serves all layers of
    its step; workspaces belong to one stream and are made once."""

    name = NAME

    def __init__(self, wrapper: Any, heads: int, scale: float, device: torch.device) -> None:
        """`wrapper`: flashinfer.mla.BatchMLAPagedAttentionWrapper. Raises ConfigError where FlashInfer's plans are not
        laid out as known."""
        self._heads = heads
        self._scale = scale
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._runs = {size: _planned(wrapper, workspace, heads, scale, size, device) for size in (1, TILE)}
        self._cluster_size, self._num_clusters, self._layout = _layout(self._runs[1]._plan_info)
        # Dense and sparse plans lie in workspaces of their own: a step may alternate between them layer by layer.
        self._plans = {size: run._int_workspace_buffer.view(torch.int32) for size, run in self._runs.items()}
        self._planned: dict[int, tuple[PagedRows, int, int]] = {}
        self._prefill = TritonPrefill()

    def decode(
        self, q: torch.Tensor, cache: torch.Tensor, rows: PagedRows, *, scale: float, value_dim: int
    ) -> torch.Tensor:
        self._check_scale(scale)
        return self._run(TILE, q, cache, rows, rows.block_table, rows.per_sequence, rows.max_length, value_dim)

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
        self._check_scale(scale)
        entries = cache.view(-1, 1, cache.shape[-1])
        return self._run(1, q, entries, rows, slots, 1, slots.shape[1], value_dim)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PrefillRows, *, scale: float
    ) -> torch.Tensor:
        return self._prefill.prefill(q, k, v, rows, scale=scale)

    def _run(
        self,
        page_size: int,
        q: torch.Tensor,
        cache: torch.Tensor,
        rows: PagedRows,
        table: torch.Tensor,
        rows_per_table: int,
        limit: int,
        value_dim: int,
    ) -> torch.Tensor:
        """Rows over pages of `page_size` that table lists, rows_per_table neighbours by one of its rows."""
        out = q.new_empty(*q.shape[:2], value_dim)
        run = self._runs[page_size]
        latents, ropes = cache[..., :value_dim], cache[..., value_dim:]
        step = _MAX_ROWS - _MAX_ROWS % min(rows_per_table, _MAX_ROWS)
        for lo in range(0, q.shape[0], step):
            part = slice(lo, lo + step)
            tables = table[lo // rows_per_table :]
            self._plan(page_size, rows, part, tables, rows_per_table, limit)
            run._kv_indices_buf = tables
            run.run(q[part, :, :value_dim], q[part, :, value_dim:], latents, ropes, out=out[part])
        return out

    def _plan(
        self, page_size: int, rows: PagedRows, part: slice, table: torch.Tensor, rows_per_table: int, limit: int
    ) -> None:
        """Writes the plan of a part of the rows, unless it is there: a step's layers attend alike."""
        planned = self._planned.get(page_size)
        if planned is not None and planned[0] is rows and planned[1:] == (part.start, table.stride(0)):
            return
        write_plan(
            self._plans[page_size],
            self._layout,
            rows.lengths[part],
            limit,
            rows_per_table,
            table.stride(0),
            self._heads,
            self._cluster_size,
            self._num_clusters,
        )
        self._planned[page_size] = rows, part.start, table.stride(0)

    def _check_scale(self, scale: float) -> None:
        if scale != self._scale:
            raise ValueError(f"the plans are made for a scale of {self._scale}, not {scale}")


def _planned(wrapper: Any, workspace: torch.Tensor, heads: int, scale: float, page_size: int, dev: torch.device) -> Any:
    """A wrapper with a plan for one row, which fixes everything but the lists."""
    run = wrapper(workspace, backend="fa3")
    one = torch.ones(1, dtype=torch.int32)
    ends = torch.tensor([0, 1], dtype=torch.int32)
    dtype = torch.bfloat16
    run.plan(ends, ends, one.to(dev), one, heads, _LATENT, _ROPE, page_size, False, scale, dtype, dtype)
    torch.cuda.synchronize(dev)  # the plan's copy must not overtake the first list that is written
    return run


def _layout(plan_info: Any) -> tuple[int, int, PlanLayout]:
    """Cluster size, number of clusters and layout of a plan, as MLAPlanInfo lists them (flashinfer, scheduler.cuh)."""
    info = [int(number) for number in plan_info]
    if len(info) != 18 or info[0] not in (1, 2) or info[2] != 0 or info[3] != 4 * _MAX_WORKS:
        version = metadata.version("flashinfer-python")
        raise ConfigError(f"attention_backend {NAME!r} does not know the plans of FlashInfer {version}: use 'triton'")
    return info[0], info[1], PlanLayout(*(offset // 4 for offset in info[2:16]))


def make_flashinfer_fa3(mla: MLAConfig, heads: int, dtype: torch.dtype, device: torch.device) -> FlashInferFA3:
    """Raises ConfigError that says what is wrong: no Hopper GPU, FlashInfer or Triton not installed or too old, a model
    or compute type that the kernel does not take."""
    require_triton("attention_backend", device)
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise ConfigError(f"attention_backend {NAME!r} needs a Hopper GPU (SM90): use 'triton'")
    if dtype != torch.bfloat16 or (mla.kv_lora_rank, mla.qk_rope_head_dim) != (_LATENT, _ROPE) or heads > _MAX_HEADS:
        raise ConfigError(
            f"attention_backend {NAME!r} takes bfloat16, kv_lora_rank {_LATENT}, qk_rope_head_dim {_ROPE} and up to "
            f"{_MAX_HEADS} heads a rank, not {dtype}, {mla.kv_lora_rank}, {mla.qk_rope_head_dim}, {heads}: use 'triton'"
        )
    require_flashinfer(f"attention_backend {NAME!r}", MINIMUM_VERSION, "'triton'")
    try:
        wrapper = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
        return FlashInferFA3(wrapper, heads, mla.softmax_scale, device)
    except ConfigError:
        raise
    except Exception as error:  # FlashInfer builds the kernel here, and anything may be missing for that
        raise ConfigError(
            f"attention_backend {NAME!r}: FlashInfer could not load its kernel ({type(error).__name__}: {error}): "
            "use 'triton'"
        ) from error
