"""config.json of every supported family -> ModelConfig, and the sentences that refuse the rest."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from configs.base import ConfigError
from configs.engine import EngineConfig, ParallelConfig, ServeConfig
from configs.hf import SUPPORTED_TYPES, load_model_config
from configs.model import IndexerConfig, LayerSpec, ModelConfig, RopeConfig
from serve.hosting import EnginePlan
from tests.oracles import SHIPPED

V2_FILE, V3_FILE, GLM_FILE = (
    SHIPPED / f"tiny-{name}" / "config.json"
    for name in ("deepseek_v2-group", "deepseek_v3-yarn", "glm4_moe_lite-noqlora")
)
YARN = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
ABSENT = object()  # as the value of a field: leave it out


def write(folder: Path, base: Path = V3_FILE, **changes: Any) -> Path:
    """A folder with a changed config.json."""
    raw = {**json.loads(base.read_text()), **changes}
    kept = {name: value for name, value in raw.items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def parse(folder: Path, base: Path = V3_FILE, **changes: Any) -> ModelConfig:
    return load_model_config(write(folder, base, **changes))


def refusal(folder: Path, base: Path = V3_FILE, **changes: Any) -> str:
    """The message, without the file's path that it starts with."""
    with pytest.raises(ConfigError) as caught:
        parse(folder, base, **changes)
    start = f"{folder / 'config.json'}: "
    assert str(caught.value).startswith(start)
    return str(caught.value).removeprefix(start)


def test_deepseek_v2(tmp_path: Path) -> None:
    config = parse(tmp_path, V2_FILE)
    assert [layer.feed_forward for layer in config.layers] == ["dense", "moe", "moe"]
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (320, 128, 192)
    mla = config.attention
    assert (mla.num_heads, mla.q_lora_rank, mla.kv_lora_rank, mla.v_head_dim) == (4, 48, 64, 32)
    assert (mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.qk_head_dim, mla.cache_dim) == (32, 16, 48, 80)
    assert config.moe is not None
    assert config.moe.router.model_dump() == {
        "num_experts": 8,
        "top_k": 3,
        "scoring": "softmax",
        "method": "group_limited_greedy",
        "num_groups": 4,
        "top_groups": 2,
        "normalise": False,
        "scale": 16.0,
    }
    assert (config.moe.intermediate_size, config.moe.shared_intermediate_size) == (64, 128)
    assert (config.indexer, config.mtp) == (None, None)
    assert (config.eos_token_ids, config.dtype) == ((1,), "bfloat16")


def test_greedy_routing_has_no_groups(tmp_path: Path) -> None:
    config = parse(tmp_path, V2_FILE, topk_method="greedy")
    assert config.moe is not None
    router = config.moe.router
    assert (router.method, router.num_groups, router.top_groups) == ("greedy", 1, 1)


@pytest.mark.parametrize("model_type", [name for name in SUPPORTED_TYPES if name != "deepseek_v2"])
def test_the_families_after_v2(tmp_path: Path, model_type: str) -> None:
    config = parse(tmp_path, model_type=model_type, **INDEXER)
    assert config.moe is not None
    router = config.moe.router
    assert (router.scoring, router.method, router.normalise, router.scale) == ("sigmoid", "noaux_tc", True, 2.5)
    assert (router.num_groups, router.top_groups) == (4, 2)
    kinds = {layer.attention for layer in config.layers}
    if model_type in ("deepseek_v32", "glm_moe_dsa"):
        interleaved = model_type == "glm_moe_dsa"
        assert config.indexer == IndexerConfig(num_heads=16, head_dim=32, top_k=128, rope_interleaved=interleaved)
        assert kinds == {"dsa_full"}
    else:
        assert config.indexer is None and kinds == {"mla"}


