"""DeepSeek-V3.2 at a size that trains in minutes: MLA with its indexer, MoE, and one MTP module.

`check_tiny.py` compares a saved checkpoint with `transformers` 5.24. Parameter names are the checkpoint's names, so
saving needs no table of them.

Shapes: B sequences, Q query tokens, K cache entries, E experts, V vocabulary.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny.attention import Attention, Cache, Chain, Context, RMSNorm, linear, rotary_frequencies
from tiny.config import Mode, TinyConfig


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(hidden, width),
            linear(hidden, width),
            linear(width, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Routed experts as stacked weights: gate, up [E, width, hidden], down [E, hidden, width]."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [B, Q, hidden], weights [B, Q, E] (0: not chosen). Every expert runs on every token: together they are one
        narrow MLP here, and a dispatch would cost more than it saves."""
        act = F.silu(F.linear(x, self.gate_proj.flatten(0, 1))) * F.linear(x, self.up_proj.flatten(0, 1))
        act = act.unflatten(-1, self.gate_proj.shape[:2]) * weights.unsqueeze(-1).to(act.dtype)
        return F.linear(act.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class Gate(nn.Module):
    """The "noaux_tc" router: sigmoid scores; a bias, moved by hand, decides who is chosen but not with what weight."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.top_k, self.scaling = cfg.num_experts_per_tok, cfg.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(cfg.n_routed_experts, cfg.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(cfg.n_routed_experts))
        self.register_buffer("load", torch.zeros(cfg.n_routed_experts), persistent=False)
        self.e_score_correction_bias: Tensor
        self.load: Tensor  # [E] tokens sent to each expert since the last balance()

    def forward(self, x: Tensor) -> Tensor:
        """x [B, Q, hidden] -> weights [B, Q, E] float32, 0 for the experts not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        kept = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        if self.training:
            self.load += (kept > 0).flatten(0, 1).sum(0)
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * self.scaling

    def balance(self, rate: float) -> None:
        """Raise the bias of experts with less than the mean load, lower that of the others (arXiv 2408.15664)."""
        self.e_score_correction_bias += rate * (self.load.mean() - self.load).sign()
        self.load.zero_()


class MoE(nn.Module):
    """Routed experts and one shared expert."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.gate = Gate(cfg)
        self.experts = Experts(cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size)
        self.shared_experts = MLP(cfg.hidden_size, cfg.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.gate(x)) + self.shared_experts(x)


class Layer(nn.Module):
    """A decoder layer: attention, then MLP or MoE, each on the norm of the residual stream."""

    def __init__(self, cfg: TinyConfig, dense: bool, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = MLP(cfg.hidden_size, cfg.intermediate_size) if dense else MoE(cfg)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, angles: Tensor, allowed: Tensor, context: Context, mode: Mode) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), angles, allowed, context, mode))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class SharedHead(nn.Module):
    """What the MTP module owns of its head: the norm; the matrix is the model's."""

    def __init__(self, cfg: TinyConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class MTPLayer(Layer):
    """The MTP module: a layer on [embedding of the next token | hidden state], each normed."""

    def __init__(self, cfg: TinyConfig, dropout: float) -> None:
        super().__init__(cfg, dense=False, dropout=dropout)
        self.enorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.hnorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.eh_proj = linear(2 * cfg.hidden_size, cfg.hidden_size)
        self.shared_head = SharedHead(cfg)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))


class Trunk(nn.Module):
    """Named `model` in checkpoints. `layers[num_hidden_layers]` is the MTP module, as in DeepSeek's releases."""

    def __init__(self, cfg: TinyConfig, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        layers: list[Layer] = [Layer(cfg, i < cfg.first_k_dense_replace, dropout) for i in range(cfg.num_hidden_layers)]
        self.layers = nn.ModuleList([*layers, MTPLayer(cfg, dropout)])
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class TinyModel(nn.Module):
    """The whole model. `forward` gives hidden states; `lm_head` turns hidden states of any step into logits."""

    def __init__(self, cfg: TinyConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Trunk(cfg, dropout)
        self.lm_head = linear(cfg.hidden_size, cfg.vocab_size)
        self.register_buffer("frequencies", rotary_frequencies(cfg), persistent=False)
        self.frequencies: Tensor
        self._initialise()

    def _initialise(self) -> None:
        """Fan-in scale, branches' outputs smaller by depth; embeddings at 0.5, so that the residual stream does not
        drown the token (0.02 trains far slower at this width)."""
        outputs = (2 * len(self.model.layers)) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim < 2:
                continue
            std = weight.shape[-1] ** -0.5 * (outputs if "o_proj" in name or "down_proj" in name else 1.0)
            nn.init.normal_(weight, std={"model.embed_tokens.weight": 0.5, "lm_head.weight": 0.02}.get(name, std))

    @property
    def mtp(self) -> MTPLayer:
        """The MTP module."""
        module = self.model.layers[-1]
        assert isinstance(module, MTPLayer)
        return module

    def _angles(self, start: int, count: int) -> Tensor:
        positions = torch.arange(start, start + count, device=self.frequencies.device)
        return positions[:, None] * self.frequencies

    def forward(
        self, ids: Tensor, allowed: Tensor, mode: Mode, start: int = 0, contexts: list[Cache] | None = None
    ) -> Tensor:
        """ids [B, Q] at positions start..., allowed [B, Q, K] -> final hidden states, normed, [B, Q, hidden]."""
        x, angles = self.model.embed_tokens(ids), self._angles(start, ids.shape[1])
        for i in range(self.cfg.num_hidden_layers):
            x = self.model.layers[i](x, angles, allowed, contexts[i] if contexts else Chain(), mode)
        return self.model.norm(x)

    def draft(self, hidden: Tensor, following: Tensor, allowed: Tensor, mode: Mode, steps: int) -> Iterator[Tensor]:
        """Unroll the MTP module: for j < steps, states [B, Q, hidden] whose logits at t predict token t + 2 + j.

        hidden: the trunk's states [B, Q, hidden]; following [B, Q + steps - 1]: the tokens after the first (step j at
        position t is given token t + 1 + j). Each step gets the state of the step before it, after the norm.
        """
        chain, count = Chain(), hidden.shape[1]
        for j in range(steps):
            x = self.mtp.join(self.model.embed_tokens(following[:, j : j + count]), hidden)
            # Only step 0 teaches: later steps' attention is nearly the same, and the scores are costly.
            step_mode = mode if j == 0 else Mode(sparse=mode.sparse)
            x = self.mtp(x, self._angles(j, count), allowed, chain, step_mode)
            hidden = self.mtp.shared_head.norm(x)
            yield hidden
