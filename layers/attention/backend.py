"""The attention interface that kernels plug into, what a step tells it about its rows, and the torch reference.

A *row* is a query token of a batch. Rows that decode come first: each attends, in latent space, to the cache entries
of its own block-table row. The rows of prefill chunks follow, packed; they attend to keys and values expanded from
the latents of their sequence, the chunk's own included.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F

from configs.base import ConfigError
from configs.engine import PAGE_SIZE

# Cache entries gathered at a time by the reference decode: bounds its temporary at a few hundred MB.
_GATHER_LIMIT = 1 << 17


@dataclass(frozen=True)
class DecodeRows:
    """Rows that attend to the paged cache directly."""

    block_table: torch.Tensor  # [rows, pages] int32, pages of each row's sequence; entries past its length are valid
    lengths: torch.Tensor  # [rows] int32, visible positions, the row's own included
    max_length: int  # bound on lengths, known on the host

    @cached_property
    def length_bias(self) -> torch.Tensor:
        """0 on visible positions, -inf past a row's length: [rows, pages * page_size] float32, made once a step."""
        positions = torch.arange(-(-self.max_length // PAGE_SIZE) * PAGE_SIZE, device=self.lengths.device)
        return torch.zeros((), device=self.lengths.device).masked_fill(positions >= self.lengths[:, None], -torch.inf)


@dataclass(frozen=True)
class PrefillRows:
    """Packed rows of prefill chunks: chunk i has queries q_offsets[i:i+2] and keys k_offsets[i:i+2], whose last
    (q_offsets[i+1] - q_offsets[i]) positions are the queries' own (causal from there)."""

    q_offsets: list[int]
    k_offsets: list[int]
    context_slots: torch.Tensor  # [k_offsets[-1]] int64, physical cache slots of all the chunks' keys


@dataclass(frozen=True)
class AttentionBatch:
    """One step's rows: `num_decode` decode rows, then the prefill rows."""

    cache_slots: torch.Tensor  # [rows] int64, where each row's latent is written: page * page_size + offset
    num_decode: int
    decode: DecodeRows | None
    prefill: PrefillRows | None


class AttentionBackend(Protocol):
    """Kernels of the attention core. Chosen by name when the engine is built."""

    name: str

    def decode(
        self, q: torch.Tensor, cache: torch.Tensor, rows: DecodeRows, *, scale: float, value_dim: int
    ) -> torch.Tensor:
        """q [rows, heads, d] against cache [pages, page_size, d]; values are an entry's first value_dim channels.
        -> [rows, heads, value_dim]."""

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PrefillRows, *, scale: float
    ) -> torch.Tensor:
        """q [rows, heads, d], k [context, heads, d], v [context, heads, dv] -> [rows, heads, dv], causal per chunk."""


class TorchAttention:
    """The reference: plain torch, scores and softmax in float32."""

    name = "torch"

    def decode(
        self, q: torch.Tensor, cache: torch.Tensor, rows: DecodeRows, *, scale: float, value_dim: int
    ) -> torch.Tensor:
        pages = -(-rows.max_length // PAGE_SIZE)
        at_once = max(1, _GATHER_LIMIT // (pages * PAGE_SIZE))
        bias = rows.length_bias[:, None]
        parts = []
        for lo in range(0, q.shape[0], at_once):
            hi = min(lo + at_once, q.shape[0])
            page_ids = rows.block_table[lo:hi, :pages].flatten()
            entries = cache.index_select(0, page_ids).view(hi - lo, pages * PAGE_SIZE, -1)
            scores = torch.bmm(q[lo:hi], entries.transpose(1, 2)).float()  # [n, heads, positions]
            probs = torch.add(bias[lo:hi], scores, alpha=scale).softmax(-1).to(q.dtype)
            parts.append(torch.bmm(probs, entries[..., :value_dim]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PrefillRows, *, scale: float
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        for i in range(len(rows.q_offsets) - 1):
            q_span = slice(rows.q_offsets[i], rows.q_offsets[i + 1])
            k_span = slice(rows.k_offsets[i], rows.k_offsets[i + 1])
            queries, keys = q_span.stop - q_span.start, k_span.stop - k_span.start
            mask = None
            if queries < keys and queries > 1:
                mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
            attended = F.scaled_dot_product_attention(
                q[q_span].transpose(0, 1)[None],
                k[k_span].transpose(0, 1)[None],
                v[k_span].transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=queries == keys,
                scale=scale,
            )
            out[q_span] = attended[0].transpose(0, 1)
        return out


def make_attention_backend(name: str) -> AttentionBackend:
    """The backend of that name; `auto` is the best that runs here. Raises ConfigError for an unknown one."""
    if name in ("auto", "torch"):
        return TorchAttention()
    raise ConfigError(f"attention_backend {name!r} is not known: use 'auto' or 'torch'")
