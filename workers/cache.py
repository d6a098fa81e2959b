"""The paged cache: for every layer, latents and (with an indexer) index keys, the same pages in each.

One page more than the driver gives out is kept: the scratch page, which takes what is written past a slot's pages.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from configs.base import ConfigError
from configs.engine import PAGE_SIZE, EngineConfig
from configs.model import LayerSpec, ModelConfig
from layers.attention.index_cache import IndexKeyFormat
from layers.attention.mla import LayerCache

_CPU_DEFAULT_BYTES = 512 << 20


@dataclass(frozen=True)
class CacheLayout:
    """What a page is made of. `layers`: the model's, then those of the MTP modules in use."""

    layers: tuple[LayerSpec, ...]
    latent_dim: int
    dtype: torch.dtype
    index_keys: IndexKeyFormat | None

    @classmethod
    def of(
        cls, model: ModelConfig, num_mtp: int, dtype: torch.dtype, index_keys: IndexKeyFormat | None
    ) -> "CacheLayout":
        mtp = (model.mtp.layer,) * num_mtp if model.mtp is not None else ()
        return cls(model.layers + mtp, model.attention.cache_dim, dtype, index_keys)

    @property
    def page_bytes(self) -> int:
        """Bytes that one page takes over all layers of a rank (nothing of it is split over ranks)."""
        latents = len(self.layers) * PAGE_SIZE * self.latent_dim * self.dtype.itemsize
        if self.index_keys is None:
            return latents
        index = math.prod(self.index_keys.page_shape) * self.index_keys.dtype.itemsize
        return latents + self._num_indexers * index

    @property
    def _num_indexers(self) -> int:
        return sum(spec.attention == "dsa_full" for spec in self.layers)

    def allocate(self, num_pages: int, device: torch.device) -> list[LayerCache]:
        """num_pages pages and the scratch page, number num_pages, zeroed: what lies past a sequence's end in its last
        page meets a weight of 0, which NaN would survive."""
        pages = num_pages + 1
        latents = _zeros((len(self.layers), pages, PAGE_SIZE, self.latent_dim), self.dtype, device)
        if self.index_keys is None:
            return [LayerCache(latent) for latent in latents]
        shape = (self._num_indexers, pages, *self.index_keys.page_shape)
        index = iter(_zeros(shape, self.index_keys.dtype, device))
        return [
            LayerCache(latent, next(index) if spec.attention == "dsa_full" else None)
            for latent, spec in zip(latents, self.layers, strict=True)
        ]


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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are the kernel's own: pages cost time and memory only once they are written.
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
