"""Chooses the attention backend."""

import torch

from configs.base import ConfigError
from configs.model import MLAConfig
from layers.attention.backend import AttentionBackend, TorchAttention
from layers.kernels.available import require_triton, triton_runs


def make_attention_backend(
    name: str, mla: MLAConfig, heads: int, max_rows: int, device: torch.device
) -> AttentionBackend:
    """The backend of that name for a rank's `heads` query heads and steps of up to `max_rows` rows; `auto` is the best
    that runs on the device. Raises ConfigError for an unknown one, and for one that cannot run there."""
    if name == "torch" or (name == "auto" and not triton_runs(device)):
        return TorchAttention()
    if name in ("auto", "triton"):
        require_triton("attention_backend", device)
        from layers.attention.split_kv import SplitKVAttention

        return SplitKVAttention(device, heads, mla.kv_lora_rank, max_rows)
    raise ConfigError(f"attention_backend {name!r} is not known: use 'auto', 'torch' or 'triton'")
