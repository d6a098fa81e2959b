"""Vocabulary-parallel embedding and output head."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from layers.context import LayerContext
from layers.weights import Weight, empty_parameter


class VocabParallelEmbedding(nn.Module):
    """Each rank holds the rows of its `vocab / tp_size` ids; a lookup sums over ranks."""

    def __init__(self, ctx: LayerContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.tp = ctx.tp
        self.shard = ctx.tp.shard(0, vocab_size)
        self.weight = empty_parameter(self.shard.length, hidden_size, dtype=ctx.dtype, device=ctx.device)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[rows] int64 -> [rows, hidden]."""
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.shard.start
        outside = (local < 0) | (local >= self.shard.length)
        rows = F.embedding(local.masked_fill(outside, 0), self.weight)
        return self.tp.all_reduce(rows.masked_fill(outside[:, None], 0))

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield Weight(f"{prefix}.weight", self.weight, self.shard)


class VocabParallelHead(nn.Module):
    """Logits over the vocabulary; the matrix may be the embedding's (tied)."""

    def __init__(
        self, ctx: LayerContext, vocab_size: int, hidden_size: int, tied: VocabParallelEmbedding | None
    ) -> None:
        super().__init__()
        self.tp = ctx.tp
        self.shard = ctx.tp.shard(0, vocab_size)
        self.tied = tied is not None
        self.weight = (
            tied.weight
            if tied is not None
            else empty_parameter(self.shard.length, hidden_size, dtype=ctx.dtype, device=ctx.device)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] float32, the same on every rank."""
        return self.tp.all_gather_last(F.linear(hidden.to(self.weight.dtype), self.weight)).float()

    def weights(self, prefix: str) -> Iterator[Weight]:
        if not self.tied:
            yield Weight(f"{prefix}.weight", self.weight, self.shard)