def test_fields_that_hub_files_leave_out_get_the_familys_defaults(tmp_path: Path) -> None:
    for base, expected in ((V2_FILE, ("softmax", "greedy", False)), (V3_FILE, ("sigmoid", "noaux_tc", True))):
        absent = dict.fromkeys(("scoring_func", "topk_method", "norm_topk_prob"), ABSENT)
        config = parse(tmp_path, base, **absent)
        assert config.moe is not None
        router = config.moe.router
        assert (router.scoring, router.method, router.normalise) == expected


def test_glm_without_q_lora_or_rope_scaling(tmp_path: Path) -> None:
    config = parse(tmp_path, GLM_FILE)
    assert config.attention.q_lora_rank is None
    assert config.attention.rope == RopeConfig(theta=1_000_000)
    assert config.attention.softmax_scale == pytest.approx(48**-0.5)
    assert [layer.feed_forward for layer in parse(tmp_path, GLM_FILE, first_k_dense_replace=ABSENT).layers] == [
        "dense",
        "moe",
        "moe",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"first_k_dense_replace": 0}, "moe moe moe"),
        ({"first_k_dense_replace": 2}, "dense dense moe"),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 2}, "moe dense moe"),
        ({"n_routed_experts": None}, "dense dense dense"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "moe dense moe"),
    ],
)
def test_layer_specs(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    config = parse(tmp_path, **changes)
    assert " ".join(layer.feed_forward for layer in config.layers) == expected
    assert (config.moe is None) == ("moe" not in expected)


INDEXER = {"index_topk": 128, "index_n_heads": 16, "index_head_dim": 32}


@pytest.mark.parametrize("name", INDEXER)
def test_sparse_models_need_an_indexers_sizes(tmp_path: Path, name: str) -> None:
    assert f"{name}: is missing" in refusal(tmp_path, model_type="deepseek_v32", **INDEXER | {name: None})


def test_an_indexer_that_cannot_work_is_refused(tmp_path: Path) -> None:
    narrow = refusal(tmp_path, model_type="deepseek_v32", **INDEXER | {"index_head_dim": 8})
    assert "index_head_dim (8) is smaller than qk_rope_head_dim (16)" in narrow
    assert "q_lora_rank: is missing" in refusal(tmp_path, model_type="deepseek_v32", **INDEXER, q_lora_rank=None)


F, S = "dsa_full", "dsa_shared"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [F, F, F, F, F, F, F]),
        ({"index_topk_freq": 2}, [F, F, S, F, S, F, S]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [F, F, F, S, S, S, F]),
        ({"index_topk_pattern": "FSSFSSF", "index_topk_freq": 2}, [F, S, S, F, S, S, F]),
        ({"indexer_types": ["full", *["shared"] * 7], "index_topk_pattern": "FFFFFFF"}, [F, S, S, S, S, S, S]),
    ],
)
def test_layers_that_share_a_selection(tmp_path: Path, changes: dict[str, Any], expected: list[str]) -> None:
    """`indexer_types` goes before the pattern, and that before frequency and offset."""
    changes = INDEXER | changes | {"num_hidden_layers": 7, "model_type": "glm_moe_dsa"}
    assert [layer.attention for layer in parse(tmp_path, **changes).layers] == expected


