"""The paged cache of index keys, beside the latent cache and under the same page numbers."""

from dataclasses import dataclass
from typing import Protocol

import torch

from configs.engine import PAGE_SIZE

E4M3_MAX = 448.0
_SMALLEST_PEAK = 1e-4  # keeps the scale of an all-zero key finite


class IndexKeyFormat(Protocol):
    """How index keys lie in a page. `cache` is [pages, *page_shape] of `dtype`, contiguous."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def page_shape(self) -> tuple[int, ...]: ...

    def store(self, cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Writes keys [rows, d] at cache slots [rows] int64."""

    def load(self, cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Keys of pages [n] -> [n, page_size, d] in the compute type."""


@dataclass(frozen=True)
class PlainIndexKeys:
    """Keys in the compute type."""

    head_dim: int
    dtype: torch.dtype

    @property
    def page_shape(self) -> tuple[int, ...]:
        return (PAGE_SIZE, self.head_dim)

    def store(self, cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
        cache.view(-1, self.head_dim).index_copy_(0, slots, keys.to(self.dtype))

    def load(self, cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        return cache.index_select(0, pages)


@dataclass(frozen=True)
class Fp8IndexKeys:
    """Keys in e4m3 with one float32 scale, a power of two, for each. A page is all its keys, then all their scales:
    page_size * d bytes, then page_size * 4 (the layout of DeepSeek-V3.2's kernels)."""

    head_dim: int
    compute_dtype: torch.dtype
    dtype: torch.dtype = torch.uint8

    @property
    def page_shape(self) -> tuple[int, ...]:
        return (PAGE_SIZE * (self.head_dim + 4),)

    def store(self, cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> None:
        quantised, scales = quantise_e4m3(keys)
        page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE
        values, factors = self._parts(cache)
        values[page, offset] = quantised.view(torch.uint8)
        factors[page, offset] = scales

    def load(self, cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        values, factors = self._parts(cache.index_select(0, pages))
        return (values.contiguous().view(torch.float8_e4m3fn).float() * factors[..., None]).to(self.compute_dtype)

    def _parts(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the keys' bytes [pages, page_size, d] and of their scales [pages, page_size] float32."""
        values, factors = cache.split([PAGE_SIZE * self.head_dim, PAGE_SIZE * 4], dim=-1)
        return values.unflatten(-1, (PAGE_SIZE, self.head_dim)), factors.view(torch.float32)


def quantise_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, d] -> e4m3 [rows, d] and scales [rows] float32: the least power of two that brings a row into range
    ("ue8m0"), so that x is about e4m3 * scale."""
    peak = x.float().abs().amax(-1).clamp(min=_SMALLEST_PEAK)
    scale = torch.exp2(torch.ceil(torch.log2(peak / E4M3_MAX)))
    return (x.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


def make_index_key_format(name: str, head_dim: int, dtype: torch.dtype) -> IndexKeyFormat:
    """The format of `index_cache_dtype` (auto | fp8) for keys computed in `dtype`."""
    return Fp8IndexKeys(head_dim, dtype) if name == "fp8" else PlainIndexKeys(head_dim, dtype)
