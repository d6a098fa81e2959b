"""Who attends for the rows of prefill chunks on a GPU."""

import torch

from layers.attention.backend import QUERY_TILE, PrefillRows, TorchAttention
from layers.kernels.prefill import prefill_attention


class TritonPrefill:
    """All chunks in one launch, whatever their lengths. (torch's attention on Hopper is cuDNN's, which is as fast where
    lengths repeat, but takes some 65 ms to prepare for each new one.)"""

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PrefillRows, *, scale: float
    ) -> torch.Tensor:
        return prefill_attention(q, k, v, rows.tiles, QUERY_TILE, scale)


def make_prefill(dtype: torch.dtype) -> TritonPrefill | TorchAttention:
    """For a compute type. float32, in which models run on a GPU to be compared, goes through torch."""
    return TorchAttention() if dtype == torch.float32 else TritonPrefill()