def test_sharing_must_cover_every_layer(tmp_path: Path) -> None:
    message = refusal(tmp_path, model_type="glm_moe_dsa", **INDEXER, index_topk_pattern="FS")
    assert "index_topk_pattern has 2 entries for 3 layers (num_hidden_layers)" in message
    message = refusal(tmp_path, model_type="glm_moe_dsa", **INDEXER, index_topk_pattern="SFF")
    assert "layer 0 shares the selection of an earlier layer" in message


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_mtp_modules(tmp_path: Path, name: str) -> None:
    both = {"num_nextn_predict_layers": ABSENT, "num_mtp_layers": ABSENT}
    config = parse(tmp_path, **both | {name: 2})
    assert config.mtp is not None
    assert (config.mtp.num_modules, config.mtp.share_selection) == (2, False)
    assert config.mtp.layer == LayerSpec(attention="mla", feed_forward="moe")
    config.check_drafts(2)
    with pytest.raises(ConfigError, match=r"num_draft_tokens \(3\) exceeds the checkpoint's 2 MTP modules"):
        config.check_drafts(3)
    parse(tmp_path, **both | {name: 1}).check_drafts(15)
    with pytest.raises(ConfigError, match=r"num_draft_tokens is 1, but config\.json names no MTP module"):
        parse(tmp_path, **both).check_drafts(1)
    sparse = parse(tmp_path, **both | INDEXER | {name: 1}, model_type="glm_moe_dsa", index_share_for_mtp_iteration=True)
    assert sparse.mtp is not None
    assert (sparse.mtp.layer.attention, sparse.mtp.share_selection) == ("dsa_full", True)


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [(1, None, (1,)), ([1, 2], None, (1, 2)), (None, None, ()), (1, [5, 1], (5, 1)), (1, 7, (7, 1)), ([3], {}, (3,))],
)
def test_eos_ids_come_from_both_files(tmp_path: Path, eos: Any, generation: Any, expected: tuple[int, ...]) -> None:
    if generation is not None:
        value = {} if generation == {} else {"eos_token_id": generation}
        (tmp_path / "generation_config.json").write_text(json.dumps(value))
    assert parse(tmp_path, eos_token_id=eos).eos_token_ids == expected


# ------------------------------------------------------------------------------------------------- rotary settings

YARN_40 = RopeConfig(kind="yarn", theta=10000, **YARN)  # DeepSeek-V3's


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 10000, "rope_scaling": {"type": "yarn", **YARN}}, YARN_40),
        ({"rope_theta": 10000, "rope_scaling": {"rope_type": "yarn", **YARN}}, YARN_40),
        ({"rope_theta": ABSENT, "rope_scaling": {"type": "yarn", **YARN}}, YARN_40),  # theta's default
        ({"rope_theta": 10000, "rope_scaling": None}, RopeConfig(theta=10000)),
        ({"rope_theta": 5e5, "rope_scaling": ABSENT}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000, **YARN}, "rope_scaling": ABSENT}, YARN_40),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 8e6}, "rope_scaling": ABSENT},
            RopeConfig(theta=8e6),
        ),
        ({"rope_scaling": None, "rope_interleave": False}, RopeConfig(theta=10000, interleaved=False)),
    ],
)
def test_both_spellings_of_rotary_settings(tmp_path: Path, changes: dict[str, Any], expected: RopeConfig) -> None:
    assert parse(tmp_path, **changes).attention.rope == expected


def test_yarn_takes_what_the_file_says_and_falls_back_on_the_models_length(tmp_path: Path) -> None:
    optional = {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False}
    rope = parse(tmp_path, rope_scaling={"type": "yarn", "factor": 4, **optional}).attention.rope
    assert {name: getattr(rope, name) for name in optional} == optional
    assert rope.original_max_position_embeddings == 512


@pytest.mark.parametrize(
    ("settings", "softmax_scale", "cos_sin_scale"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.8738537, 1.0),  # V3: (0.1 ln 40 + 1)^2 = 1.3688879^2
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.5896261, 1.0),  # V2: (0.0707 ln 40 + 1)^2 = 1.2608038^2
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.4029075, 1.1557220),  # 1.1844440^2; 1.3688879 / 1.1844440
        ({}, 1.0, 1.3688879),
        ({"attention_factor": 1.25}, 1.0, 1.25),
    ],
)
def test_yarn_scales(settings: dict[str, float], softmax_scale: float, cos_sin_scale: float) -> None:
    rope = RopeConfig(kind="yarn", theta=10000, factor=40, original_max_position_embeddings=4096, **settings)
    assert rope.softmax_scale == pytest.approx(softmax_scale, rel=2e-6)
    assert rope.cos_sin_scale == pytest.approx(cos_sin_scale, rel=1e-6)


