"""FlashInfer's trtllm-gen MLA kernels for Blackwell, dense and sparse, with persistent split-KV counters.

No Blackwell card was at hand: the calls are tested against FlashInfer's signature, the kernels have not been run here.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from configs.base import ConfigError
from configs.model import MLAConfig
from layers.attention.backend import PagedRows, PrefillRows, TorchAttention
from layers.attention.counters import CounterBuffers
from layers.attention.flashinfer_version import require_flashinfer
from layers.kernels.available import require_triton

if TYPE_CHECKING:
    from layers.attention.prefill import TritonPrefill

NAME = "trtllm_gen"
MINIMUM_VERSION = "0.6.18"
_WORKSPACE_BYTES = 128 << 20
_LATENT, _ROPE = 512, 64


class TrtllmGenAttention:
    """Lengths are read on the device, so that graphs can hold it. Workspace and counters belong to one stream."""

    name = NAME

    def __init__(
        self,
        decode: Callable[..., torch.Tensor],
        mla: MLAConfig,
        heads: int,
        max_rows: int,
        sm_count: int,
        device: torch.device,
        prefill: "TritonPrefill | TorchAttention",
    ) -> None:
        """`decode`: flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla; `prefill`: who attends for prefill rows."""
        self._decode = decode
        self._mla = mla
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.counters = CounterBuffers(heads, sm_count, device)
        self.counters.reserve(max_rows)
        self._prefill = prefill

    def decode(
        self, q: torch.Tensor, cache: torch.Tensor, rows: PagedRows, *, scale: float, value_dim: int
    ) -> torch.Tensor:
        n = rows.per_sequence
        # The kernel's causal mask: row i of a sequence's n sees its length less n - 1 - i.
        lengths = rows.lengths[n - 1 :: n].clamp(min=1)
        return self._run(q, cache, rows, n, rows.block_table, lengths, rows.max_length, scale, 0)

    def sparse(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        rows: PagedRows,
        *,
        scale: float,
        value_dim: int,
    ) -> torch.Tensor:
        k = slots.shape[1]
        return self._run(q, cache, rows, 1, slots[:, None], rows.lengths.clamp(max=k), k, scale, k)

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PrefillRows, *, scale: float
    ) -> torch.Tensor:
        return self._prefill.prefill(q, k, v, rows, scale=scale)

    def _run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        rows: PagedRows,
        per_sequence: int,
        table: torch.Tensor,
        lengths: torch.Tensor,
        longest: int,
        scale: float,
        top_k: int,
    ) -> torch.Tensor:
        mla = self._mla
        out = self._decode(
            query=q.unflatten(0, (-1, per_sequence)),
            kv_cache=cache,
            workspace_buffer=self._workspace,
            qk_nope_head_dim=mla.qk_nope_head_dim,
            kv_lora_rank=mla.kv_lora_rank,
            qk_rope_head_dim=mla.qk_rope_head_dim,
            block_tables=table.contiguous(),
            seq_lens=lengths.contiguous(),
            max_seq_len=longest,
            sparse_mla_top_k=top_k,
            bmm1_scale=scale,
            bmm2_scale=1.0,
            backend="trtllm-gen",
            multi_ctas_kv_counter_buffer=self.counters.take(q.shape[0]),
        ).flatten(0, 1)
        return out.masked_fill_((rows.lengths <= 0)[:, None, None], 0)  # what the kernel makes of them is not said


def make_trtllm_gen(
    mla: MLAConfig, heads: int, max_rows: int, dtype: torch.dtype, device: torch.device
) -> TrtllmGenAttention:
    """Raises ConfigError that says what is wrong: no Blackwell GPU, FlashInfer not installed or too old, a model or
    compute type that the kernels do not take."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 10:
        raise ConfigError(f"attention_backend {NAME!r} needs a Blackwell GPU (SM100): use 'auto'")
    if dtype != torch.bfloat16 or (mla.kv_lora_rank, mla.qk_rope_head_dim) != (_LATENT, _ROPE) or 64 < heads < 128:
        raise ConfigError(
            f"attention_backend {NAME!r} takes bfloat16, kv_lora_rank {_LATENT}, qk_rope_head_dim {_ROPE} and up to 64 "
            f"or 128 heads a rank, not {dtype}, {mla.kv_lora_rank}, {mla.qk_rope_head_dim}, {heads}: use 'auto'"
        )
    require_triton("attention_backend", device)
    require_flashinfer(f"attention_backend {NAME!r}", MINIMUM_VERSION, "'triton'")
    decode = import_module("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    from layers.attention.prefill import make_prefill

    return TrtllmGenAttention(decode, mla, heads, max_rows, sm_count, device, make_prefill(dtype))
