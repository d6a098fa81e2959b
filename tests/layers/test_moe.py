"""Experts and routing against plain loops in float64, and the ranks' parts against the whole layer."""

import math

import pytest
import torch

from configs.base import ConfigError
from configs.model import MoEConfig, RouterConfig
from layers.moe.backend import TorchMoE, make_moe_backend
from layers.moe.moe import MoE
from layers.moe.routing import Routing, route
from layers.ops import make_ops
from tests.layer_context import CPU, LonelyRank, fill, layer_context

HIDDEN, WIDTH, EXPERTS = 12, 8, 6


def random_tensor(*shape: int, seed: int) -> torch.Tensor:
    print(f"seed {seed}")
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Row by row, choice by choice."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            if expert >= 0:
                gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
                out[row] += weight * (down[expert].double() @ (gate * torch.sigmoid(gate) * up))
    return out


IDS = {
    "every expert": [[0, 1], [2, 3], [4, 5], [5, 0]],
    "one expert for all": [[3, -1], [3, -1], [-1, 3]],
    "experts nobody chose": [[5, 1], [1, 5]],
    "none held here": [[-1, -1], [-1, -1]],
    "one row": [[4, 2]],
    "one row, one held": [[-1, 2]],
    "one row, none held": [[-1, -1]],
    "no rows": [],
}


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_against_a_double_loop(name: str, dtype: torch.dtype) -> None:
    ids = torch.tensor(IDS[name], dtype=torch.int64).view(-1, 2)
    x = random_tensor(len(ids), HIDDEN, seed=1).to(dtype)
    weights = random_tensor(len(ids), 2, seed=2).abs()
    gate_up = (random_tensor(EXPERTS, 2 * WIDTH, HIDDEN, seed=3) * HIDDEN**-0.5).to(dtype)
    down = (random_tensor(EXPERTS, HIDDEN, WIDTH, seed=4) * WIDTH**-0.5).to(dtype)
    got = TorchMoE().experts(x, ids, weights, gate_up, down)
    assert got.dtype == dtype
    want = naive_experts(x, ids, weights, gate_up, down)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.03)


def test_experts_of_many_rows() -> None:
    ids = random_tensor(200, 16, seed=5).topk(4).indices - 5  # many held elsewhere
    ids = ids.masked_fill((ids < 0) | (ids >= EXPERTS), -1)
    x, weights = random_tensor(200, HIDDEN, seed=6), random_tensor(200, 4, seed=7)
    gate_up, down = random_tensor(EXPERTS, 2 * WIDTH, HIDDEN, seed=8), random_tensor(EXPERTS, HIDDEN, WIDTH, seed=9)
    got = TorchMoE().experts(x, ids, weights, gate_up, down)
    torch.testing.assert_close(got.double(), naive_experts(x, ids, weights, gate_up, down), rtol=1e-5, atol=1e-4)


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    ids, weights = random_tensor(9, EXPERTS, seed=10).topk(3).indices, random_tensor(9, 3, seed=11)
    x = random_tensor(9, HIDDEN, seed=12)
    gate_up, down = random_tensor(EXPERTS, 2 * WIDTH, HIDDEN, seed=13), random_tensor(EXPERTS, HIDDEN, WIDTH, seed=14)
    together = TorchMoE().experts(x, ids, weights, gate_up, down)
    for i in range(9):
        alone = TorchMoE().experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], gate_up, down)
        torch.testing.assert_close(alone[0], together[i], rtol=1e-5, atol=1e-5)


def test_backends_have_names() -> None:
    assert [make_moe_backend(name, CPU).name for name in ("auto", "torch")] == ["torch", "torch"]
    with pytest.raises(ConfigError, match="moe_backend 'triton' needs a GPU: use 'auto' or 'torch'"):
        make_moe_backend("triton", CPU)


def test_kernels_have_names() -> None:
    assert [make_ops(name, CPU).name for name in ("auto", "torch")] == ["torch", "torch"]
    with pytest.raises(ConfigError, match="kernel_backend 'triton' needs a GPU"):
        make_ops("triton", CPU)


# ------------------------------------------------------------------------------------------------- ranks


def moe_config(shared: int) -> MoEConfig:
    router = RouterConfig(num_experts=8, top_k=3, scoring="sigmoid", method="noaux_tc", normalise=True, scale=2.5)
    return MoEConfig(router=router, intermediate_size=16, shared_intermediate_size=shared)


def rank_of(whole: MoE, config: MoEConfig, tp: LonelyRank) -> MoE:
    """A rank's part of a layer, filled by the names and shards that it asks for."""
    full = {weight.name: weight.target for weight in whole.weights("")}
    part = MoE(layer_context(tp), config, HIDDEN)
    for weight in part.weights(""):
        source = full[weight.name]
        if weight.shard is not None:
            source = source.narrow(weight.shard.dim, weight.shard.start, weight.shard.length)
        weight.target.copy_(source)
    return part


