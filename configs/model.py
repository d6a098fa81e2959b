"""A Hugging Face `config.json` of the DeepSeek family -> `ModelConfig`, the one description that layers are built from.

Both spellings of rotary settings are read: `rope_theta` + `rope_scaling` (DeepSeek's hub files) and `rope_parameters`
(transformers 5, GLM). A model is a list of layer specs: attention kind x feed-forward kind.
"""

import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from configs.base import ConfigError, Settings, explain

_DSA_TYPES = ("deepseek_v32", "glm_moe_dsa")
SUPPORTED_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", *_DSA_TYPES)


class RopeConfig(Settings):
    """Rotary embedding of the decoupled (rope) part. YaRN: Peng et al. 2023, arXiv 2309.00071."""

    kind: Literal["default", "yarn"] = "default"
    theta: float = Field(gt=0)
    interleaved: bool = True
    factor: float = Field(default=1.0, ge=1.0)
    original_max_position_embeddings: int = Field(default=0, ge=0)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    @model_validator(mode="after")
    def _yarn_is_complete(self) -> "RopeConfig":
        if self.kind == "yarn" and not self.original_max_position_embeddings:
            raise ValueError("yarn needs original_max_position_embeddings")
        return self

    @property
    def cos_sin_scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.kind == "default":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(self.factor, self.mscale_all_dim)
        return _yarn_mscale(self.factor, 1.0)

    @property
    def softmax_scale(self) -> float:
        """What the softmax scale is multiplied by: m^2 with m of `mscale_all_dim`."""
        if self.kind == "default" or not self.mscale_all_dim:
            return 1.0
        return _yarn_mscale(self.factor, self.mscale_all_dim) ** 2


