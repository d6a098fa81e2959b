"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467)."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from layers.context import LayerContext
from layers.weights import Weight, empty_parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight. [..., size] of any dtype -> float32, which linears cast for their matmul."""

    def __init__(self, ctx: LayerContext, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.fused = ctx.device.type == "cuda"  # F.rms_norm: one kernel on a GPU, a chain of slow ones on a CPU
        self.weight = empty_parameter(size, dtype=torch.float32, device=ctx.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        if self.fused:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
        return x * torch.rsqrt(mean_square + self.eps) * self.weight

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield Weight(f"{prefix}.weight", self.weight)
