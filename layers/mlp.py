"""The gated feed-forward network."""

from collections.abc import Iterator

import torch
from torch import nn

from layers.context import LayerContext
from layers.linear import ColumnParallelLinear, RowParallelLinear
from layers.weights import Weight


class MLP(nn.Module):
    """down(silu(gate x) * up x), split over ranks by its width. [rows, hidden] -> [rows, hidden]."""

    def __init__(self, ctx: LayerContext, hidden_size: int, width: int) -> None:
        super().__init__()
        self.ops = ctx.ops
        self.gate_up_proj = ColumnParallelLinear(ctx, hidden_size, {"gate_proj": width, "up_proj": width})
        self.down_proj = RowParallelLinear(ctx, width, hidden_size, "down_proj")

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.silu_mul(self.gate_up_proj(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's share of the sum; the caller reduces."""
        return self.down_proj.partial(self._inner(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._inner(x))

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.gate_up_proj.weights(prefix)
        yield from self.down_proj.weights(prefix)
