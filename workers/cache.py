"""The paged latent cache: one tensor a layer, `PAGE_SIZE` positions a page, the same pages in every layer."""

import numpy as np
import torch

from configs.base import ConfigError
from configs.engine import PAGE_SIZE, EngineConfig
from configs.model import ModelConfig

_CPU_DEFAULT_BYTES = 512 << 20


def page_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one page takes over all layers of a rank (the latent is replicated, not split)."""
    return len(model.layers) * PAGE_SIZE * model.attention.cache_dim * dtype.itemsize


def pages_that_fit(config: EngineConfig, available: int | None, bytes_per_page: int, max_model_len: int) -> int:
    """Pages of a rank's cache. `available`: bytes that the memory fraction leaves on a GPU, None on a CPU.

    Raises ConfigError if not even one sequence of max_model_len fits.
    """
    budget = config.kv_cache_bytes
    if budget is None:
        budget = available if available is not None else _CPU_DEFAULT_BYTES
    pages = budget // bytes_per_page
    needed = -(-max_model_len // PAGE_SIZE)
    if pages < needed:
        raise ConfigError(
            f"the KV cache of {budget / 2**20:.1f} MiB holds {max(pages, 0) * PAGE_SIZE} tokens, fewer than "
            f"max_model_len {max_model_len}: raise kv_cache_bytes to {needed * bytes_per_page} "
            "(or kv_cache_memory_fraction), or lower max_model_len"
        )
    return pages


def allocate(model: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """One zeroed [num_pages, PAGE_SIZE, cache_dim] tensor a layer. Zeroed, since what lies past a sequence's end in
    its last page meets a weight of 0, which NaN would survive."""
    shape = (len(model.layers), num_pages, PAGE_SIZE, model.attention.cache_dim)
    if device.type == "cpu":
        # numpy's zeros are the kernel's own: pages cost time and memory only once they are written.
        raw = np.zeros(num_pages * page_bytes(model, dtype), dtype=np.uint8)
        return list(torch.from_numpy(raw).view(dtype).view(shape))
    return list(torch.zeros(shape, dtype=dtype, device=device))
