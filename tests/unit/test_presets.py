"""Presets are what their models' config.json describe, few layers aside."""

import sys

import pytest

from configs.model import ModelConfig
from tests import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from presets import PRESETS
from roofline import config_of


def layers(config: ModelConfig) -> list[tuple[str, str]]:
    return [(layer.attention, layer.feed_forward) for layer in config.layers]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v2-lite", [("mla", "dense"), *[("mla", "moe")] * 26]),
        ("v3-slice", [("mla", "dense"), *[("mla", "moe")] * 3]),
        ("v32-slice", [("dsa_full", "dense"), *[("dsa_full", "moe")] * 3]),
        ("glm52-slice", [("dsa_full", "dense"), *[("dsa_shared", "moe")] * 3]),
        ("tiny", [("dsa_full", "dense"), *[("dsa_full", "moe")] * 2]),
    ],
)
def test_layers(name: str, expected: list[tuple[str, str]]) -> None:
    assert layers(config_of(name)) == expected


def test_every_slice_has_an_mtp_module() -> None:
    for name in PRESETS:
        mtp = config_of(name).mtp
        if name == "v2-lite":
            assert mtp is None
        else:
            assert mtp is not None and mtp.num_modules == 1
            assert mtp.layer.feed_forward == "moe" and mtp.share_selection == (name == "glm52-slice")


@pytest.mark.parametrize(
    ("name", "attention", "moe"),
    [  # heads, query latent, latent, nope, rope, value; experts, chosen, groups, of them, width, shared width, scale
        ("v2-lite", (16, None, 512, 128, 64, 128), (64, 6, 1, 1, 1408, 2816, 1.0)),
        ("v3-slice", (128, 1536, 512, 128, 64, 128), (256, 8, 8, 4, 2048, 2048, 2.5)),
        ("v32-slice", (128, 1536, 512, 128, 64, 128), (256, 8, 8, 4, 2048, 2048, 2.5)),
        ("glm52-slice", (64, 2048, 512, 192, 64, 256), (256, 8, 1, 1, 2048, 2048, 2.5)),
    ],
)
def test_shapes(name: str, attention: tuple[int | None, ...], moe: tuple[float, ...]) -> None:
    config = config_of(name)
    a, m = config.attention, config.moe
    assert m is not None
    dims = (a.num_heads, a.q_lora_rank, a.kv_lora_rank, a.qk_nope_head_dim, a.qk_rope_head_dim, a.v_head_dim)
    assert dims == attention
    r = m.router
    counts = (r.num_experts, r.top_k, r.num_groups, r.top_groups)
    assert (*counts, m.intermediate_size, m.shared_intermediate_size, r.scale) == moe


@pytest.mark.parametrize(
    ("name", "indexer"), [("v32-slice", (64, 128, 2048, False)), ("glm52-slice", (32, 128, 2048, True))]
)
def test_indexers(name: str, indexer: tuple[int, int, int, bool]) -> None:
    i = config_of(name).indexer
    assert i is not None and (i.num_heads, i.head_dim, i.top_k, i.rope_interleaved) == indexer


def test_rotation() -> None:
    yarn = config_of("v3-slice").attention.rope
    assert (yarn.kind, yarn.factor, yarn.original_max_position_embeddings) == ("yarn", 40, 4096)
    plain = config_of("glm52-slice").attention.rope
    assert (plain.kind, plain.theta) == ("default", 8e6)
