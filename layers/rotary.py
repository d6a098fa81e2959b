"""Rotary position embedding (Su et al., arXiv 2104.09864) with YaRN's frequency interpolation (arXiv 2309.00071)."""

import math
from typing import NamedTuple

import torch

from configs.model import RopeConfig


class Rotation(NamedTuple):
    """cos and sin of the rows of a batch, each [rows, 1, dim / 2] float32; shared by all layers of a step."""

    cos: torch.Tensor
    sin: torch.Tensor


class RotaryEmbedding:
    """Looks up the rotation of each row's position in a table made once for `max_positions`."""

    def __init__(self, config: RopeConfig, dim: int, max_positions: int, device: torch.device) -> None:
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse_frequencies(config, dim)
        self._cos = (angles.cos() * config.cos_sin_scale).to(device)  # [positions, dim / 2]
        self._sin = (angles.sin() * config.cos_sin_scale).to(device)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions [rows] int64 -> Rotation."""
        return Rotation(self._cos[positions][:, None], self._sin[positions][:, None])


def inverse_frequencies(config: RopeConfig, dim: int) -> torch.Tensor:
    """Rotation speed of each pair of channels, [dim / 2] float32, in radians a position."""
    freq = config.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if config.kind == "default":
        return freq

    def correction_dim(rotations: float) -> float:
        """The pair that turns `rotations` times over the original context."""
        turns = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = correction_dim(config.beta_fast), correction_dim(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return freq * (1 - ramp) + freq / config.factor * ramp


def rotate(x: torch.Tensor, rotation: Rotation, *, interleaved: bool) -> torch.Tensor:
    """Rotates [rows, heads, dim] by each row's position, in float32; returns x's dtype.

    Interleaved pairs are channels (2i, 2i + 1), otherwise (i, i + dim / 2); channels stay where they were.
    """
    cos, sin = rotation
    wide = x.float()
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = wide.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return rotated.to(x.dtype)
