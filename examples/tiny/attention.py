"""MLA over the entries that a DSA indexer selects, and where these entries come from.

The arithmetic follows the DeepSeek-V3 report (arXiv 2412.19437), the DeepSeek-V3.2 report (arXiv 2512.02556: the
indexer and how it is taught) and, where those leave room, `transformers` 5.24 `modeling_deepseek_v32.py`.

Shapes: B sequences, Q query tokens, K cache entries, H heads, D channels of a head.
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tiny.config import Mode, TinyConfig


class Entries(NamedTuple):
    """What a token leaves for later tokens to look at: k [B, H, K, nope + rope], v [B, H, K, v], index_k [B, K, D]."""

    k: Tensor
    v: Tensor
    index_k: Tensor


class Context(Protocol):
    """Where attention's entries come from."""

    def extend(self, own: Entries) -> tuple[Entries, list[Entries]]:
        """Take in the entries of this pass; give the ones every query may see (subject to the mask), and the links:
        entries of which query t sees only the t-th."""
        ...


class Chain:
    """Entries of one pass over whole sequences, then of unrolled MTP steps.

    The first call sets the base. Step j > 0 of the MTP module at position t then sees the base up to t and its own
    earlier steps at t, as in an engine, where these lie at t + 1 ... t + j of the cache.
    """

    def __init__(self) -> None:
        self.base: Entries | None = None
        self.links: list[Entries] = []

    def extend(self, own: Entries) -> tuple[Entries, list[Entries]]:
        if self.base is None:
            self.base = own
        else:
            self.links.append(own)
        return self.base, self.links


class Cache:
    """Entries of all tokens so far, for decoding one token at a time. Room for `capacity` tokens is taken at once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.rows: Entries | None = None

    def extend(self, own: Entries) -> tuple[Entries, list[Entries]]:
        if self.rows is None:
            self.rows = Entries(*(x.new_empty(*x.shape[:-2], self.capacity, x.shape[-1]) for x in own))
        end = self.length + own.index_k.shape[-2]
        for room, new in zip(self.rows, own, strict=True):
            room[..., self.length : end, :] = new
        self.length = end
        return Entries(*(x[..., :end, :] for x in self.rows)), []


class RMSNorm(nn.Module):
    """Root-mean-square norm, in float32."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def linear(n_in: int, n_out: int) -> nn.Linear:
    """A linear layer without bias, as everywhere in this architecture."""
    return nn.Linear(n_in, n_out, bias=False)


