"""A decoder layer, as the model's layers and the MTP modules' are made."""

from collections.abc import Iterator

import torch
from torch import nn

from configs.model import LayerSpec, ModelConfig
from layers.attention.backend import AttentionBatch, Selection
from layers.attention.mla import MLA, LayerCache
from layers.context import LayerContext
from layers.mlp import MLP
from layers.moe.moe import MoE
from layers.norm import RMSNorm
from layers.rotary import Rotation
from layers.weights import Weight


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)).

    The residual stream is float32 whatever the compute type: rounding it after every addition costs more accuracy
    than all else (it doubles the error of bf16 log-probabilities), and it is small beside the weights.
    """

    def __init__(self, ctx: LayerContext, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.shares_selection = spec.attention == "dsa_shared"
        self.input_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLA(ctx, config, spec.attention)
        self.post_attention_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.mlp: MLP | MoE
        if spec.feed_forward == "moe" and config.moe is not None:
            self.mlp = MoE(ctx, config.moe, config.hidden_size)
        else:
            self.mlp = MLP(ctx, config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rotation: Rotation,
        cache: LayerCache,
        batch: AttentionBatch,
        selection: Selection | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Selection | None]:
        """x [rows, hidden] float32, to which `delta` has yet to be added (x may be overwritten) -> the same pair after
        the layer, and the selection that it attended to."""
        x, normed, _ = self.input_layernorm.add(x, delta)
        attended, selection = self.self_attn(normed, rotation, cache, batch, selection)
        if isinstance(self.mlp, MoE):
            x, normed, exact = self.post_attention_layernorm.add(x, attended, exact=True)
            return x, self.mlp(normed, exact), selection
        x, normed, _ = self.post_attention_layernorm.add(x, attended)
        return x, self.mlp(normed), selection

    def store(self, x: torch.Tensor, rotation: Rotation, cache: LayerCache, slots: torch.Tensor) -> None:
        """Only writes the rows' cache entries."""
        self.self_attn.store(self.input_layernorm(x), rotation, cache, slots)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.input_layernorm.weights(f"{prefix}input_layernorm")
        yield from self.self_attn.weights(f"{prefix}self_attn.")
        yield from self.post_attention_layernorm.weights(f"{prefix}post_attention_layernorm")
        yield from self.mlp.weights(f"{prefix}mlp.")
