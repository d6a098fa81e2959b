"""What every layer of one rank is built with."""

from dataclasses import dataclass
from typing import Literal

import torch

from layers.attention.backend import AttentionBackend
from layers.attention.index_cache import IndexKeyFormat
from layers.attention.topk import TopKBackend
from layers.moe.backend import MoEBackend
from layers.ops import Ops
from layers.parallel import TensorParallel


@dataclass(frozen=True)
class LayerContext:
    """The rank's place, the compute type, and the backends chosen once at construction."""

    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device
    attention: AttentionBackend
    moe: MoEBackend
    ops: Ops
    sparse: "SparseContext | None" = None


@dataclass(frozen=True)
class SparseContext:
    """What indexers need besides: who selects, with what, and how index keys are kept."""

    topk: TopKBackend
    exchange: Literal["replicated", "leader", "sharded"]
    keys: IndexKeyFormat
