"""How a layer says which checkpoint tensors fill its parameters, so that loading needs no knowledge of layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from layers.parallel import Shard


@dataclass(frozen=True)
class Weight:
    """The (slice of the) checkpoint tensor `name` goes into `target`, a view of a parameter of the slice's shape."""

    name: str
    target: torch.Tensor
    shard: Shard | None = None


class HasWeights(Protocol):
    """A module that lists the checkpoint tensors it is filled from."""

    def weights(self, prefix: str) -> Iterator[Weight]: ...


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised inference parameter; the loader checks that every element gets filled."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
