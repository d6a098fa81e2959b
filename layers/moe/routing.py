"""Which experts a token goes to, and with what weights.

Softmax with greedy or group-limited choice: DeepSeek-V2 (arXiv 2405.04434, section 2.2). Sigmoid with a balancing
bias that takes part in the choice only ("noaux_tc"): DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
"""

from typing import NamedTuple

import torch

from configs.model import RouterConfig


class Routing(NamedTuple):
    """The chosen experts of each row."""

    expert_ids: torch.Tensor  # [rows, k] int64
    expert_weights: torch.Tensor  # [rows, k] float32


def route(logits: torch.Tensor, config: RouterConfig, bias: torch.Tensor | None) -> Routing:
    """Router logits [rows, experts] float32 (and the correction bias [experts] of noaux_tc) -> Routing."""
    scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if config.num_groups > 1:
        choice = _limit_groups(choice, config)
    ids = choice.topk(config.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, ids)
    if config.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(ids, weights * config.scale)


def _limit_groups(choice: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    """Masks the experts outside each row's best groups. A group's score is its best expert's, or for noaux_tc the sum
    of its best two."""
    grouped = choice.unflatten(-1, (config.num_groups, -1))
    if config.method == "noaux_tc":
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    else:
        group_scores = grouped.amax(-1)
    best = group_scores.topk(config.top_groups, dim=-1, sorted=False).indices
    closed = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)
