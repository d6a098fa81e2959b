"""Linear layers, whole and sharded. Several checkpoint matrices can be stacked by output into one matmul."""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from layers.context import LayerContext
from layers.parallel import Shard
from layers.weights import Weight, empty_parameter


class ReplicatedLinear(nn.Module):
    """y = x W^T with the same W on every rank.

    `parts` maps checkpoint names to output sizes; their rows are stacked in order. x is cast to W's dtype.
    """

    def __init__(self, ctx: LayerContext, in_features: int, parts: Mapping[str, int]) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.weight = empty_parameter(sum(parts.values()), in_features, dtype=ctx.dtype, device=ctx.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight)

    def _shard(self, out_features: int) -> Shard | None:
        return None

    def weights(self, prefix: str) -> Iterator[Weight]:
        row = 0
        for name, out_features in self.parts.items():
            shard = self._shard(out_features)
            rows = shard.length if shard else out_features
            yield Weight(f"{prefix}{name}.weight", self.weight[row : row + rows], shard)
            row += rows


class ColumnParallelLinear(ReplicatedLinear):
    """y_local = x W_local^T: each rank holds `1 / tp_size` of the rows of every part."""

    def __init__(self, ctx: LayerContext, in_features: int, parts: Mapping[str, int]) -> None:
        super().__init__(ctx, in_features, {name: size // ctx.tp.size for name, size in parts.items()})
        self.tp = ctx.tp
        self.parts = dict(parts)

    def _shard(self, out_features: int) -> Shard:
        return self.tp.shard(0, out_features)


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_local W_local^T: each rank holds `1 / tp_size` of the columns.

    `forward` sums over ranks; `partial` leaves that to the caller, who may add other partial sums first.
    """

    def __init__(self, ctx: LayerContext, in_features: int, out_features: int, name: str) -> None:
        super().__init__()
        self.tp = ctx.tp
        self.name = name
        self.in_features = in_features
        self.weight = empty_parameter(out_features, in_features // ctx.tp.size, dtype=ctx.dtype, device=ctx.device)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(self.partial(x))

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield Weight(f"{prefix}{self.name}.weight", self.weight, self.tp.shard(1, self.in_features))
