"""The router of a mixture-of-experts layer."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from configs.model import RouterConfig
from layers.context import LayerContext
from layers.moe.routing import Routing
from layers.weights import Weight, empty_parameter


class Router(nn.Module):
    """Scores and choice in float32 whatever the model's dtype: rounding here sends tokens to other experts."""

    def __init__(self, ctx: LayerContext, config: RouterConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.ops = ctx.ops
        self.weight = empty_parameter(config.num_experts, hidden_size, dtype=torch.float32, device=ctx.device)
        self.bias = (
            empty_parameter(config.num_experts, dtype=torch.float32, device=ctx.device)
            if config.method == "noaux_tc"
            else None
        )

    def forward(self, x: torch.Tensor) -> Routing:
        """x [rows, hidden] float32 -> Routing."""
        return self.ops.route(F.linear(x, self.weight), self.config, self.bias)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield Weight(f"{prefix}.weight", self.weight)
        if self.bias is not None:
            yield Weight(f"{prefix}.e_score_correction_bias", self.bias)
