"""Triton kernel of the routers: scores, group limits, choice and weights of a row in one program."""

import torch
import triton
import triton.language as tl

from configs.model import RouterConfig


def route(logits: torch.Tensor, config: RouterConfig, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [rows, experts] float32 (and the correction bias [experts]) -> the chosen experts' ids [rows, k]
    int64, best first, and weights [rows, k] float32."""
    rows, experts = logits.shape
    ids = torch.empty(rows, config.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, config.top_k, dtype=torch.float32, device=logits.device)
    if rows:
        per_group = experts // config.num_groups
        _route[(rows,)](
            logits,
            bias,
            ids,
            weights,
            config.scale,
            logits.stride(0),
            SOFTMAX=config.scoring == "softmax",
            HAS_BIAS=bias is not None,
            SUM_OF_TWO=config.method == "noaux_tc",
            NORMALISE=config.normalise,
            TOP_K=config.top_k,
            K_BLOCK=triton.next_power_of_2(config.top_k),
            GROUPS=config.num_groups,
            TOP_GROUPS=config.top_groups,
            PER_GROUP=per_group,
            G_BLOCK=triton.next_power_of_2(config.num_groups),
            E_BLOCK=triton.next_power_of_2(per_group),
            num_warps=1 if experts <= 128 else 2,
        )
    return ids, weights


@triton.jit
def _route(
    logits,
    bias,
    ids,
    weights,
    scale,
    stride,
    SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUM_OF_TWO: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    G_BLOCK: tl.constexpr,
    E_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, G_BLOCK)
    member = tl.arange(0, E_BLOCK)
    expert = group[:, None] * PER_GROUP + member[None, :]
    real = (group[:, None] < GROUPS) & (member[None, :] < PER_GROUP)
    score = tl.load(logits + row * stride + expert, real, other=-float("inf"))
    if SOFTMAX:
        score = tl.exp(score - tl.max(tl.max(score, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    else:
        score = 1 / (1 + tl.exp(-score))
    choice = score
    if HAS_BIAS:
        choice = choice + tl.load(bias + expert, real, other=0.0)
    choice = tl.where(real, choice, -float("inf"))
    if GROUPS > 1:
        best, at = tl.max(choice, 1, return_indices=True)
        if SUM_OF_TWO and PER_GROUP > 1:
            best += tl.max(tl.where(member[None, :] == at[:, None], -float("inf"), choice), 1)
        best = tl.where(group < GROUPS, best, -float("inf"))
        open_ = tl.zeros([G_BLOCK], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            chosen = group == tl.argmax(best, 0)
            open_ = tl.where(chosen, 1, open_)
            best = tl.where(chosen, -float("inf"), best)
        choice = tl.where(open_[:, None] > 0, choice, -float("inf"))
    choice = tl.reshape(choice, [G_BLOCK * E_BLOCK])
    score = tl.reshape(score, [G_BLOCK * E_BLOCK])
    expert = tl.reshape(expert, [G_BLOCK * E_BLOCK])
    place = tl.arange(0, G_BLOCK * E_BLOCK)
    rank = tl.arange(0, K_BLOCK)
    picked = tl.zeros([K_BLOCK], tl.int64)
    weight = tl.zeros([K_BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        chosen = place == tl.argmax(choice, 0)
        picked = tl.where(rank == i, tl.sum(tl.where(chosen, expert, 0), 0), picked)
        weight = tl.where(rank == i, tl.sum(tl.where(chosen, score, 0.0), 0), weight)
        choice = tl.where(chosen, -float("inf"), choice)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(ids + row * TOP_K + rank, picked, rank < TOP_K)
    tl.store(weights + row * TOP_K + rank, weight * scale, rank < TOP_K)
