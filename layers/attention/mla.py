"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the projections around the core.

Each token leaves one vector in the cache: its normed latent and its rotated rope key. Paged rows are *absorbed* (the
up-projections are folded into queries and outputs, so heads attend to latents); prefill rows are *expanded*. A layer
with an indexer, or one that shares another's selection, lets paged rows attend to the selected entries only.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from configs.model import ModelConfig
from layers.attention.backend import AttentionBatch, PrefillRows, Selection
from layers.attention.indexer import Indexer
from layers.context import LayerContext
from layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from layers.norm import RMSNorm
from layers.rotary import Rotation
from layers.weights import Weight


class LayerCache(NamedTuple):
    """What one layer keeps of every token, by page."""

    latents: torch.Tensor  # [pages, page_size, cache_dim]
    index_keys: torch.Tensor | None = None  # [pages, ...] in the index-key format; layers with an indexer only


class MLA(nn.Module):
    """Attention of one layer over this rank's heads."""

    def __init__(self, ctx: LayerContext, config: ModelConfig, kind: str) -> None:
        super().__init__()
        mla = config.attention
        self.config = mla
        self.backend = ctx.attention
        self.ops = ctx.ops
        self.heads = mla.num_heads // ctx.tp.size
        self.query_rank = mla.q_lora_rank or 0
        down = {"q_a_proj": mla.q_lora_rank} if mla.q_lora_rank else {}
        self.down_proj = ReplicatedLinear(ctx, config.hidden_size, {**down, "kv_a_proj_with_mqa": mla.cache_dim})
        if mla.q_lora_rank:
            self.q_norm = RMSNorm(ctx, mla.q_lora_rank, config.rms_norm_eps)
        q_name, q_in = ("q_b_proj", mla.q_lora_rank) if mla.q_lora_rank else ("q_proj", config.hidden_size)
        self.q_proj = ColumnParallelLinear(ctx, q_in, {q_name: mla.num_heads * mla.qk_head_dim})
        self.kv_norm = RMSNorm(ctx, mla.kv_lora_rank, config.rms_norm_eps)
        kv_out = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_proj = ColumnParallelLinear(ctx, mla.kv_lora_rank, {"kv_b_proj": kv_out})
        self.o_proj = RowParallelLinear(ctx, mla.num_heads * mla.v_head_dim, config.hidden_size, "o_proj")
        self.indexer = Indexer(ctx, config) if kind == "dsa_full" else None

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        cache: LayerCache,
        batch: AttentionBatch,
        selection: Selection | None,
    ) -> tuple[torch.Tensor, Selection | None]:
        """x [rows, hidden]; the rows' entries are written to the cache. -> [rows, hidden], and the selection used:
        the one given, or the layer's own if none is."""
        mla = self.config
        q_latent, kv = self.down_proj(x).split([self.query_rank, mla.cache_dim], dim=-1)
        q_latent = self.q_norm(q_latent) if self.query_rank else x
        q = self.q_proj(q_latent).view(-1, self.heads, mla.qk_head_dim)
        q_rope = q[..., mla.qk_nope_head_dim :]
        rows = x.shape[0]
        paged = sum(group.lengths.shape[0] for group in batch.paged)
        absorbed = q.new_empty(paged, self.heads, mla.cache_dim)
        slots = batch.cache_slots
        if paged:
            turned = absorbed[..., mla.kv_lora_rank :]
            self._store(q_rope[:paged], turned, kv[:paged], rotation.rows(0, paged), cache, slots[:paged])
            self._absorb(q[:paged, :, : mla.qk_nope_head_dim], absorbed[..., : mla.kv_lora_rank])
        if batch.prefill is not None:
            q_rope = q_rope[paged:]
            self._store(q_rope, q_rope, kv[paged:], rotation.rows(paged, rows), cache, slots[paged:])
        if selection is None and self.indexer is not None and cache.index_keys is not None:
            selection = self.indexer(x, q_latent, rotation, cache.index_keys, batch)
        out = self._attend(absorbed, q[paged:], cache.latents, batch, selection)
        return self.o_proj(out.flatten(1)), selection

    def store(self, x: torch.Tensor, rotation: Rotation, cache: LayerCache, slots: torch.Tensor) -> None:
        """Only writes what later rows need of these: x [rows, hidden], cache slots [rows] int64."""
        kv = F.linear(x, self.down_proj.weight[self.query_rank :])
        self._store(None, None, kv, rotation, cache, slots)
        if self.indexer is not None and cache.index_keys is not None:
            self.indexer.store(x, rotation, cache.index_keys, slots)

    def _store(
        self,
        q_rope: torch.Tensor | None,
        turned: torch.Tensor | None,
        kv: torch.Tensor,
        rotation: Rotation,
        cache: LayerCache,
        slots: torch.Tensor,
    ) -> None:
        """Rotates queries' rope parts, and writes the rows' entries."""
        entries = cache.latents.view(-1, self.config.cache_dim)
        self.ops.rotate_and_store(q_rope, turned, kv, self.kv_norm.weight, self.kv_norm.eps, rotation, entries, slots)

    def _attend(
        self,
        absorbed: torch.Tensor,
        expanded: torch.Tensor,
        cache: torch.Tensor,
        batch: AttentionBatch,
        selection: Selection | None,
    ) -> torch.Tensor:
        """Queries of paged rows [paged, heads, cache_dim] and of others [rows, heads, qk] -> [all rows, heads, v]."""
        scale, value_dim = self.config.softmax_scale, self.config.kv_lora_rank
        parts = []
        row = 0
        for i, rows in enumerate(batch.paged):
            span = slice(row, row + rows.lengths.shape[0])
            row = span.stop
            q = absorbed[span]
            slots = selection[i] if selection is not None else None
            if slots is None:
                latents = self.backend.decode(q, cache, rows, scale=scale, value_dim=value_dim)
            else:
                latents = self.backend.sparse(q, cache, slots, rows, scale=scale, value_dim=value_dim)
            parts.append(self._unabsorb(latents))
        if batch.prefill is not None:
            k, v = self._expand(cache, batch.prefill)
            parts.append(self.backend.prefill(expanded, k, v, batch.prefill, scale=scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _up(self) -> tuple[torch.Tensor, torch.Tensor]:
        """kv_b_proj by head: keys [heads, nope, kv_lora] and values [heads, v, kv_lora]."""
        mla = self.config
        per_head = self.kv_proj.weight.view(self.heads, -1, mla.kv_lora_rank)
        return per_head[:, : mla.qk_nope_head_dim], per_head[:, mla.qk_nope_head_dim :]

    def _absorb(self, q_nope: torch.Tensor, out: torch.Tensor) -> None:
        """[rows, heads, nope] -> out [rows, heads, kv_lora], ready to meet latents."""
        up_k, _ = self._up()
        torch.bmm(q_nope.transpose(0, 1), up_k, out=out.transpose(0, 1))

    def _unabsorb(self, latents: torch.Tensor) -> torch.Tensor:
        """Attended latents [rows, heads, kv_lora] -> [rows, heads, v]."""
        _, up_v = self._up()
        return torch.bmm(latents.transpose(0, 1), up_v.transpose(1, 2)).transpose(0, 1)

    def _expand(self, cache: torch.Tensor, rows: PrefillRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [context, heads, nope + rope] and values [context, heads, v] of the chunks' sequences."""
        mla = self.config
        entries = cache.view(-1, cache.shape[-1])[rows.context_slots]
        latent, k_rope = entries.split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        up = F.linear(latent, self.kv_proj.weight).view(latent.shape[0], self.heads, -1)
        k_nope, v = up.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=-1)
        return torch.cat((k_nope, k_rope[:, None].expand(-1, self.heads, -1)), dim=-1), v

    def weights(self, prefix: str) -> Iterator[Weight]:
        yield from self.down_proj.weights(prefix)
        if self.query_rank:
            yield from self.q_norm.weights(f"{prefix}q_a_layernorm")
        yield from self.q_proj.weights(prefix)
        yield from self.kv_norm.weights(f"{prefix}kv_a_layernorm")
        yield from self.kv_proj.weights(prefix)
        yield from self.o_proj.weights(prefix)
        if self.indexer is not None:
            yield from self.indexer.weights(f"{prefix}indexer.")
