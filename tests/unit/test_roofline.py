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
    # The module stores both rows of a sequence, and runs its layer over the last one.
    drafting = by_name(step_parts(load_model_config(tmp_path), Step(3, 100, 2), drafts=1))
    layer = projections * 2 + 3 * 100 * 8 * 2 + 128 + 4 * (1 - 0.75**3) * 168 * 2
    assert drafting["MTP"][0] == pytest.approx(2 * 8 * 8 * 2 + layer + 20 * 8 * 2)
    every_row = 2 * 6 * (2 * 8 * 8 + 8 * 8)
    each_sequence = 2 * 3 * (projections + 100 * 2 * (8 + 6) + 8 * 4 + 168 + 20 * 8)
    assert drafting["MTP"][1] == every_row + each_sequence
    three = by_name(step_parts(load_model_config(tmp_path), Step(3, 100, 2), drafts=3))["MTP"]
    assert three[0] == pytest.approx(3 * drafting["MTP"][0])
    assert three[1] == every_row + 3 * each_sequence + 2 * 2 * 3 * 2 * 8 * 8
    halves = by_name(step_parts(load_model_config(tmp_path), Step(3, 100, 2), tp=2))
    assert halves["head"][0] == parts["head"][0] / 2 and halves["router"] == parts["router"]


def test_sparse_rows_read_their_own_selection() -> None:
    config = config_of("v32-slice")
    attention = by_name(step_parts(config, Step(1, 16384, 2)))["attention"]
    assert attention[0] == 4 * 2 * 2048 * 576 * 2
    assert by_name(step_parts(config, Step(1, 1024, 2)))["attention"][0] == 4 * 1024 * 576 * 2
    shared = by_name(step_parts(config_of("glm52-slice"), Step(1, 16384)))["indexer"]
    assert shared[0] == 2 * (2048 * 32 * 128 + 6144 * (128 + 32) + 16384 * 128)  # one layer of four has an indexer


def test_an_indexer_that_need_not_choose_only_keeps_keys() -> None:
    within = by_name(step_parts(config_of("v32-slice"), Step(8, 2048)))
    assert within["indexer"] == (4 * 7168 * 128 * 2, 4 * 2 * 8 * 7168 * 128)
    assert within["attention"][0] == 4 * 8 * 2048 * 576 * 2


def test_rows_do_not_read_more_than_there_is() -> None:
    assert by_name(step_parts(config_of("v32-slice"), Step(1, 3000, 2)))["attention"][0] == 4 * 3000 * 576 * 2


def test_sparse_prefill() -> None:
    """Of 4096 rows the first 2048 take the i positions they see, unscored, the others choose 2048 each."""
    parts = by_name(step_parts(config_of("v32-slice"), Step(1, 4096, 4096, is_prefill=True)))
    pairs = sum(min(i, 2048) for i in range(1, 4097))
    assert parts["attention"] == (4 * 4096 * 576 * 2, 4 * 2 * pairs * 128 * (576 + 512))
    scored = sum(range(2049, 4097))
    weights = 1536 * 64 * 128 + 7168 * 64
    per_layer = 4096 * 7168 * 128 + 2048 * weights + scored * 64 * 128
    assert parts["indexer"] == (4 * 2 * (7168 * 128 + weights + 4096 * 128), 4 * 2 * per_layer)
    assert parts["head"][1] == 2 * 129280 * 7168


def test_drafts_that_share_a_selection_do_not_score() -> None:
    shared = config_of("glm52-slice")
    assert shared.mtp is not None
    own = shared.model_copy(update={"mtp": shared.mtp.model_copy(update={"share_selection": False})})
    step = Step(1, 16384, 4)
    scores = 2 * (2048 * 32 * 128 + 6144 * (128 + 32) + 16384 * 128)
    for drafts, saved in ((1, 0), (3, 2)):
        difference = (
            by_name(step_parts(own, step, drafts))["MTP"][0] - by_name(step_parts(shared, step, drafts))["MTP"][0]
        )
        assert difference == pytest.approx(saved * scores)


@pytest.mark.parametrize(
    ("step", "drafts", "tp", "message"),
    [
        (Step(0, 8), 0, 1, "--batch 0: give 1 or more"),
        (Step(1, -5), 0, 1, "--context -5: give 1 or more"),
        (Step(1, 8), -1, 1, "--drafts -1: give 0 or more"),
        (Step(1, 8), 0, 0, "--tp 0: give 1 or more"),
        (Step(1, 8), 0, 3, r"num_attention_heads \(4\) is not divisible by tp_size 3"),
    ],
)
def test_what_cannot_be_is_said(step: Step, drafts: int, tp: int, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        step_parts(config_of("tiny"), step, drafts, tp)


def test_the_longer_of_bytes_and_operations_counts() -> None:
    card = Card(bandwidth=10, flops=100)
    assert floor_seconds([Part("a", 20, 100), Part("b", 10, 500)], card) == 2 + 5


def test_v2_lite_on_an_h200() -> None:
    """4.9 and 33 GB a step: 1.16 and 7.74 ms at the 4.26 TB/s that a copy reaches."""
    config = config_of("v2-lite")
    for batch, milliseconds in ((1, 1.16), (64, 7.74)):
        floor = floor_seconds(step_parts(config, Step(batch, 1024)), Card(bandwidth=4.26e12))
        assert floor * 1e3 == pytest.approx(milliseconds, rel=0.01)
