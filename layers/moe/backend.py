"""The grouped expert computation that kernels plug into, and its torch reference."""

from typing import Protocol

import torch
import torch.nn.functional as F

from configs.base import ConfigError


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
    ) -> torch.Tensor:
        """sum over a row's local experts e of weight * down_e(silu(gate_e x) * up_e x).

        x [rows, hidden]; expert_ids [rows, k] int64, local, -1 = held by another rank; expert_weights [rows, k] fp32;
        gate_up [experts, 2 * width, hidden], down [experts, hidden, width] -> [rows, hidden] in x's dtype.
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
    ) -> torch.Tensor:
        k = expert_ids.shape[1]
        flat = expert_ids.flatten()
        order = flat.argsort(stable=True)  # pairs (row, choice) by expert, those of other ranks first
        counts = torch.bincount(flat + 1, minlength=gate_up.shape[0] + 1).tolist()
        order = order[counts[0] :]
        rows = order // k
        inputs = x[rows]
        outputs = []
        for expert, group in enumerate(inputs.split(counts[1:])):
            if group.shape[0]:
                gate, up = F.linear(group, gate_up[expert]).chunk(2, dim=-1)
                outputs.append(F.linear(F.silu(gate) * up, down[expert]))
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if outputs:
            out.index_add_(0, rows, torch.cat(outputs).float() * expert_weights.flatten()[order, None])
        return out.to(x.dtype)


def make_moe_backend(name: str) -> MoEBackend:
    """The backend of that name; `auto` is the best that runs here. Raises ConfigError for an unknown one."""
    if name in ("auto", "torch"):
        return TorchMoE()
    raise ConfigError(f"moe_backend {name!r} is not known: use 'auto' or 'torch'")