def rotary_frequencies(cfg: TinyConfig) -> Tensor:
    """YaRN (arXiv 2309.00071): [rope / 2] float32; slow channels are interpolated, fast ones kept."""
    dim, theta, trained = cfg.qk_rope_head_dim, cfg.rope_theta, cfg.original_max_position_embeddings

    def channel_turning(times: float) -> float:
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(channel_turning(32)), 0), min(math.ceil(channel_turning(1)), dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = theta ** -(torch.arange(0, dim, 2).float() / dim)
    return plain * (1 - ramp) + plain / cfg.rope_factor * ramp


def rotate(first: Tensor, second: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs (first_i, second_i) by angles [Q, D / 2]; the last two dimensions are [Q, D / 2]."""
    cos, sin = angles.cos().to(first.dtype), angles.sin().to(first.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Indexer(nn.Module):
    """DSA's lightning indexer: a score for each (query, entry); attention sees the top-k entries."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.heads, self.dim, self.rope = cfg.index_n_heads, cfg.index_head_dim, cfg.qk_rope_head_dim
        self.wq_b = linear(cfg.q_lora_rank, self.heads * self.dim)
        self.wk = linear(cfg.hidden_size, self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = linear(cfg.hidden_size, self.heads)

    def _rotate_head(self, x: Tensor, angles: Tensor) -> Tensor:
        """The indexer turns the first channels, in halves (MLA: the last channels, in interleaved pairs)."""
        first, second, rest = x.split([self.rope // 2, self.rope // 2, self.dim - self.rope], dim=-1)
        return torch.cat((rotate(first, second, angles), rest), dim=-1)

    def keys(self, x: Tensor, angles: Tensor) -> Tensor:
        """x [B, Q, hidden] -> [B, Q, D]."""
        return self._rotate_head(self.k_norm(self.wk(x)), angles)

    def forward(self, x: Tensor, latent: Tensor, angles: Tensor, keys: Tensor, links: list[Tensor]) -> Tensor:
        """Scores [B, Q, K + links] of entries with index keys [B, K, D]; latent is the query latent [B, Q, q_lora]."""
        q = self.wq_b(latent).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
        q = self._rotate_head(q, angles).transpose(1, 2)  # [B, Q, heads, D]
        weights = self.weights_proj(x) * (self.heads * self.dim) ** -0.5
        dots = torch.einsum("bqhd,bkd->bqhk", q, keys)
        if links:
            own = [torch.einsum("bqhd,bqd->bqh", q, link).unsqueeze(-1) for link in links]
            dots = torch.cat((dots, *own), dim=-1)
        return torch.einsum("bqh,bqhk->bqk", weights, dots.relu()).float()


class Attention(nn.Module):
    """MLA over the entries its indexer selects (DSA)."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.cfg = cfg
        heads, nope, rope, v = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        self.q_a_proj = linear(cfg.hidden_size, cfg.q_lora_rank)
        self.q_a_layernorm = RMSNorm(cfg.q_lora_rank)
        self.q_b_proj = linear(cfg.q_lora_rank, heads * (nope + rope))
        self.kv_a_proj_with_mqa = linear(cfg.hidden_size, cfg.kv_lora_rank + rope)
        self.kv_a_layernorm = RMSNorm(cfg.kv_lora_rank)
        self.kv_b_proj = linear(cfg.kv_lora_rank, heads * (nope + v))
        self.o_proj = linear(heads * v, cfg.hidden_size)
        self.indexer = Indexer(cfg)
        self.index_loss: Tensor | None = None  # of the last pass that taught the indexer

    def _queries(self, latent: Tensor, angles: Tensor) -> Tensor:
        cfg = self.cfg
        q = self.q_b_proj(latent).unflatten(-1, (cfg.num_attention_heads, -1)).transpose(1, 2)
        nope, rope = q.split([cfg.qk_nope_head_dim, cfg.qk_rope_head_dim], dim=-1)
        return torch.cat((nope, rotate(rope[..., 0::2], rope[..., 1::2], angles)), dim=-1)

    def _entries(self, x: Tensor, x_index: Tensor, angles: Tensor) -> Entries:
        cfg = self.cfg
        latent, rope = self.kv_a_proj_with_mqa(x).split([cfg.kv_lora_rank, cfg.qk_rope_head_dim], dim=-1)
        rope = rotate(rope[..., 0::2], rope[..., 1::2], angles)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (cfg.num_attention_heads, -1)).transpose(1, 2)
        nope, v = kv.split([cfg.qk_nope_head_dim, cfg.v_head_dim], dim=-1)
        rope = rope.unsqueeze(1).expand(-1, cfg.num_attention_heads, -1, -1)
        return Entries(torch.cat((nope, rope), dim=-1), v, self.indexer.keys(x_index, angles))

    def forward(self, x: Tensor, angles: Tensor, allowed: Tensor, context: Context, mode: Mode) -> Tensor:
        """x [B, Q, hidden], allowed [B, Q, K] bool (links are always allowed) -> [B, Q, hidden]."""
        x_index = x.detach() if mode.teach else x  # the indexer learns from attention, never the other way round
        latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self._queries(latent, angles)
        entries, links = context.extend(self._entries(x, x_index, angles))
        if links:
            allowed = torch.cat((allowed, allowed.new_ones(*allowed.shape[:2], len(links))), dim=-1)
        if mode.sparse or mode.teach:
            with torch.set_grad_enabled(mode.teach and torch.is_grad_enabled()):
                keys = [link.index_k for link in links]
                index = self.indexer(x_index, latent.detach(), angles, entries.index_k, keys)
                index = index.masked_fill(~allowed, float("-inf"))
            if mode.sparse:
                chosen = index.detach().topk(min(self.cfg.index_topk, index.shape[-1]), dim=-1).indices
                allowed = torch.zeros_like(allowed).scatter(-1, chosen, True) & allowed

        dots = q @ entries.k.transpose(-1, -2)
        if links:
            dots = torch.cat((dots, *((q * link.k).sum(-1, keepdim=True) for link in links)), dim=-1)
        dots = (dots * self.cfg.softmax_scale).masked_fill(~allowed.unsqueeze(1), float("-inf"))
        probs = dots.softmax(-1, dtype=torch.float32)
        if mode.teach:
            self.index_loss = index_divergence(probs.detach().mean(1), index, allowed)
        probs = probs.to(entries.v.dtype)
        count = entries.v.shape[-2]
        out = probs[..., :count] @ entries.v
        for i, link in enumerate(links):
            out = out + probs[..., count + i, None] * link.v
        return self.o_proj(out.transpose(1, 2).flatten(-2))


def index_divergence(target: Tensor, index: Tensor, allowed: Tensor) -> Tensor:
    """KL from the indexer's softmax over the seen entries to attention's mean over heads: [B, Q, K] each -> scalar."""
    log_index = index.masked_fill(~allowed, -1e9).log_softmax(-1)
    return (target * (target.clamp_min(1e-9).log() - log_index)).sum(-1).mean()
