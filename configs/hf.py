"""A Hugging Face checkpoint's `config.json` -> `ModelConfig`.

Both spellings of rotary settings are read: `rope_theta` + `rope_scaling` (DeepSeek's hub files) and `rope_parameters`
(transformers 5, GLM). Keys that do not matter to inference are ignored; those that do are typed here under their own
names, so that an error names what stands in the file.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from configs.base import ConfigError, explain
from configs.model import (
    IndexerConfig,
    LayerSpec,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    RopeConfig,
    RouterConfig,
)

_DSA_TYPES = ("deepseek_v32", "glm_moe_dsa")
SUPPORTED_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", *_DSA_TYPES)

Size = Annotated[int, Field(ge=1)]
TokenIds = Annotated[
    tuple[int, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else (value,))
]


class _FromFile(BaseModel):
    """Strict types, unknown keys ignored, null = absent."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class HfRope(_FromFile):
    """`rope_scaling` or `rope_parameters`."""

    kind: Literal["default", "yarn"] = Field(default="default", validation_alias=AliasChoices("rope_type", "type"))
    rope_theta: float | None = Field(default=None, gt=0)
    factor: float | None = Field(default=None, ge=1)
    original_max_position_embeddings: Size | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


class HfConfig(_FromFile):
    """The fields of `config.json` that inference depends on."""

    model_type: str
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: int = Field(ge=2, multiple_of=2)
    v_head_dim: Size
    max_position_embeddings: Size
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    tie_word_embeddings: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", validation_alias=AliasChoices("dtype", "torch_dtype")
    )
    eos_token_id: TokenIds = ()
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: HfRope | None = None
    rope_parameters: HfRope | None = None
    rope_interleave: bool = True
    n_routed_experts: Size | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    n_shared_experts: int = Field(default=0, ge=0)
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    first_k_dense_replace: int | None = Field(default=None, ge=0)
    moe_layer_freq: Size = 1
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] | None = None
    scoring_func: Literal["softmax", "sigmoid"] | None = None
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: Size = 1
    topk_group: Size = 1
    index_topk: Size | None = None
    index_n_heads: Size | None = None
    index_head_dim: Size | None = None
    indexer_rope_interleave: bool | None = None
    indexer_types: list[Literal["full", "shared"]] | None = None
    index_topk_pattern: str | None = Field(default=None, pattern="^[FS]*$")
    index_topk_freq: Size = 1
    index_skip_topk_offset: int = Field(default=2, ge=0)
    index_share_for_mtp_iteration: bool = False
    num_nextn_predict_layers: int = Field(
        default=0, ge=0, validation_alias=AliasChoices("num_nextn_predict_layers", "num_mtp_layers")
    )


def load_model_config(folder: Path) -> ModelConfig:
    """Reads `config.json` (and eos ids from `generation_config.json`) of a checkpoint folder.

    Raises ConfigError that names the file and the field when something is missing, unknown or of the wrong type.
    """
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("model_type") not in SUPPORTED_TYPES:
        raise ConfigError(
            f"{path}: model_type {raw.get('model_type')!r} is not supported; supported are {', '.join(SUPPORTED_TYPES)}"
        )
    try:
        return _model_config(HfConfig.model_validate(raw), _generation_eos(folder))
    except ValidationError as error:
        raise ConfigError(explain(error, where=str(path))) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ConfigError names the file when it is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


class _Generation(_FromFile):
    eos_token_id: TokenIds = ()


def _generation_eos(folder: Path) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        return _Generation.model_validate(read_json(path)).eos_token_id
    except ValidationError as error:
        raise ConfigError(explain(error, where=str(path))) from None


def _model_config(hf: HfConfig, generation_eos: tuple[int, ...]) -> ModelConfig:
    layers = _layer_specs(hf)
    return ModelConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        layers=layers,
        attention=MLAConfig(
            num_heads=hf.num_attention_heads,
            q_lora_rank=hf.q_lora_rank,
            kv_lora_rank=hf.kv_lora_rank,
            qk_nope_head_dim=hf.qk_nope_head_dim,
            qk_rope_head_dim=hf.qk_rope_head_dim,
            v_head_dim=hf.v_head_dim,
            rope=_rope(hf),
        ),
        moe=_moe(hf) if any(layer.feed_forward == "moe" for layer in layers) else None,
        rms_norm_eps=hf.rms_norm_eps,
        tie_word_embeddings=hf.tie_word_embeddings,
        max_position_embeddings=hf.max_position_embeddings,
        indexer=_indexer(hf) if hf.model_type in _DSA_TYPES else None,
        mtp=_mtp(hf),
        dtype=hf.dtype,
        # Some releases name ids past the embedding's rows; no token of the model can be one.
        eos_token_ids=tuple(i for i in dict.fromkeys((*generation_eos, *hf.eos_token_id)) if i < hf.vocab_size),
    )


def _need(hf: HfConfig, name: str) -> Any:
    if (value := getattr(hf, name)) is None:
        raise ConfigError(f"{name}: is missing")
    return value


