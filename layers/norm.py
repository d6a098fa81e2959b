"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467)."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from layers.context import LayerContext
from layers.weights import Weight, empty_parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32. [..., size] -> same shape and dtype."""

    def __init__(self, ctx: LayerContext, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, dtype=ctx.dtype, device=ctx.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return normed.to(x.dtype) * self.weight

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield Weight(f"{prefix}.weight", self.weight)
