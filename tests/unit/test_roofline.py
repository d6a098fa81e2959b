"""The floor of a step against sums made by hand."""

import json
import sys
from pathlib import Path

import pytest

from configs.hf import load_model_config
from tests import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from presets import PRESETS
from roofline import Card, Part, Step, config_of, floor_seconds, step_parts


def by_name(parts: list[Part]) -> dict[str, tuple[float, float]]:
    sums: dict[str, tuple[float, float]] = {}
    for part in parts:
        size, flops = sums.get(part.name, (0.0, 0.0))
        sums[part.name] = size + part.bytes, flops + part.flops
    return sums


def test_every_part_of_a_small_model(tmp_path: Path) -> None:
    """Hidden 8, 2 heads of 4 + 2 and 3, latents 6 + 2 and queries from 5; one dense layer of 10, one of 4 experts of
    7 of which a row takes 1, and no shared one; vocabulary 20; 3 sequences of 100 positions with 2 rows each."""
    config = {
        **PRESETS["v3-slice"],
        "rope_scaling": None,
        "vocab_size": 20,
        "hidden_size": 8,
        "intermediate_size": 10,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "q_lora_rank": 5,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 1,
        "n_shared_experts": 0,
        "moe_intermediate_size": 7,
        "n_group": 1,
        "topk_group": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    parts = by_name(step_parts(load_model_config(tmp_path), Step(3, 100, 2), drafts=0))
    projections = 8 * (5 + 8) + 2 * (5 * 6 + 6 * (4 + 3)) + 2 * 3 * 8
    assert parts["projections"] == (2 * 2 * projections, 2 * 2 * projections * 6)
    assert parts["attention"] == (2 * 3 * 100 * 8 * 2, 2 * 2 * 6 * 100 * 2 * (8 + 6))
    assert parts["dense MLP"] == (3 * 8 * 10 * 2, 2 * 3 * 8 * 10 * 6)
    assert parts["router"] == (8 * 4 * 4, 2 * 8 * 4 * 6)
    assert parts["experts"] == pytest.approx((4 * (1 - 0.75**6) * 168 * 2, 2 * 6 * 168))
    assert parts["shared experts"] == (0, 0)
    assert parts["head"] == (20 * 8 * 2, 2 * 20 * 8 * 6)
    drafting = by_name(step_parts(load_model_config(tmp_path), Step(3, 100, 2), drafts=1))
    layer = projections * 2 + 3 * 100 * 8 * 2 + 128 + 4 * (1 - 0.75**6) * 168 * 2
    assert drafting["MTP"][0] == pytest.approx(2 * 8 * 8 * 2 + layer + 20 * 8 * 2)
    halves = by_name(step_parts(load_model_config(tmp_path), Step(3, 100, 2), tp=2))
    assert halves["head"][0] == parts["head"][0] / 2 and halves["router"] == parts["router"]


def test_sparse_rows_read_their_own_selection() -> None:
    config = config_of("v32-slice")
    attention = by_name(step_parts(config, Step(1, 16384, 2)))["attention"]
    assert attention[0] == 4 * 2 * 2048 * 576 * 2
    assert by_name(step_parts(config, Step(1, 1024, 2)))["attention"][0] == 4 * 1024 * 576 * 2
    shared = by_name(step_parts(config_of("glm52-slice"), Step(1, 16384)))["indexer"]
    assert shared[0] == 2 * (2048 * 32 * 128 + 6144 * (128 + 32) + 16384 * 128)  # one layer of four has an indexer


def test_the_longer_of_bytes_and_operations_counts() -> None:
    card = Card(bandwidth=10, flops=100)
    assert floor_seconds([Part("a", 20, 100), Part("b", 10, 500)], card) == 2 + 5


def test_v2_lite_on_an_h200() -> None:
    """4.9 and 33 GB a step: 1.16 and 7.74 ms at the 4.26 TB/s that a copy reaches."""
    config = config_of("v2-lite")
    for batch, milliseconds in ((1, 1.16), (64, 7.74)):
        floor = floor_seconds(step_parts(config, Step(batch, 1024)), Card(bandwidth=4.26e12))
        assert floor * 1e3 == pytest.approx(milliseconds, rel=0.01)
