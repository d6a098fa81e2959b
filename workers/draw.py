"""Counter-based random numbers: a draw depends on (seed, position, stream) alone, never on neighbours or order."""

import torch

_M1 = 0xBF58476D1CE4E5B9 - (1 << 64)  # splitmix64's constants (Steele et al. 2014) as signed 64-bit numbers
_M2 = 0x94D049BB133111EB - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_STREAM = 0xD1B54A32D192ED03 - (1 << 64)
_BITS = 23  # of a uniform number, which with the half step make the 24 of float32


def uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: int | torch.Tensor = 0) -> torch.Tensor:
    """One number in (0, 1) for each row: seeds, positions [...] int64 -> [...] float32 with 23 random bits."""
    return _unit(_mix(_key(seeds, positions, stream)))


def draw(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int | torch.Tensor = 0
) -> torch.Tensor:
    """Samples each row of probs [..., vocab] (which need not sum to 1) -> ids [...] int64; seeds, positions and, if a
    tensor, stream are [...] int64.

    An exponential race: argmax of p / E with E exponential, one for each (seed, position, stream, id). Two rows that
    share the numbers of a race but not their probabilities p and q pick the same id with probability at least
    (1 - TV) / (1 + TV), TV = half the sum of |p - q| (Gumbel coupling: Daliri et al. 2024, arXiv 2408.07978).
    """
    ids = torch.arange(probs.shape[-1], device=probs.device)
    noise = _mix(_key(seeds, positions, stream)[..., None] + ids * _GOLDEN)
    return (probs / -_unit(noise).log()).argmax(-1)


def _key(seeds: torch.Tensor, positions: torch.Tensor, stream: int | torch.Tensor) -> torch.Tensor:
    return _mix(_mix(seeds) + positions * _GOLDEN + (stream * _STREAM) % (1 << 62))


def _unit(bits: torch.Tensor) -> torch.Tensor:
    """The top bits of int64 numbers, centred in their steps so that neither 0 nor 1 occurs."""
    return (_shift(bits, 64 - _BITS).float() + 0.5) * 2.0**-_BITS


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser."""
    x = (x ^ _shift(x, 30)) * _M1
    x = (x ^ _shift(x, 27)) * _M2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
