"""Counter-based random numbers: a draw depends on (seed, position, stream) alone, never on neighbours or order."""

import torch

_M1 = 0xBF58476D1CE4E5B9 - (1 << 64)  # splitmix64's constants (Steele et al. 2014) as signed 64-bit numbers
_M2 = 0x94D049BB133111EB - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_STREAM = 0xD1B54A32D192ED03 - (1 << 64)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """One number in [0, 1) for each row: seeds, positions [rows] int64 -> [rows] float64 with 32 random bits.

    32 bits leave u * total < total in float64, which inverse-CDF sampling relies on.
    """
    state = _mix(_mix(seeds) + positions * _GOLDEN + (stream * _STREAM) % (1 << 62))
    return _shift(state, 32).double() * 2.0**-32


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser."""
    x = (x ^ _shift(x, 30)) * _M1
    x = (x ^ _shift(x, 27)) * _M2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
