"""Root-mean-square normalisation of the residual stream."""

from collections.abc import Iterator

import torch
from torch import nn

from layers.context import LayerContext
from layers.ops import Normed
from layers.weights import Weight, empty_parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32."""

    def __init__(self, ctx: LayerContext, size: int, eps: float, dtype: torch.dtype | None = None) -> None:
        """`dtype`: of the result; the compute type unless given."""
        super().__init__()
        self.eps = eps
        self.ops = ctx.ops
        self.dtype = dtype or ctx.dtype
        self.weight = empty_parameter(size, dtype=torch.float32, device=ctx.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, size] -> [rows, size]."""
        return self.ops.add_norm(x, None, self.weight, self.eps, self.dtype).out

    def add(self, x: torch.Tensor, delta: torch.Tensor | None, *, exact: bool = False) -> Normed:
        """The norm of x + delta, and the sum itself, which x [rows, size] float32 may be overwritten with."""
        return self.ops.add_norm(x, delta, self.weight, self.eps, self.dtype, exact=exact)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield Weight(f"{prefix}.weight", self.weight)
