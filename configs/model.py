"""`ModelConfig`: the one description of a model that layers are built from (`configs.hf` makes it from a checkpoint).

A model is a list of layer specs: attention kind x feed-forward kind.
"""

import math
from typing import Literal

from pydantic import Field, model_validator

from configs.base import ConfigError, Settings


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


class IndexerConfig(Settings):
    """What selects the positions that sparse attention reads (DSA: DeepSeek-V3.2-Exp, section 2.1)."""

    num_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    top_k: int = Field(ge=1)
    rope_interleaved: bool = False


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
    """What one decoder layer is made of. A `dsa_full` layer selects positions with its own indexer, a `dsa_shared`
    one attends to those that the last full layer before it selected."""

    attention: Literal["mla", "dsa_full", "dsa_shared"] = "mla"
    feed_forward: Literal["dense", "moe"]


class MTPConfig(Settings):
    """Multi-token prediction modules (DeepSeek-V3, arXiv 2412.19437, section 2.2) that a checkpoint brings."""

    num_modules: int = Field(ge=1)
    layer: LayerSpec
    share_selection: bool = Field(default=False, description="draft steps after the first reuse its top-k selection")

    def check_drafts(self, num_draft_tokens: int) -> None:
        """Raises ConfigError when the modules cannot draft that many tokens. One module is used again and again."""
        if 1 < self.num_modules < num_draft_tokens:
            raise ConfigError(
                f"num_draft_tokens ({num_draft_tokens}) exceeds the checkpoint's {self.num_modules} MTP modules, "
                f"each of which drafts one token: use at most {self.num_modules}"
            )


class ModelConfig(Settings):
    """Architecture of a checkpoint, complete and checked."""

    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    layers: tuple[LayerSpec, ...] = Field(min_length=1)
    attention: MLAConfig
    moe: MoEConfig | None
    rms_norm_eps: float = Field(gt=0)
    tie_word_embeddings: bool = False
    max_position_embeddings: int = Field(ge=1)
    indexer: IndexerConfig | None = None
    mtp: MTPConfig | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _selection_has_a_source(self) -> "ModelConfig":
        kinds = [layer.attention for layer in self.layers]
        if any(kind != "mla" for kind in kinds) and self.indexer is None:
            raise ValueError("sparse attention layers need an indexer")
        if kinds[0] == "dsa_shared":
            raise ValueError("layer 0 shares the selection of an earlier layer, and there is none")
        return self

    def check_drafts(self, num_draft_tokens: int) -> None:
        """Raises ConfigError when the checkpoint cannot draft that many tokens a step."""
        if not num_draft_tokens:
            return
        if self.mtp is None:
            raise ConfigError(
                f"num_draft_tokens is {num_draft_tokens}, but config.json names no MTP module "
                "(num_nextn_predict_layers): use 0"
            )
        self.mtp.check_drafts(num_draft_tokens)

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


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
