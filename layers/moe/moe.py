"""A mixture-of-experts layer: router, this rank's experts, and its share of the shared expert."""

from collections.abc import Iterator

import torch
from torch import nn

from configs.model import MoEConfig
from layers.context import LayerContext
from layers.mlp import MLP
from layers.moe.router import Router
from layers.weights import Weight, empty_parameter


class MoE(nn.Module):
    """sum over chosen experts of weight * expert(x), plus shared(x). [rows, hidden] -> [rows, hidden].

    Every rank sees every row, computes what its experts (or their slices) add, and one all-reduce sums it all.
    """

    def __init__(self, ctx: LayerContext, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.tp = ctx.tp
        self.backend = ctx.moe
        self.gate = Router(ctx, config.router, hidden_size)
        self.width = config.intermediate_size
        self.local = ctx.tp.expert_range(config.router.num_experts)
        width = config.intermediate_size // ctx.tp.expert_tp_size
        self.gate_up = empty_parameter(len(self.local), 2 * width, hidden_size, dtype=ctx.dtype, device=ctx.device)
        self.down = empty_parameter(len(self.local), hidden_size, width, dtype=ctx.dtype, device=ctx.device)
        shared = config.shared_intermediate_size
        self.shared_experts = MLP(ctx, hidden_size, shared) if shared else None

    def forward(self, x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        """`exact`: x in float32, unrounded, for the router: rounding flips its choices more often."""
        expert_ids, expert_weights = self.gate(exact)
        if self.tp.ep_size > 1:
            expert_ids = expert_ids - self.local.start
            expert_ids = expert_ids.masked_fill((expert_ids < 0) | (expert_ids >= len(self.local)), -1)
        shared = self.shared_experts.partial(x) if self.shared_experts is not None else None
        return self.tp.all_reduce(self.backend.experts(x, expert_ids, expert_weights, self.gate_up, self.down, shared))

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.gate.weights(f"{prefix}gate")
        half = self.gate_up.shape[1] // 2
        rows, columns = self.tp.expert_shard(0, self.width), self.tp.expert_shard(1, self.width)
        for i, expert in enumerate(self.local):
            name = f"{prefix}experts.{expert}."
            yield Weight(f"{name}gate_proj.weight", self.gate_up[i, :half], rows)
            yield Weight(f"{name}up_proj.weight", self.gate_up[i, half:], rows)
            yield Weight(f"{name}down_proj.weight", self.down[i], columns)
        if self.shared_experts is not None:
            yield from self.shared_experts.weights(f"{prefix}shared_experts.")
