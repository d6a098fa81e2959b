"""Who owns what part of a model: the ranks' arithmetic and the few collectives layers need, apart from the maths."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Shard:
    """A rank's slice of one dimension, `full` entries long, of a checkpoint tensor."""

    dim: int
    start: int
    length: int
    full: int


@dataclass(frozen=True)
class TensorParallel:
    """One rank's place in a group of `size` ranks that all see every row.

    Experts are partitioned over `ep_size` groups of neighbouring ranks; the ranks of one group split each of their
    experts by its intermediate width.
    """

    rank: int = 0
    size: int = 1
    ep_size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def expert_tp_size(self) -> int:
        return self.size // self.ep_size

    @property
    def ep_rank(self) -> int:
        return self.rank // self.expert_tp_size

    def shard(self, dim: int, full: int) -> Shard:
        """This rank's share of a dimension of `full` entries, split over all ranks."""
        length = full // self.size
        return Shard(dim, self.rank * length, length, full)

    def expert_range(self, num_experts: int) -> range:
        """The experts this rank holds (whole or in part)."""
        count = num_experts // self.ep_size
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)

    def expert_shard(self, dim: int, full: int) -> Shard:
        """This rank's share of an expert's intermediate dimension."""
        length = full // self.expert_tp_size
        return Shard(dim, self.rank % self.expert_tp_size * length, length, full)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; the same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenates ranks' [rows, n] along the last dimension -> [rows, size * n]."""
        if self.size == 1:
            return x
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(parts), x.contiguous(), group=self.group)
        return parts.permute(1, 0, 2).reshape(x.shape[0], -1)

    def all_gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Stacks ranks' [rows, ...], equally many on each -> [size * rows, ...]."""
        if self.size == 1:
            return x
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(parts), x.contiguous(), group=self.group)
        return parts.flatten(0, 1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in place, on every rank."""
        if self.size > 1:
            dist.broadcast(x, group_src=0, group=self.group)
        return x