def test_attention_scale_of_deepseek_v3(tmp_path: Path) -> None:
    mla = parse(tmp_path, qk_nope_head_dim=128, qk_rope_head_dim=64, rope_scaling={"type": "yarn", **YARN}).attention
    assert mla.softmax_scale == pytest.approx(0.1352338, rel=1e-5)  # 192^-0.5 * 1.8738537
    assert mla.softmax_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, ["model_type 'llama'", "glm4_moe_lite"]),
        ({"model_type": ABSENT, "architectures": None}, ["model_type None", "deepseek_v3", "glm4_moe_lite"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'silu'"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"vocab_size": -1}, ["vocab_size", "greater than or equal to 1"]),
        ({"hidden_size": "wide"}, ["hidden_size", "integer"]),
        ({"n_group": 3}, ["n_group (3) must divide n_routed_experts (8)"]),
        ({"topk_group": 5}, ["topk_group (5) must not exceed n_group (4)"]),
        ({"num_experts_per_tok": 5}, ["num_experts_per_tok (5) exceeds the 4 experts"]),
        ({"topk_method": "psychic"}, ["method", "noaux_tc"]),
        ({"scoring_func": "tanh"}, ["scoring", "sigmoid"]),
        ({"mlp_layer_types": ["dense", "sparse"]}, ["mlp_layer_types has 2 entries for 3 layers"]),
        ({"mlp_layer_types": ["dense", "sparse", "odd"]}, ["mlp_layer_types", "'dense' or 'sparse'"]),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ["rope_scaling", "'default' or 'yarn'"]),
        ({"rope_scaling": {"type": "yarn"}}, ["rope_scaling.factor: is missing"]),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, ["factor", "greater than or equal to 1"]),
        ({"dtype": "int8", "torch_dtype": ABSENT}, ["dtype", "'bfloat16'"]),
        ({"num_hidden_layers": "3"}, ["num_hidden_layers", "valid integer"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling"]),
        ({"mlp_layer_types": 3}, ["mlp_layer_types", "valid list"]),
        ({"moe_layer_freq": [0, 1, 1]}, ["moe_layer_freq", "valid integer"]),
        ({"n_shared_experts": "2"}, ["n_shared_experts", "valid integer"]),
        ({"qk_rope_head_dim": 15}, ["qk_rope_head_dim", "multiple of 2"]),
        ({"routed_scaling_factor": "big"}, ["routed_scaling_factor", "valid number"]),
    ],
)
def test_what_cannot_work_is_refused_by_its_field(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    message = refusal(tmp_path, **changes)
    assert [part for part in parts if part not in message] == []


REQUIRED = [
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "max_position_embeddings"),
    *("moe_intermediate_size", "num_experts_per_tok"),
]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    changes: dict[str, Any] = {name: ABSENT}
    assert refusal(tmp_path, **changes) == f"{name}: is missing"


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("base", "tp_size", "ep_size", "parts"),
    [
        (V3_FILE, 3, 1, ["num_attention_heads (4)", "vocab_size (320)", "moe_intermediate_size (64)", "tp_size 3"]),
        (V3_FILE, 8, 1, ["num_attention_heads (4) is not divisible by tp_size 8"]),
        (V3_FILE, 3, 3, ["n_routed_experts (8) is not divisible by ep_size 3"]),
        (V3_FILE, 128, 1, ["moe_intermediate_size (64) is not divisible by tp_size / ep_size (128)", "larger ep_size"]),
        (V3_FILE, 128, 1, ["intermediate_size (192)", "moe_intermediate_size * n_shared_experts (64)", "vocab_size"]),
    ],
)
def test_dimensions_that_do_not_divide_are_named(
    tmp_path: Path, base: Path, tp_size: int, ep_size: int, parts: list[str]
) -> None:
    config = parse(tmp_path, base)
    with pytest.raises(ConfigError) as caught:
        config.check_parallel(tp_size, ep_size)
    assert [part for part in [*parts, "choose other tp_size / ep_size"] if part not in str(caught.value)] == []


