"""Rotary position embedding (Su et al., arXiv 2104.09864) with YaRN's frequency interpolation (arXiv 2309.00071)."""

import math
from typing import NamedTuple

import torch

from configs.model import RopeConfig


class Rotation(NamedTuple):
    """cos + i sin of the rows of a batch, [rows, 1, dim / 2] complex64; shared by all layers of a step."""

    turn: torch.Tensor
    interleaved: bool

    def rows(self, start: int, stop: int) -> "Rotation":
        """Of rows [start, stop)."""
        return Rotation(self.turn[start:stop], self.interleaved)


class RotaryEmbedding:
    """Looks up the rotation of each row's position in a table made once for `max_positions`."""

    def __init__(self, config: RopeConfig, dim: int, max_positions: int, device: torch.device) -> None:
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse_frequencies(config, dim)
        scale = config.cos_sin_scale
        self._turns = torch.complex(angles.cos() * scale, angles.sin() * scale).to(device)  # [positions, dim / 2]
        self._interleaved = config.interleaved

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions [rows] int64 -> Rotation."""
        return Rotation(self._turns[positions][:, None], self._interleaved)


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


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates [rows, heads, dim] by each row's position, in float32; returns x's dtype.

    Interleaved pairs are channels (2i, 2i + 1), otherwise (i, i + dim / 2); channels stay where they were.
    """
    turn, interleaved = rotation
    pairs = x.float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    if not interleaved:
        pairs = pairs.transpose(-1, -2).contiguous()
    turned = torch.view_as_real(torch.view_as_complex(pairs) * turn)
    if not interleaved:
        turned = turned.transpose(-1, -2)
    return turned.flatten(-2).to(x.dtype)
