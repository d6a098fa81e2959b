"""The grouped expert computation that kernels plug into, and its torch reference."""

from typing import Protocol

import torch
import torch.nn.functional as F

from configs.base import ConfigError
from layers.kernels.available import require_triton, triton_runs


class MoEBackend(Protocol):
    """Kernels of the experts. Chosen by name when the engine is built."""

    name: str

    def experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """sum over a row's local experts e of weight * down_e(silu(gate_e x) * up_e x), plus `shared`.

        x [rows, hidden]; expert_ids [rows, k] int64, local, -1 = held by another rank; expert_weights [rows, k] fp32;
        gate_up [experts, 2 * width, hidden], down [experts, hidden, width]; shared [rows, hidden]
        -> [rows, hidden] in x's dtype.
        """


class TorchMoE:
    """The reference: one pair of matmuls for each expert that any row chose; sums in float32, in expert order."""

    name = "torch"

    def experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if x.shape[0] == 1:
            return self._one_row(x, expert_ids[0].tolist(), expert_weights[0].tolist(), gate_up, down, shared)
        k = expert_ids.shape[1]
        flat = expert_ids.flatten()
        order = flat.argsort(stable=True)  # pairs (row, choice) by expert, those of other ranks first
        counts = torch.bincount(flat + 1, minlength=gate_up.shape[0] + 1).tolist()
        order = order[counts[0] :]
        rows = order // k
        outputs = [
            _expert(group, gate_up[expert], down[expert])
            for expert, group in enumerate(x[rows].split(counts[1:]))
            if group.shape[0]
        ]
        out = _start(x, shared)
        if outputs:
            out.index_add_(0, rows, torch.cat(outputs).float() * expert_weights.flatten()[order, None])
        return out.to(x.dtype)

    def _one_row(
        self,
        x: torch.Tensor,
        ids: list[int],
        weights: list[float],
        gate_up: torch.Tensor,
        down: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> torch.Tensor:
        """Decoding one sequence needs no sorting."""
        out = _start(x, shared)
        for expert, weight in sorted(zip(ids, weights, strict=True)):
            if expert >= 0:
                out.add_(_expert(x, gate_up[expert], down[expert]), alpha=weight)
        return out.to(x.dtype)


def _start(x: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    """What experts are added to, float32."""
    if shared is None:
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return shared.to(torch.float32, copy=True)


def _expert(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


class TritonMoE:
    """Grouped matmuls over pairs sorted by expert; sizes depend on shapes alone, so that a CUDA graph can hold it."""

    name = "triton"

    def __init__(self) -> None:
        from layers.kernels.experts import grouped_experts

        self._grouped_experts = grouped_experts

    def experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._grouped_experts(x, expert_ids, expert_weights, gate_up, down, shared)


def make_moe_backend(name: str, device: torch.device) -> MoEBackend:
    """The backend of that name; `auto` is the best that runs on the device. Raises ConfigError for an unknown one, and
    for one that cannot run there."""
    if name == "torch" or (name == "auto" and not triton_runs(device)):
        return TorchMoE()
    if name in ("auto", "triton"):
        require_triton("moe_backend", device)
        return TritonMoE()
    raise ConfigError(f"moe_backend {name!r} is not known: use 'auto', 'torch' or 'triton'")
