"""The small operations between a layer's matmuls, which GPUs want fused, and their torch reference."""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from configs.base import ConfigError
from configs.model import RouterConfig
from layers.attention.backend import PagedRows
from layers.attention.index_cache import IndexKeyFormat
from layers.attention.index_scores import index_scores
from layers.kernels.available import require_triton, triton_runs
from layers.moe.routing import Routing, route
from layers.rotary import Rotation, rotate


class Normed(NamedTuple):
    """What a norm leaves behind."""

    x: torch.Tensor  # [rows, size] float32, the residual stream with what was to be added
    out: torch.Tensor  # [rows, size], normed, in the type asked for
    exact: torch.Tensor | None  # the same in float32, where asked for


class Ops(Protocol):
    """Chosen by name when the engine is built."""

    name: str

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
        """RMS norm of x + delta (Zhang & Sennrich 2019, arXiv 1910.07467) in float32: x [rows, size] (rows may be
        strided; may be overwritten with the sum), delta [rows, size] or None, weight [size] float32."""

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
        """q_out = q rotated; the cache entry of each row = (RMS norm of its latent, its rotated rope key).

        q, q_out [rows, heads, rope], views, maybe the same one, None = no queries; kv [rows, latent + rope]; weight
        [latent] float32; cache [entries, latent + rope]; slots [rows] int64.
        """

    def rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotates the first channels of x [rows, heads, d], as many as the rotation has, maybe in place."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [rows, 2 * width], gate first -> [rows, width]."""

    def route(self, logits: torch.Tensor, config: RouterConfig, bias: torch.Tensor | None) -> Routing:
        """See `layers.moe.routing.route`."""

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
        """out[t, s] = sum_h gates[t, h] relu(q[t, h] . key s of t's sequence) at the positions that t sees; others may
        hold anything.

        q [n, heads, d] and gates [n, heads] float32 of the rows after the first `skip`; cache: index keys in format
        `keys`; out [n, pages * page_size] float32.
        """


class TorchOps:
    """The reference."""

    name = "torch"

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
        x = x.float() if delta is None else x + delta
        if x.device.type == "cpu":  # F.rms_norm is one kernel on a GPU, a chain of slow ones on a CPU
            mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
            normed = x * torch.rsqrt(mean_square + eps) * weight
        else:
            normed = F.rms_norm(x, weight.shape, weight, eps)
        return Normed(x, normed.to(dtype), normed if exact else None)

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
        latent, k_rope = kv.split([weight.shape[0], kv.shape[1] - weight.shape[0]], dim=-1)
        key = k_rope[:, None]
        turned = rotate(key if q is None else torch.cat((q, key), dim=1), rotation)  # one for all heads
        normed = self.add_norm(latent, None, weight, eps, kv.dtype).out
        cache.index_copy_(0, slots, torch.cat((normed, turned[:, -1]), dim=-1))
        if q_out is not None:
            q_out.copy_(turned[:, :-1])

    def rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        rope = 2 * rotation.turn.shape[-1]
        return torch.cat((rotate(x[..., :rope], rotation), x[..., rope:]), dim=-1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def route(self, logits: torch.Tensor, config: RouterConfig, bias: torch.Tensor | None) -> Routing:
        return route(logits, config, bias)

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
        pages = rows.block_table[:, : rows.pages].flatten()
        index_scores(q, gates, keys.load(cache, pages), out, rows.block_table.shape[0])


def make_ops(name: str, device: torch.device) -> Ops:
    """The implementation of that name (auto | torch | triton); `auto` is Triton on a GPU that has it.

    Raises ConfigError for an unknown one, and for Triton where it cannot run.
    """
    if name not in ("auto", "torch", "triton"):
        raise ConfigError(f"kernel_backend {name!r} is not known: use 'auto', 'torch' or 'triton'")
    if name == "torch" or (name == "auto" and not triton_runs(device)):
        return TorchOps()
    require_triton("kernel_backend", device)
    from layers.kernels.ops import TritonOps

    return TritonOps(device)
