"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the projections around the core.

Each token leaves one vector in the cache: its normed latent and its rotated rope key. Decode rows are *absorbed*
(the up-projections are folded into queries and outputs, so heads attend to latents); prefill rows are *expanded*.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from configs.model import ModelConfig
from layers.attention.backend import AttentionBatch, PrefillRows
from layers.context import LayerContext
from layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from layers.norm import RMSNorm
from layers.rotary import Rotation, rotate
from layers.weights import Weight


class MLA(nn.Module):
    """Attention of one layer over this rank's heads."""

    def __init__(self, ctx: LayerContext, config: ModelConfig) -> None:
        super().__init__()
        mla = config.attention
        self.config = mla
        self.backend = ctx.attention
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

    def forward(self, x: torch.Tensor, rotation: Rotation, cache: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """x [rows, hidden]; cache [pages, page_size, cache_dim] gets the rows' entries -> [rows, hidden]."""
        q_nope, q_rope, entries = self._project(x, rotation)
        cache.view(-1, cache.shape[-1]).index_copy_(0, batch.cache_slots, entries)
        n = batch.num_decode
        parts = []
        if batch.decode is not None:
            latents = self.backend.decode(
                self._absorb(q_nope[:n], q_rope[:n]),
                cache,
                batch.decode,
                scale=self.config.softmax_scale,
                value_dim=self.config.kv_lora_rank,
            )
            parts.append(self._unabsorb(latents))
        if batch.prefill is not None:
            q = torch.cat((q_nope[n:], q_rope[n:]), dim=-1)
            k, v = self._expand(cache, batch.prefill)
            parts.append(self.backend.prefill(q, k, v, batch.prefill, scale=self.config.softmax_scale))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o_proj(out.flatten(1))

    def _project(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> queries [rows, heads, nope] and [rows, heads, rope], cache entries [rows, kv_lora + rope], rotated."""
        mla = self.config
        down = self.down_proj(x)
        q_latent, latent, k_rope = down.split([self.query_rank, mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        q = self.q_proj(self.q_norm(q_latent) if self.query_rank else x).view(-1, self.heads, mla.qk_head_dim)
        q_nope, q_rope = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        # One rotation for the queries' heads and the single key head.
        turned = rotate(torch.cat((q_rope, k_rope[:, None]), dim=1), rotation)
        entries = torch.cat((self.kv_norm(latent).to(turned.dtype), turned[:, -1]), dim=-1)
        return q_nope, turned[:, :-1], entries

    def _up(self) -> tuple[torch.Tensor, torch.Tensor]:
        """kv_b_proj by head: keys [heads, nope, kv_lora] and values [heads, v, kv_lora]."""
        mla = self.config
        per_head = self.kv_proj.weight.view(self.heads, -1, mla.kv_lora_rank)
        return per_head[:, : mla.qk_nope_head_dim], per_head[:, mla.qk_nope_head_dim :]

    def _absorb(self, q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        """[rows, heads, nope], [rows, heads, rope] -> [rows, heads, kv_lora + rope], ready to meet cache entries."""
        up_k, _ = self._up()
        return torch.cat((torch.bmm(q_nope.transpose(0, 1), up_k).transpose(0, 1), q_rope), dim=-1)

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
