"""Chooses the attention backend."""

import logging

import torch

from configs.base import ConfigError
from configs.model import MLAConfig
from layers.attention.backend import AttentionBackend, TorchAttention
from layers.attention.trtllm_gen import make_trtllm_gen
from layers.kernels.available import require_triton, triton_runs

logger = logging.getLogger(__name__)


def make_attention_backend(
    name: str, mla: MLAConfig, heads: int, max_rows: int, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """The backend of that name for a rank's `heads` query heads and steps of up to `max_rows` rows; `auto` is the
    fastest that runs on the device: FlashInfer's on Hopper, else Triton's, else torch. Raises ConfigError for an
    unknown one, and for one that cannot run there."""
    if name == "torch" or (name == "auto" and not triton_runs(device)):
        return TorchAttention()
    if name == "flashinfer_fa3":
        return _make_fa3(mla, heads, dtype, device)
    if name == "trtllm_gen":
        return make_trtllm_gen(mla, heads, max_rows, dtype, device)
    if name == "auto":
        try:
            return _make_fa3(mla, heads, dtype, device)
        except ConfigError as error:
            logger.info("attention: %s", error)
    if name in ("auto", "triton"):
        require_triton("attention_backend", device)
        from layers.attention.split_kv import SplitKVAttention

        return SplitKVAttention(device, heads, mla.kv_lora_rank, max_rows, dtype)
    known = "'auto', 'torch', 'triton', 'flashinfer_fa3' or 'trtllm_gen'"
    raise ConfigError(f"attention_backend {name!r} is not known: use {known}")


def _make_fa3(mla: MLAConfig, heads: int, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    require_triton("attention_backend", device)
    from layers.attention.flashinfer_fa3 import make_flashinfer_fa3

    return make_flashinfer_fa3(mla, heads, dtype, device)
