"""The decoder: embed -> layers -> norm -> logits, built from a ModelConfig's layer specs, and its MTP modules."""

import re
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from configs.model import LayerSpec, ModelConfig
from layers.attention.backend import AttentionBatch, Selection
from layers.attention.mla import LayerCache
from layers.context import LayerContext
from layers.embedding import VocabParallelEmbedding, VocabParallelHead
from layers.models.layer import DecoderLayer
from layers.models.mtp import MTPModule
from layers.norm import RMSNorm
from layers.rotary import RotaryEmbedding
from layers.weights import Weight

_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(mlp\.experts\.(?P<expert>\d+)\.(gate|up|down)_proj\.weight$)?")


class Decoder(nn.Module):
    """A causal language model of the family, this rank's part of it, with the first `num_mtp` of its MTP modules.

    `own_tensors` names MTP modules' embeddings and heads that differ from the model's own.
    """

    def __init__(
        self,
        ctx: LayerContext,
        config: ModelConfig,
        max_positions: int,
        num_mtp: int = 0,
        own_tensors: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(ctx, config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(
            config.attention.rope, config.attention.qk_rope_head_dim, max_positions, ctx.device
        )
        blocks = [DecoderLayer(ctx, config, spec) for spec in config.layers]
        self.layers = nn.ModuleList(blocks)
        self._blocks = tuple(blocks)
        self.norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps, torch.float32)
        tied = self.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = VocabParallelHead(ctx, config.vocab_size, config.hidden_size, tied)
        self.mtp = tuple(self._mtp_module(ctx, k, own_tensors) for k in range(num_mtp))
        self.mtp_modules = nn.ModuleList(self.mtp)

    def _mtp_module(self, ctx: LayerContext, k: int, own_tensors: frozenset[str]) -> MTPModule:
        if self.config.mtp is None:
            raise ValueError("the model has no MTP modules")
        embedding, head = mtp_copies(self.config, k)
        return MTPModule(
            ctx,
            self.config,
            self.config.mtp,
            self.embed_tokens,
            self.lm_head,
            own_embedding=embedding in own_tensors,
            own_head=head in own_tensors,
        )

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, caches: Sequence[LayerCache], batch: AttentionBatch
    ) -> torch.Tensor:
        """token_ids, positions [rows] int64; caches: one for each layer, updated in place (those of MTP modules, which
        may follow, are left alone). -> the final normed hidden state [rows, hidden] float32."""
        rotation = self.rotary(positions)
        x = self.embed_tokens(token_ids).float()
        delta: torch.Tensor | None = None
        selection: Selection | None = None
        for layer, cache in zip(self._blocks, caches, strict=False):
            shared = selection if layer.shares_selection else None
            x, delta, selection = layer(x, delta, rotation, cache, batch, shared)
        return self.norm.add(x, delta).out

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
        for k, module in enumerate(self.mtp):
            yield from module.weights(mtp_prefix(self.config, k))

    def unused(self, name: str) -> str | None:
        """Why the checkpoint tensor `name` is knowingly left unread, or None if it ought to be used."""
        layer = _LAYER.match(name)
        if layer and int(layer["layer"]) >= len(self._blocks) + len(self.mtp):
            return "MTP module (speculative decoding)"
        if layer and layer["expert"] and self._is_expert(int(layer["layer"]), int(layer["expert"])):
            return "expert of another rank"
        if any(name in mtp_copies(self.config, k) for k in range(len(self.mtp))):
            return "MTP module's copy of the embedding or the head"
        if layer and ".self_attn.indexer." in name and self._specs[int(layer["layer"])].attention == "dsa_shared":
            return "indexer of a layer that shares an earlier one's selection"
        if name.endswith((".k_scale", ".v_scale")):
            return "scale of a quantised KV cache (ours is in the compute type)"
        if name.endswith("rotary_emb.inv_freq"):
            return "rotary frequencies (computed)"
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            return "output head (tied to the embedding)"
        return None

    def _is_expert(self, layer: int, expert: int) -> bool:
        moe = self.config.moe
        return self._specs[layer].feed_forward == "moe" and moe is not None and expert < moe.router.num_experts

    @property
    def _specs(self) -> list[LayerSpec]:
        """Of the model's layers, then of the MTP modules in use."""
        mtp = self.config.mtp
        return [*self.config.layers, *([mtp.layer] * len(self.mtp) if mtp else [])]


def mtp_prefix(config: ModelConfig, k: int) -> str:
    """What the names of MTP module k's tensors begin with."""
    return f"model.layers.{len(config.layers) + k}."


def mtp_copies(config: ModelConfig, k: int) -> tuple[str, str]:
    """Names of the embedding and the head that a checkpoint may hold for MTP module k."""
    prefix = mtp_prefix(config, k)
    return f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"