class MLAConfig(Settings):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    num_heads: int = Field(ge=1)
    q_lora_rank: int | None = Field(default=None, ge=1)
    kv_lora_rank: int = Field(ge=1)
    qk_nope_head_dim: int = Field(ge=1)
    qk_rope_head_dim: int = Field(ge=2)
    v_head_dim: int = Field(ge=1)
    rope: RopeConfig

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_dim(self) -> int:
        """Numbers a token leaves in the cache: latent and rope part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5 * self.rope.softmax_scale


class RouterConfig(Settings):
    """How a token picks its experts."""

    num_experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    scoring: Literal["softmax", "sigmoid"]
    method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    num_groups: int = Field(default=1, ge=1)
    top_groups: int = Field(default=1, ge=1)
    normalise: bool = False
    scale: float = 1.0

    @model_validator(mode="after")
    def _groups_fit(self) -> "RouterConfig":
        if self.num_experts % self.num_groups:
            raise ValueError(f"n_group ({self.num_groups}) must divide n_routed_experts ({self.num_experts})")
        if self.top_groups > self.num_groups:
            raise ValueError(f"topk_group ({self.top_groups}) must not exceed n_group ({self.num_groups})")
        eligible = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > eligible:
            raise ValueError(f"num_experts_per_tok ({self.top_k}) exceeds the {eligible} experts that can be chosen")
        return self


class MoEConfig(Settings):
    """Routed experts and the shared one beside them."""

    router: RouterConfig
    intermediate_size: int = Field(ge=1)
    shared_intermediate_size: int = Field(default=0, ge=0)


class LayerSpec(Settings):
    """What one decoder layer is made of."""

    attention: Literal["mla"] = "mla"
    feed_forward: Literal["dense", "moe"]


class ModelConfig(Settings):
    """Architecture of a checkpoint, complete and checked."""

    model_type: str
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    layers: tuple[LayerSpec, ...] = Field(min_length=1)
    attention: MLAConfig
    moe: MoEConfig | None
    rms_norm_eps: float = Field(gt=0)
    tie_word_embeddings: bool = False
    max_position_embeddings: int = Field(ge=1)
    dense_context: int | None = Field(default=None, description="context within which sparse attention equals dense")
    num_mtp_modules: int = Field(default=0, ge=0)
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def max_context(self) -> int:
        """Longest context that this version serves exactly."""
        return min(self.max_position_embeddings, self.dense_context or self.max_position_embeddings)

    def check_parallel(self, tp_size: int, ep_size: int) -> None:
        """Raises ConfigError unless every sharded dimension divides."""
        wrong = []
        splits = [("num_attention_heads", self.attention.num_heads), ("vocab_size", self.vocab_size)]
        if any(layer.feed_forward == "dense" for layer in self.layers):
            splits.append(("intermediate_size", self.intermediate_size))
        if self.moe is not None:
            expert_tp = tp_size // ep_size
            if self.moe.shared_intermediate_size:
                splits.append(("moe_intermediate_size * n_shared_experts", self.moe.shared_intermediate_size))
            if self.moe.router.num_experts % ep_size:
                wrong.append(f"n_routed_experts ({self.moe.router.num_experts}) is not divisible by ep_size {ep_size}")
            if self.moe.intermediate_size % expert_tp:
                wrong.append(
                    f"moe_intermediate_size ({self.moe.intermediate_size}) is not divisible by tp_size / ep_size "
                    f"({expert_tp}); a larger ep_size keeps experts whole"
                )
        elif ep_size > 1:
            wrong.append(f"ep_size is {ep_size} but the model has no experts: use 1")
        wrong += [f"{name} ({size}) is not divisible by tp_size {tp_size}" for name, size in splits if size % tp_size]
        if wrong:
            raise ConfigError("; ".join(wrong) + ": choose other tp_size / ep_size")

    @classmethod
    def load(cls, folder: Path) -> "ModelConfig":
        """Reads `config.json` (and eos ids from `generation_config.json`) of a checkpoint folder.

        Raises ConfigError that names the file and the field when something is missing or unknown.
        """
        path = folder / "config.json"
        raw = read_json(path)
        generation = folder / "generation_config.json"
        eos = _as_ids(raw.get("eos_token_id"))
        if generation.is_file():
            eos = tuple(dict.fromkeys((*_as_ids(read_json(generation).get("eos_token_id")), *eos)))
        try:
            return _from_hf(raw, eos)
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


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _need(raw: dict[str, Any], *names: str) -> Any:
    for name in names:
        if raw.get(name) is not None:
            return raw[name]
    raise ConfigError(f"field {names[0]} is missing")


def _from_hf(raw: dict[str, Any], eos: tuple[int, ...]) -> ModelConfig:
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_TYPES:
        architectures = ", ".join(raw.get("architectures") or ["no architectures"])
        raise ConfigError(
            f"model_type {model_type!r} ({architectures}) is not supported; supported are {', '.join(SUPPORTED_TYPES)}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {raw['hidden_act']!r} is not supported (only 'silu')")
    if raw.get("attention_bias"):
        raise ConfigError("attention_bias true is not supported")
    layers = _layer_specs(raw)
    return ModelConfig(
        model_type=model_type,
        vocab_size=_need(raw, "vocab_size"),
        hidden_size=_need(raw, "hidden_size"),
        intermediate_size=_need(raw, "intermediate_size"),
        layers=layers,
        attention=MLAConfig(
            num_heads=_need(raw, "num_attention_heads"),
            q_lora_rank=raw.get("q_lora_rank"),
            kv_lora_rank=_need(raw, "kv_lora_rank"),
            qk_nope_head_dim=_need(raw, "qk_nope_head_dim"),
            qk_rope_head_dim=_need(raw, "qk_rope_head_dim"),
            v_head_dim=_need(raw, "v_head_dim"),
            rope=_rope(raw),
        ),
        moe=_moe(raw) if any(layer.feed_forward == "moe" for layer in layers) else None,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_position_embeddings=_need(raw, "max_position_embeddings"),
        dense_context=_need(raw, "index_topk") if model_type in _DSA_TYPES else None,
        num_mtp_modules=raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers")) or 0,
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "bfloat16",
        eos_token_ids=eos,
        bos_token_id=raw.get("bos_token_id"),
    )


def _layer_specs(raw: dict[str, Any]) -> tuple[LayerSpec, ...]:
    count = _need(raw, "num_hidden_layers")
    kinds = raw.get("mlp_layer_types")
    if kinds is not None:
        if len(kinds) < count or not set(kinds) <= {"dense", "sparse"}:
            raise ConfigError(f"mlp_layer_types must give 'dense' or 'sparse' for each of {count} layers")
        return tuple(LayerSpec(feed_forward="dense" if kind == "dense" else "moe") for kind in kinds[:count])
    default_dense = 1 if raw["model_type"] == "glm4_moe_lite" else 0
    first_moe = raw.get("first_k_dense_replace", default_dense)
    every = raw.get("moe_layer_freq") or 1
    has_experts = raw.get("n_routed_experts") is not None
    return tuple(
        LayerSpec(feed_forward="moe" if has_experts and i >= first_moe and i % every == 0 else "dense")
        for i in range(count)
    )


def _moe(raw: dict[str, Any]) -> MoEConfig:
    v2 = raw["model_type"] == "deepseek_v2"
    method = raw.get("topk_method") or ("greedy" if v2 else "noaux_tc")
    width = _need(raw, "moe_intermediate_size")
    grouped = method != "greedy"
    return MoEConfig(
        router=RouterConfig(
            num_experts=_need(raw, "n_routed_experts"),
            top_k=_need(raw, "num_experts_per_tok"),
            scoring=raw.get("scoring_func") or ("softmax" if v2 else "sigmoid"),
            method=method,
            num_groups=(raw.get("n_group") or 1) if grouped else 1,
            top_groups=(raw.get("topk_group") or 1) if grouped else 1,
            normalise=False if v2 else raw.get("norm_topk_prob", True),  # V2's own code ignores norm_topk_prob
            scale=raw.get("routed_scaling_factor", 1.0),
        ),
        intermediate_size=width,
        shared_intermediate_size=width * (raw.get("n_shared_experts") or 0),
    )


def _rope(raw: dict[str, Any]) -> RopeConfig:
    values = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ("default", "yarn"):
        raise ConfigError(f"rope type {kind!r} is not supported (only 'default' and 'yarn')")
    theta = values.get("rope_theta") or raw.get("rope_theta") or 10000.0
    interleaved = raw.get("rope_interleave", True)
    if kind == "default":
        return RopeConfig(theta=theta, interleaved=interleaved)
    original = values.get("original_max_position_embeddings") or _need(raw, "max_position_embeddings")
    optional = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
    return RopeConfig(
        kind="yarn",
        theta=theta,
        interleaved=interleaved,
        factor=_need(values, "factor"),
        original_max_position_embeddings=original,
        **{name: values[name] for name in optional if values.get(name) is not None},
    )
