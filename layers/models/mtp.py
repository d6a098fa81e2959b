"""Multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437, section 2.2): what drafts are made with.

Module k joins the hidden state of position t (the model's, or module k-1's) with the embedding of token t + 1 + k, runs
one decoder layer of its own over the sequence, and predicts token t + 2 + k. Its cache has the model's positions and
pages. Hidden states are those after the final norm.
"""

from collections.abc import Iterator

import torch
from torch import nn

from configs.model import ModelConfig, MTPConfig
from layers.attention.backend import AttentionBatch, Selection
from layers.attention.mla import LayerCache
from layers.context import LayerContext
from layers.embedding import VocabParallelEmbedding, VocabParallelHead
from layers.linear import ReplicatedLinear
from layers.models.layer import DecoderLayer
from layers.norm import RMSNorm
from layers.rotary import Rotation
from layers.weights import Weight


class MTPModule(nn.Module):
    """One module. `embed_tokens` and `lm_head` are the model's, unless the checkpoint holds other ones for it."""

    def __init__(
        self,
        ctx: LayerContext,
        config: ModelConfig,
        mtp: MTPConfig,
        embed_tokens: VocabParallelEmbedding,
        lm_head: VocabParallelHead,
        *,
        own_embedding: bool,
        own_head: bool,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.own_embedding, self.own_head = own_embedding, own_head
        self.embed_tokens = VocabParallelEmbedding(ctx, config.vocab_size, size) if own_embedding else embed_tokens
        self.lm_head = VocabParallelHead(ctx, config.vocab_size, size, None) if own_head else lm_head
        self.enorm = RMSNorm(ctx, size, eps)
        self.hnorm = RMSNorm(ctx, size, eps)
        self.eh_proj = ReplicatedLinear(ctx, 2 * size, {"eh_proj": size})
        self.layer = DecoderLayer(ctx, config, mtp.layer)
        self.norm = RMSNorm(ctx, size, eps, torch.float32)

    def join(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """token_ids [rows] int64, hidden [rows, hidden] -> the layer's input [rows, hidden] float32."""
        parts = (self.enorm(self.embed_tokens(token_ids)), self.hnorm(hidden))
        return self.eh_proj(torch.cat(parts, dim=-1)).float()

    def store(self, x: torch.Tensor, rotation: Rotation, cache: LayerCache, slots: torch.Tensor) -> None:
        """Writes the cache entries of joined rows: they depend on the rows alone, so that where only the entries are
        wanted neither attention nor experts need to run."""
        self.layer.store(x, rotation, cache, slots)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        cache: LayerCache,
        batch: AttentionBatch,
        selection: Selection | None = None,
    ) -> tuple[torch.Tensor, Selection | None]:
        """Joined rows -> hidden states [rows, hidden] float32 (normed: `logits` and the next step take them), and the
        selection used. A selection that is given is used in place of the indexer's."""
        x, delta, selection = self.layer(x, None, rotation, cache, batch, selection)
        return self.norm.add(x, delta).out, selection

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] float32, the same bits on every rank."""
        return self.lm_head(hidden)

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.enorm.weights(f"{prefix}enorm")
        yield from self.hnorm.weights(f"{prefix}hnorm")
        yield from self.eh_proj.weights(prefix)
        yield from self.layer.weights(prefix)
        yield from self.norm.weights(f"{prefix}shared_head.norm")
        if self.own_embedding:
            yield from self.embed_tokens.weights(f"{prefix}embed_tokens")
        if self.own_head:
            yield from self.lm_head.weights(f"{prefix}shared_head.head")