@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_dimensions_that_divide_are_accepted(tmp_path: Path, tp_size: int, ep_size: int) -> None:
    parse(tmp_path).check_parallel(tp_size, ep_size)


def test_a_model_without_experts_takes_no_expert_partition(tmp_path: Path) -> None:
    config = parse(tmp_path, n_routed_experts=None)
    config.check_parallel(2, 1)
    with pytest.raises(ConfigError, match="ep_size is 2 but the model has no experts: use 1"):
        config.check_parallel(2, 2)


# ------------------------------------------------------------------------------------------------- the engine's plan


def test_a_plan_takes_the_models_context_unless_told_less(tmp_path: Path) -> None:
    write(tmp_path)
    assert EnginePlan.make(EngineConfig(model=tmp_path)).max_model_len == 512
    assert EnginePlan.make(EngineConfig(model=tmp_path, max_model_len=100)).max_model_len == 100
    assert EnginePlan.make(EngineConfig(model=tmp_path, max_model_len=512)).max_model_len == 512


def test_a_plan_longer_than_the_model_says_which_limit(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"max_model_len \(513\) exceeds 512, max_position_embeddings .*at most 512"):
        EnginePlan.make(EngineConfig(model=tmp_path, max_model_len=513))


def test_a_plan_checks_that_the_checkpoint_can_draft(tmp_path: Path) -> None:
    write(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"config\.json names no MTP module"):
        EnginePlan.make(EngineConfig(model=tmp_path, num_draft_tokens=1))


def test_a_plan_checks_the_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_attention_heads \(4\)"):
        EnginePlan.make(EngineConfig(model=write(tmp_path), parallel=ParallelConfig(tp_size=3)))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"num_draft_tokens": 4, "max_num_batched_tokens": 4}, r"num_draft_tokens \(4\) .* do not fit a step"),
        ({"device": "cpu", "topk_backend": "flashinfer"}, "topk_backend 'flashinfer' needs a GPU, and device is cpu"),
        ({"device": "cpu", "moe_backend": "triton"}, "moe_backend 'triton' needs a GPU, and device is cpu"),
        ({"topk_exchange": "ring"}, "args: engine.topk_exchange: .*'replicated', 'leader' or 'sharded'"),
        ({"max_modle_len": 9}, "args: engine.max_modle_len: unknown setting"),
        ({"parallel": {"tp": 2}}, "args: engine.parallel.tp: unknown setting"),
        ({"parallel": {"tp_size": 4, "ep_size": 3}}, r"ep_size \(3\) must divide tp_size \(4\): use ep_size 1 .* 4"),
        ({"parallel": {"tp_size": 0}}, "args: engine.parallel.tp_size: .*greater than or equal to 1"),
        ({"max_model_len": 0}, "args: engine.max_model_len: .*greater than or equal to 1"),
        ({"kv_cache_memory_fraction": 1.0}, "args: engine.kv_cache_memory_fraction: .*less than 1"),
        (
            {"attention_backend": "fa9"},
            "args: engine.attention_backend: .*'flashinfer_fa3' or 'trtllm_gen'",
        ),
        ({"model": "/nowhere/at/all"}, "args: engine.model: /nowhere/at/all is not a folder"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_their_path(
    tmp_path: Path, engine: dict[str, Any], message: str
) -> None:
    args = {"engine": {"model": str(write(tmp_path)), **engine}}
    with pytest.raises(ConfigError, match=message):
        ServeConfig.from_args(args)


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"engine.model: {tmp_path} has no config.json"):
        ServeConfig.from_args({"engine": {"model": str(tmp_path)}})


def test_an_infinite_setting_is_refused_by_its_name(tiny_model: Path) -> None:
    with pytest.raises(ValidationError, match="step_timeout_s"):
        EngineConfig(model=tiny_model, step_timeout_s=math.inf)