def _layer_specs(hf: HfConfig) -> tuple[LayerSpec, ...]:
    kinds = zip(_attention_kinds(hf), _feed_forward_kinds(hf), strict=True)
    return tuple(LayerSpec(attention=attention, feed_forward=feed_forward) for attention, feed_forward in kinds)


def _feed_forward_kinds(hf: HfConfig) -> list[Literal["dense", "moe"]]:
    count = hf.num_hidden_layers
    if (kinds := hf.mlp_layer_types) is not None:
        if len(kinds) < count:
            raise ConfigError(f"mlp_layer_types has {len(kinds)} entries for {count} layers (num_hidden_layers)")
        return ["dense" if kind == "dense" else "moe" for kind in kinds[:count]]
    default_dense = 1 if hf.model_type == "glm4_moe_lite" else 0
    first_moe = default_dense if hf.first_k_dense_replace is None else hf.first_k_dense_replace
    return [
        "moe" if hf.n_routed_experts and i >= first_moe and i % hf.moe_layer_freq == 0 else "dense"
        for i in range(count)
    ]


def _attention_kinds(hf: HfConfig) -> list[Literal["mla", "dsa_full", "dsa_shared"]]:
    """Which layers have an indexer: `indexer_types`, else `index_topk_pattern`, else `index_topk_freq` and offset
    (GLM-5.2; IndexCache, arXiv 2603.12201)."""
    count = hf.num_hidden_layers
    if hf.model_type not in _DSA_TYPES:
        return ["mla"] * count
    if hf.indexer_types is not None:
        name, full = "indexer_types", [kind == "full" for kind in hf.indexer_types]
    elif hf.index_topk_pattern is not None:
        name, full = "index_topk_pattern", [letter == "F" for letter in hf.index_topk_pattern]
    else:
        name, offset = "index_topk_freq", hf.index_skip_topk_offset
        full = [max(i - offset + 1, 0) % hf.index_topk_freq == 0 for i in range(count)]
    if len(full) < count:
        raise ConfigError(f"{name} has {len(full)} entries for {count} layers (num_hidden_layers)")
    return ["dsa_full" if own else "dsa_shared" for own in full[:count]]


def _indexer(hf: HfConfig) -> IndexerConfig:
    head_dim = _need(hf, "index_head_dim")
    if head_dim < hf.qk_rope_head_dim:
        raise ConfigError(f"index_head_dim ({head_dim}) is smaller than qk_rope_head_dim ({hf.qk_rope_head_dim})")
    if hf.q_lora_rank is None:
        raise ConfigError("q_lora_rank: is missing, and the indexer's queries are made from that latent")
    interleaved = hf.indexer_rope_interleave
    return IndexerConfig(
        num_heads=_need(hf, "index_n_heads"),
        head_dim=head_dim,
        top_k=_need(hf, "index_topk"),
        # V3.2 rotates half-split although its attention rotates interleaved; GLM interleaves both.
        rope_interleaved=hf.model_type == "glm_moe_dsa" if interleaved is None else interleaved,
    )


def _mtp(hf: HfConfig) -> MTPConfig | None:
    if not hf.num_nextn_predict_layers or hf.model_type == "deepseek_v2":
        return None
    layer = LayerSpec(
        attention="dsa_full" if hf.model_type in _DSA_TYPES else "mla",
        feed_forward="moe" if hf.n_routed_experts else "dense",
    )
    return MTPConfig(
        num_modules=hf.num_nextn_predict_layers, layer=layer, share_selection=hf.index_share_for_mtp_iteration
    )


def _moe(hf: HfConfig) -> MoEConfig:
    v2 = hf.model_type == "deepseek_v2"
    method = hf.topk_method or ("greedy" if v2 else "noaux_tc")
    width = _need(hf, "moe_intermediate_size")
    grouped = method != "greedy"
    return MoEConfig(
        router=RouterConfig(
            num_experts=_need(hf, "n_routed_experts"),
            top_k=_need(hf, "num_experts_per_tok"),
            scoring=hf.scoring_func or ("softmax" if v2 else "sigmoid"),
            method=method,
            num_groups=hf.n_group if grouped else 1,
            top_groups=hf.topk_group if grouped else 1,
            normalise=not v2 and hf.norm_topk_prob,  # V2's own code ignores norm_topk_prob
            scale=hf.routed_scaling_factor,
        ),
        intermediate_size=width,
        shared_intermediate_size=width * hf.n_shared_experts,
    )


def _rope(hf: HfConfig) -> RopeConfig:
    rope = hf.rope_parameters or hf.rope_scaling or HfRope()
    theta = rope.rope_theta or hf.rope_theta
    if rope.kind == "default":
        return RopeConfig(theta=theta, interleaved=hf.rope_interleave)
    if rope.factor is None:
        raise ConfigError("rope_scaling.factor: is missing")
    return RopeConfig(
        theta=theta,
        interleaved=hf.rope_interleave,
        original_max_position_embeddings=rope.original_max_position_embeddings or hf.max_position_embeddings,
        factor=rope.factor,
        **rope.model_dump(
            include={"kind", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"}
        ),
    )
