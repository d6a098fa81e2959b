"""Rotary embedding against multiplication of complex numbers, and YaRN's frequencies against hand-computed ones."""

import cmath

import pytest
import torch

from configs.model import RopeConfig
from layers.rotary import RotaryEmbedding, inverse_frequencies, rotate
from tests.layer_context import CPU

DIM = 16
YARN = RopeConfig(kind="yarn", theta=10000, factor=40, original_max_position_embeddings=4096, mscale=1.0)
either_pairing = pytest.mark.parametrize("interleaved", [True, False])


def embedding(*, interleaved: bool = True, dim: int = DIM) -> RotaryEmbedding:
    return RotaryEmbedding(RopeConfig(theta=10000, interleaved=interleaved), dim, 2048, CPU)


def random_rows(*shape: int, seed: int) -> torch.Tensor:
    print(f"seed {seed}")
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive(row: list[float], position: int, *, interleaved: bool) -> list[float]:
    """Each pair of channels as a complex number, turned by position * 10000^(-2i / dim)."""
    half, out = len(row) // 2, list(row)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turned = complex(row[a], row[b]) * cmath.exp(1j * position * 10000 ** (-2 * i / len(row)))
        out[a], out[b] = turned.real, turned.imag
    return out


@either_pairing
def test_rotation_is_complex_multiplication(interleaved: bool) -> None:
    positions = [0, 1, 2, 63, 64, 1000, 2047]
    x = random_rows(len(positions), 3, DIM, seed=1)
    got = rotate(x, embedding(interleaved=interleaved)(torch.tensor(positions)))
    want = [
        [naive(head, position, interleaved=interleaved) for head in row]
        for row, position in zip(x.tolist(), positions, strict=True)
    ]
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=5e-4)  # float32 angles of up to 2047
    torch.testing.assert_close(got[:4], torch.tensor(want)[:4], rtol=0, atol=2e-5)
    assert torch.equal(got[0], x[0])


@either_pairing
def test_scores_depend_on_the_distance_alone(interleaved: bool) -> None:
    rope = embedding(interleaved=interleaved)
    q, k = random_rows(2, 1, 1, DIM, seed=2)
    for distance in (0, 1, 17, 300):
        starts = torch.tensor([0, 5, 64, 511])
        turned_q = rotate(q.expand(4, 1, DIM).contiguous(), rope(starts + distance))
        turned_k = rotate(k.expand(4, 1, DIM).contiguous(), rope(starts))
        scores = (turned_q * turned_k).sum(-1).flatten()
        torch.testing.assert_close(scores, scores[:1].expand(4), rtol=0, atol=2e-4)


@either_pairing
def test_both_pairings_are_one_up_to_the_channels_order(interleaved: bool) -> None:
    x = random_rows(5, 2, DIM, seed=3)
    order = torch.arange(DIM).view(2, -1).T.flatten() if interleaved else torch.arange(DIM).view(-1, 2).T.flatten()
    positions = torch.tensor([0, 3, 9, 100, 700])
    one = rotate(x, embedding(interleaved=not interleaved)(positions))[..., order]
    other = rotate(x[..., order].contiguous(), embedding(interleaved=interleaved)(positions))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@either_pairing
def test_bfloat16_is_rotated_in_float32_and_rounded_once(interleaved: bool) -> None:
    x = random_rows(4, 2, DIM, seed=4).bfloat16()
    rotation = embedding(interleaved=interleaved)(torch.tensor([1, 50, 400, 2000]))
    got = rotate(x, rotation)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(x.float(), rotation).bfloat16())


def test_frequencies_without_yarn() -> None:
    got = inverse_frequencies(RopeConfig(theta=10000), 8)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_yarn_keeps_fast_pairs_slows_slow_ones_and_blends_between() -> None:
    """DeepSeek-V3: 64 ln(4096 / (2 pi 32)) / (2 ln 10000) = 10.47 and with 1 for 32 22.51, so pairs 10 to 23 blend."""
    ratio = inverse_frequencies(YARN, 64) / inverse_frequencies(RopeConfig(theta=10000), 64)
    torch.testing.assert_close(ratio[:11], torch.ones(11))
    torch.testing.assert_close(ratio[23:], torch.full((9,), 1 / 40))
    want = [1 - (pair - 10) / 13 * (1 - 1 / 40) for pair in range(11, 23)]
    torch.testing.assert_close(ratio[11:23], torch.tensor(want))


def test_yarn_without_truncation_blends_from_fractional_pairs() -> None:
    ratio = inverse_frequencies(YARN.model_copy(update={"truncate": False}), 64) / inverse_frequencies(
        RopeConfig(theta=10000), 64
    )
    want = [1 - (pair - 10.4722) / (22.5135 - 10.4722) * (1 - 1 / 40) for pair in range(11, 23)]
    torch.testing.assert_close(ratio[11:23], torch.tensor(want), rtol=0, atol=1e-4)


def test_yarn_scales_cos_and_sin() -> None:
    """0.1 ln 40 + 1 without mscale_all_dim; 1 where both mscales are equal."""
    for mscale_all_dim, length in ((0.0, 1.3688879), (1.0, 1.0)):
        config = YARN.model_copy(update={"mscale_all_dim": mscale_all_dim})
        x = random_rows(3, 1, 64, seed=5)
        turned = rotate(x, RotaryEmbedding(config, 64, 4096, CPU)(torch.tensor([0, 9, 4095])))
        torch.testing.assert_close(turned.norm(dim=-1), length * x.norm(dim=-1), rtol=1e-5, atol=0)
