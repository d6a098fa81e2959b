"""The indexer of DeepSeek sparse attention (DSA; DeepSeek-V3.2-Exp report, section 2.1).

Many small heads score every visible position, I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]), and each row attends to
the k best. Weights and keys are the same on every rank; `topk_exchange` says who scores.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from configs.engine import PAGE_SIZE
from configs.model import ModelConfig
from layers.attention.backend import AttentionBatch, PagedRows, Selection
from layers.attention.topk import TopKMetadata
from layers.context import LayerContext
from layers.linear import ReplicatedLinear
from layers.rotary import Rotation
from layers.weights import Weight, empty_parameter

_KEY_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """Scores and selection of one layer."""

    def __init__(self, ctx: LayerContext, config: ModelConfig) -> None:
        super().__init__()
        indexer, query_rank = config.indexer, config.attention.q_lora_rank
        if indexer is None or query_rank is None or ctx.sparse is None:
            raise ValueError("an indexer needs its config, a sparse context, and queries with a latent")
        self.tp = ctx.tp
        self.ops = ctx.ops
        self.topk, self.exchange, self.key_format = ctx.sparse.topk, ctx.sparse.exchange, ctx.sparse.keys
        self.heads, self.head_dim, self.k = indexer.num_heads, indexer.head_dim, indexer.top_k
        self.rope_dim = config.attention.qk_rope_head_dim
        self.rope_interleaved = indexer.rope_interleaved
        self.scale = (self.heads * self.head_dim) ** -0.5
        self.query_proj = ReplicatedLinear(ctx, query_rank, {"wq_b": self.heads * self.head_dim})
        self.key_proj = ReplicatedLinear(ctx, config.hidden_size, {"wk": self.head_dim})
        self.gate_proj = ReplicatedLinear(ctx, config.hidden_size, {"weights_proj": self.heads})
        self.norm_weight = empty_parameter(self.head_dim, dtype=torch.float32, device=ctx.device)
        self.norm_bias = empty_parameter(self.head_dim, dtype=torch.float32, device=ctx.device)

    def forward(
        self, x: torch.Tensor, q_latent: torch.Tensor, rotation: Rotation, keys: torch.Tensor, batch: AttentionBatch
    ) -> Selection:
        """x [rows, hidden] (normed), q_latent [rows, q_lora_rank] (normed); the rows' keys are written to `keys`, the
        layer's index cache. -> for each group of paged rows its selection, None where no row sees more than k."""
        self.store(x, rotation, keys, batch.cache_slots)
        chosen: list[torch.Tensor | None] = []
        row = 0
        for rows in batch.paged:
            span = slice(row, row + rows.lengths.shape[0])
            row = span.stop
            if rows.max_length <= self.k:
                chosen.append(None)
            else:
                turn = rotation.rows(span.start, span.stop)
                chosen.append(self._agree(x[span], q_latent[span], turn, keys, rows))
        return tuple(chosen)

    def store(self, x: torch.Tensor, rotation: Rotation, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes the rows' keys, all that later rows need of these."""
        key = F.layer_norm(
            self.key_proj(x).float(), (self.head_dim,), self.norm_weight, self.norm_bias, eps=_KEY_NORM_EPS
        )
        self.key_format.store(keys, slots, self._rotate(key[:, None], rotation).squeeze(1))

    def _rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotates the first rope_dim channels of [rows, heads, head_dim], maybe in place."""
        return self.ops.rotate(x, Rotation(rotation.turn, self.rope_interleaved))

    def _agree(
        self, x: torch.Tensor, q_latent: torch.Tensor, rotation: Rotation, keys: torch.Tensor, rows: PagedRows
    ) -> torch.Tensor:
        """Physical slots [rows, k] int32, the same on every rank."""
        count = rows.lengths.shape[0]
        if self.tp.size == 1 or self.exchange == "replicated":
            return self._select(x, q_latent, rotation, keys, rows, x.new_empty(count, self.k, dtype=torch.int32))
        if self.exchange == "leader":
            slots = x.new_empty(count, self.k, dtype=torch.int32)
            if self.tp.rank == 0:
                self._select(x, q_latent, rotation, keys, rows, slots)
            return self.tp.broadcast(slots)
        full, mine = rows.share(self.tp.rank, self.tp.size)
        slots = x.new_empty(full, self.k, dtype=torch.int32)
        lo, n = min(self.tp.rank * full, count), mine.lengths.shape[0]
        if n:
            span = slice(lo, lo + n)
            turn = rotation.rows(span.start, span.stop)
            self._select(x[span], q_latent[span], turn, keys, mine, slots[:n])
        return self.tp.all_gather_rows(slots)[:count]

    def _select(
        self,
        x: torch.Tensor,
        q_latent: torch.Tensor,
        rotation: Rotation,
        keys: torch.Tensor,
        rows: PagedRows,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Fills and returns slots [rows, k]."""
        table = rows.block_table[:, : rows.pages]
        scores = x.new_empty(x.shape[0], rows.pages * PAGE_SIZE, dtype=torch.float32)
        skip = rows.num_within(self.k)  # rows that take all they see, whatever the scores
        if skip < x.shape[0]:
            q = self.query_proj(q_latent[skip:]).view(-1, self.heads, self.head_dim)
            q = self._rotate(q, rotation.rows(skip, x.shape[0]))
            gates = self.gate_proj(x[skip:]).float() * self.scale
            self.ops.index_scores(q, gates, self.key_format, keys, rows, skip, scores[skip:])
        metadata = TopKMetadata(
            table, rows.lengths, PAGE_SIZE, self.k, self.topk.needs_plan, row_to_table=rows.row_to_table
        )
        self.topk.select(scores, metadata, slots, torch.empty_like(slots))
        return slots

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.query_proj.weights(prefix)
        yield from self.key_proj.weights(prefix)
        yield from self.gate_proj.weights(prefix)
        yield Weight(f"{prefix}k_norm.weight", self.norm_weight)
        yield Weight(f"{prefix}k_norm.bias", self.norm_bias)
