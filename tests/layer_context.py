"""What layers are built with in tests: torch backends on the CPU, and ranks that are not really there."""

import torch
from torch import nn

from layers.attention.backend import TorchAttention
from layers.attention.index_cache import PlainIndexKeys
from layers.attention.topk import TorchTopK
from layers.context import LayerContext, SparseContext
from layers.moe.backend import TorchMoE
from layers.ops import TorchOps
from layers.parallel import TensorParallel

CPU = torch.device("cpu")


class LonelyRank(TensorParallel):
    """A rank whose peers do not run: sums over ranks are left to the test."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def layer_context(
    tp: TensorParallel | None = None, dtype: torch.dtype = torch.float32, index_dim: int = 32
) -> LayerContext:
    """A context on the CPU; one rank unless told otherwise."""
    sparse = SparseContext(TorchTopK("small"), "replicated", PlainIndexKeys(index_dim, dtype))
    return LayerContext(tp or TensorParallel(), dtype, CPU, TorchAttention(), TorchMoE(), TorchOps(), sparse)


def fill(module: nn.Module, *, seed: int) -> None:
    """Random values for every parameter, of a scale that keeps activations near 1."""
    print(f"parameters of seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(values * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1 + 0.1 * values)
