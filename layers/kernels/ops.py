"""`layers.ops.Ops` in Triton."""

import torch

from configs.model import RouterConfig
from layers.attention.backend import PagedRows
from layers.attention.index_cache import IndexKeyFormat
from layers.kernels import rows as kernels
from layers.kernels.index_scores import paged_index_scores
from layers.kernels.route import route
from layers.moe.routing import Routing
from layers.ops import Normed
from layers.rotary import Rotation

_SCORE_PROGRAMS_PER_SM = 8


class TritonOps:
    """One kernel for each operation."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        self._score_programs = _SCORE_PROGRAMS_PER_SM * sm_count(device)

    def add_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
        *,
        exact: bool = False,
    ) -> Normed:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        unrounded = torch.empty(x.shape, dtype=torch.float32, device=x.device) if exact else None
        kernels.add_norm(x, delta, weight, eps, out, unrounded)
        return Normed(x, out, unrounded)

    def rotate_and_store(
        self,
        q: torch.Tensor | None,
        q_out: torch.Tensor | None,
        kv: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rotation: Rotation,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        kernels.rotate_and_store(q, q_out, kv, weight, eps, *rotation, cache, slots)

    def rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        kernels.rotate_in_place(x, *rotation)
        return x

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return kernels.silu_mul(gate_up)

    def route(self, logits: torch.Tensor, config: RouterConfig, bias: torch.Tensor | None) -> Routing:
        return Routing(*route(logits, config, bias))

    def index_scores(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        keys: IndexKeyFormat,
        cache: torch.Tensor,
        rows: PagedRows,
        skip: int,
        out: torch.Tensor,
    ) -> None:
        table = rows.block_table[:, : rows.pages]
        lengths = rows.lengths[skip:]
        paged_index_scores(q, gates, cache, table, lengths, rows.per_sequence, out, self._score_programs)


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
