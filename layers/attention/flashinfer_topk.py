"""FlashInfer's top-k as selection backends. FlashInfer is optional: nothing here imports it before it is asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

import torch

from configs.base import ConfigError
from layers.attention.flashinfer_version import require_flashinfer
from layers.attention.topk import TieBreak, TopKMetadata, translate

MINIMUM_VERSION = "0.6.18"  # the first whose page-table transform takes pages, and buffers for both outputs
# The kernel that graphs can replay and that breaks ties: one block a row, its candidates in shared memory.
MAX_K = 2048
SHARED_MEMORY = 128 << 10
_TIE_BREAKS: dict[TieBreak, int] = {"none": 0, "small": 1, "large": 2}

Route = Literal["flashinfer", "flashinfer_unfused"]


class FusedTopK:
    """Selection and page-table transform in one kernel; `transform` is flashinfer.top_k_page_table_transform."""

    name = "flashinfer"
    needs_plan = False

    def __init__(self, transform: Callable[..., Any], tie_break: TieBreak, *, deterministic: bool) -> None:
        self._transform = transform
        self._tie_break = _TIE_BREAKS[tie_break]
        self._deterministic = deterministic

    def select(self, scores: torch.Tensor, metadata: TopKMetadata, physical: torch.Tensor, raw: torch.Tensor) -> None:
        self._transform(
            scores,
            metadata.page_table.contiguous(),
            metadata.lengths.contiguous(),
            physical.shape[1],
            row_to_batch=metadata.row_to_table,
            deterministic=self._deterministic,
            tie_break=self._tie_break,
            dsa_graph_safe=True,
            row_starts=metadata.row_starts,
            page_table_row_starts=metadata.table_starts,
            page_size=metadata.page_size,
            out=physical,
            out_raw_indices=raw,
        )


class UnfusedTopK:
    """Selection with flashinfer.top_k (`top_k`), then order and page-table transform in torch. To compare with."""

    name = "flashinfer_unfused"
    needs_plan = False

    def __init__(self, top_k: Callable[..., Any], tie_break: TieBreak, *, deterministic: bool) -> None:
        self._top_k = top_k
        self._tie_break = _TIE_BREAKS[tie_break]
        self._deterministic = deterministic

    def select(self, scores: torch.Tensor, metadata: TopKMetadata, physical: torch.Tensor, raw: torch.Tensor) -> None:
        width, k = scores.shape[1], physical.shape[1]
        columns = torch.arange(max(width, k), device=scores.device, dtype=torch.int32)
        lengths = metadata.lengths[:, None]
        starts = 0 if metadata.row_starts is None else metadata.row_starts[:, None]
        visible = (columns[:width] >= starts) & (columns[:width] < starts + lengths)
        # A visible -inf must win over what is out of sight.
        lowest = torch.finfo(scores.dtype).min
        seen = torch.where(visible, scores.clamp(min=lowest), -torch.inf)
        everything = torch.where(columns[:k] < lengths, columns[:k], -1)
        if width <= k:
            raw.copy_(everything)
        else:
            _, chosen = self._top_k(
                seen, k, deterministic=self._deterministic, tie_break=self._tie_break, dsa_graph_safe=True
            )
            ordered = chosen.sort(dim=-1).values.int() - starts
            torch.where(lengths > k, ordered, everything, out=raw)
        translate(raw, metadata, physical)


def make_flashinfer_topk(
    name: Route, k: int, tie_break: TieBreak, deterministic: bool, device: torch.device
) -> FusedTopK | UnfusedTopK:
    """Resolves the route once. Raises ConfigError that says what is wrong: no GPU, FlashInfer not installed or too
    old, a k or a card that its graph-safe kernel cannot take."""
    if device.type != "cuda":
        raise ConfigError(f"topk_backend {name!r} needs a GPU, this worker runs on {device.type}: use 'torch'")
    require_flashinfer(f"topk_backend {name!r}", MINIMUM_VERSION, "'torch'")
    if k > MAX_K:
        raise ConfigError(f"topk_backend {name!r} selects at most {MAX_K}, index_topk is {k}: use 'torch'")
    shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    if shared < SHARED_MEMORY:
        raise ConfigError(
            f"topk_backend {name!r} needs {SHARED_MEMORY >> 10} KiB of shared memory a multiprocessor, "
            f"this card has {shared >> 10}: use 'torch'"
        )
    flashinfer = import_module("flashinfer")
    if name == "flashinfer":
        return FusedTopK(flashinfer.top_k_page_table_transform, tie_break, deterministic=deterministic)
    return UnfusedTopK(flashinfer.top_k, tie_break, deterministic=deterministic)
