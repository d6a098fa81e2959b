"""The decoder: embed -> layers -> norm -> logits, built from a ModelConfig's layer specs."""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from configs.model import LayerSpec, ModelConfig
from layers.attention.backend import AttentionBatch
from layers.attention.mla import MLA
from layers.context import LayerContext
from layers.embedding import VocabParallelEmbedding, VocabParallelHead
from layers.mlp import MLP
from layers.moe.moe import MoE
from layers.norm import RMSNorm
from layers.rotary import RotaryEmbedding, Rotation
from layers.weights import Weight

_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(mlp\.experts\.(?P<expert>\d+)\.(gate|up|down)_proj\.weight$)?")


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)).

    The residual stream is float32 whatever the compute type: rounding it after every addition costs more accuracy
    than all else (it doubles the error of bf16 log-probabilities), and it is small beside the weights.
    """

    def __init__(self, ctx: LayerContext, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLA(ctx, config)
        self.post_attention_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.mlp: MLP | MoE
        if spec.feed_forward == "moe" and config.moe is not None:
            self.mlp = MoE(ctx, config.moe, config.hidden_size)
        else:
            self.mlp = MLP(ctx, config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, rotation: Rotation, cache: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, cache, batch)
        return x + self.mlp(self.post_attention_layernorm(x))

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.input_layernorm.weights(f"{prefix}input_layernorm")
        yield from self.self_attn.weights(f"{prefix}self_attn.")
        yield from self.post_attention_layernorm.weights(f"{prefix}post_attention_layernorm")
        yield from self.mlp.weights(f"{prefix}mlp.")


class Decoder(nn.Module):
    """A causal language model of the family, this rank's part of it."""

    def __init__(self, ctx: LayerContext, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(ctx, config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(
            config.attention.rope, config.attention.qk_rope_head_dim, max_positions, ctx.device
        )
        blocks = [DecoderLayer(ctx, config, spec) for spec in config.layers]
        self.layers = nn.ModuleList(blocks)
        self._blocks = tuple(blocks)
        self.norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        tied = self.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = VocabParallelHead(ctx, config.vocab_size, config.hidden_size, tied)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, caches: Sequence[torch.Tensor], batch: AttentionBatch
    ) -> torch.Tensor:
        """token_ids, positions [rows] int64; caches: one [pages, page_size, cache_dim] a layer, updated in place.
        -> the final normed hidden state [rows, hidden] float32."""
        rotation = self.rotary(positions)
        x = self.embed_tokens(token_ids).float()
        for layer, cache in zip(self._blocks, caches, strict=True):
            x = layer(x, rotation, cache, batch)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] float32, the same bits on every rank."""
        return self.lm_head(hidden)

    def weights(self) -> Iterator[Weight]:
        """Every checkpoint tensor (slice) that this rank's parameters are filled from."""
        yield from self.embed_tokens.weights("model.embed_tokens")
        for i, layer in enumerate(self._blocks):
            yield from layer.weights(f"model.layers.{i}.")
        yield from self.norm.weights("model.norm")
        yield from self.lm_head.weights("lm_head")

    def unused(self, name: str) -> str | None:
        """Why the checkpoint tensor `name` is knowingly left unread, or None if it ought to be used."""
        layer = _LAYER.match(name)
        if layer and int(layer["layer"]) >= len(self._blocks):
            return "MTP module (speculative decoding)"
        if layer and layer["expert"] and self._is_expert(int(layer["layer"]), int(layer["expert"])):
            return "expert of another rank"
        if ".self_attn.indexer." in name:
            return "sparse-attention indexer (contexts within index_topk attend to everything)"
        if name.endswith("rotary_emb.inv_freq"):
            return "rotary frequencies (computed)"
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            return "output head (tied to the embedding)"
        return None

    def _is_expert(self, layer: int, expert: int) -> bool:
        moe = self.config.moe
        return self.config.layers[layer].feed_forward == "moe" and moe is not None and expert < moe.router.num_experts