@pytest.mark.parametrize("shared", [0, 32])
@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 4), (8, 8)])
def test_ranks_sum_to_the_whole_layer(tp_size: int, ep_size: int, shared: int) -> None:
    config = moe_config(shared)
    whole = MoE(layer_context(), config, HIDDEN)
    fill(whole, seed=20)
    for rows in (1, 30):
        x = random_tensor(rows, HIDDEN, seed=21)
        ranks = [rank_of(whole, config, LonelyRank(rank, tp_size, ep_size)) for rank in range(tp_size)]
        partials = [rank(x, x) for rank in ranks]
        torch.testing.assert_close(torch.stack(partials).sum(0), whole(x, x), rtol=0, atol=1e-5)
        assert [len(rank.local) for rank in ranks] == [8 // ep_size] * tp_size


def test_the_layer_is_its_experts_and_the_shared_one() -> None:
    whole = MoE(layer_context(), moe_config(shared=32), HIDDEN)
    fill(whole, seed=22)
    x = random_tensor(5, HIDDEN, seed=23)
    ids, weights = whole.gate(x)
    routed = naive_experts(x, ids, weights, whole.gate_up, whole.down)
    shared = whole.shared_experts
    assert shared is not None
    gate, up = (x.double() @ shared.gate_up_proj.weight.double().T).chunk(2, dim=-1)
    want = routed + (gate * torch.sigmoid(gate) * up) @ shared.down_proj.weight.double().T
    torch.testing.assert_close(whole(x, x).double(), want, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------- routing


def naive_route(logits: list[float], config: RouterConfig, bias: list[float] | None) -> dict[int, float]:
    """Expert -> weight of one row."""
    if config.scoring == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = len(scores) // config.num_groups
    count = 2 if config.method == "noaux_tc" else 1
    group_scores = [
        sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[:count]) for g in range(config.num_groups)
    ]
    groups = sorted(range(config.num_groups), key=lambda g: -group_scores[g])[: config.top_groups]
    eligible = [e for e in range(len(scores)) if e // size in groups]
    chosen = sorted(eligible, key=lambda e: -choice[e])[: config.top_k]
    norm = sum(scores[e] for e in chosen) if config.normalise else 1.0
    return {e: scores[e] / norm * config.scale for e in chosen}


ROUTERS = {
    "softmax, greedy": RouterConfig(num_experts=16, top_k=4, scoring="softmax", method="greedy", scale=16.0),
    "softmax, greedy, normalised": RouterConfig(
        num_experts=16, top_k=4, scoring="softmax", method="greedy", normalise=True
    ),
    "softmax, groups": RouterConfig(
        num_experts=16, top_k=4, scoring="softmax", method="group_limited_greedy", num_groups=4, top_groups=2
    ),
    "sigmoid, one group": RouterConfig(
        num_experts=16, top_k=4, scoring="sigmoid", method="noaux_tc", normalise=True, scale=2.5
    ),
    "sigmoid, groups": RouterConfig(
        num_experts=16, top_k=3, scoring="sigmoid", method="noaux_tc", num_groups=8, top_groups=3, normalise=True
    ),
    "sigmoid, groups of one": RouterConfig(
        num_experts=8, top_k=2, scoring="sigmoid", method="noaux_tc", num_groups=8, top_groups=3
    ),
    "all experts": RouterConfig(num_experts=4, top_k=4, scoring="sigmoid", method="noaux_tc", normalise=True),
}


def as_dict(routing: Routing, row: int) -> dict[int, float]:
    return dict(zip(routing.expert_ids[row].tolist(), routing.expert_weights[row].tolist(), strict=True))


@pytest.mark.parametrize("name", ROUTERS)
def test_routing_against_a_naive_one(name: str) -> None:
    config = ROUTERS[name]
    logits = random_tensor(100, config.num_experts, seed=30)
    bias = 0.3 * random_tensor(config.num_experts, seed=31) if config.method == "noaux_tc" else None
    routing = route(logits, config, bias)
    for row in range(100):
        want = naive_route(logits[row].tolist(), config, bias.tolist() if bias is not None else None)
        assert as_dict(routing, row) == pytest.approx(want, rel=1e-5)


def test_the_bias_takes_part_in_the_choice_only() -> None:
    config = ROUTERS["sigmoid, one group"]
    logits = random_tensor(1, 16, seed=32)
    favoured = logits[0].topk(4, largest=False).indices  # the four that would be chosen last
    bias = torch.zeros(16)
    bias[favoured] = 5.0
    routing = route(logits, config, bias)
    scores = logits[0].sigmoid()[favoured]
    want = dict(zip(favoured.tolist(), (scores / scores.sum() * 2.5).tolist(), strict=True))
    assert as_dict(routing, 0) == pytest.approx(want, rel=1e-5)


def test_the_router_stays_float32_in_a_bfloat16_model() -> None:
    """Biases near 7 that bfloat16 cannot tell apart (its steps there are 1/32) decide the choice."""
    moe = MoE(layer_context(dtype=torch.bfloat16), moe_config(shared=0), HIDDEN)
    fill(moe, seed=33)
    moe.gate.weight.data.zero_()
    assert moe.gate.bias is not None
    moe.gate.bias.data.copy_(7 + torch.tensor([0, 5, 1, 4, 2, 7, 3, 6]) * 1e-4)
    assert (moe.gate.weight.dtype, moe.gate.bias.dtype, moe.gate_up.dtype) == (torch.float32,) * 2 + (torch.bfloat16,)
    routing = moe.gate(random_tensor(3, HIDDEN, seed=34))
    assert routing.expert_weights.dtype == torch.float32
    assert [sorted(row) for row in routing.expert_ids.tolist()] == [[1, 5, 7]] * 3
