"""What every layer of one rank is built with."""

from dataclasses import dataclass

import torch

from layers.attention.backend import AttentionBackend
from layers.moe.backend import MoEBackend
from layers.parallel import TensorParallel


@dataclass(frozen=True)
class LayerContext:
    """The rank's place, the compute type, and the backends chosen once at construction."""

    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device
    attention: AttentionBackend
    moe: MoEBackend
