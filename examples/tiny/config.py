"""Sizes of the model, and how its attention runs."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TinyConfig:
    """Sizes; field names are those of the Hugging Face config."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 64
    v_head_dim: int = 32
    intermediate_size: int = 768
    moe_intermediate_size: int = 64
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 2.5
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: int = 10000
    rope_factor: int = 4
    original_max_position_embeddings: int = 1024

    @property
    def softmax_scale(self) -> float:
        """Attention scale, with YaRN's correction (mscale_all_dim = 1) for the longer context."""
        mscale = 0.1 * math.log(self.rope_factor) + 1.0
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * mscale * mscale


PRESETS = {
    # The sizes of the latent (512 + 64) and of the indexer (32 x 128) are those real kernels are built for.
    "tiny": TinyConfig(),
    "mini": TinyConfig(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=4, q_lora_rank=64, kv_lora_rank=64,
        qk_rope_head_dim=32, intermediate_size=256, moe_intermediate_size=32, n_routed_experts=8,
        num_experts_per_tok=2, index_n_heads=8, index_head_dim=64, index_topk=32, original_max_position_embeddings=128,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """How attention runs. sparse: only the indexer's top-k entries are seen. teach: compute the indexer's loss."""

    sparse: bool = True
    teach: bool = False
