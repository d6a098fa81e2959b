"""Random numbers by (seed, position, stream)."""

import math
import random

import pytest
import torch

from tests import sampling_reference
from workers.draw import draw, uniform

COUNT = 1 << 14
EXTREMES = [0, 1, -1, 2**31, 2**62, 2**63 - 1, -(2**63)]


def sequence(seed: int, stream: int = 0, count: int = COUNT) -> torch.Tensor:
    """The numbers of one seed at positions 0, 1, ..."""
    return uniform(torch.full((count,), seed), torch.arange(count), stream)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack((a, b)))[0, 1].item()


def distance_to_uniform(numbers: torch.Tensor) -> float:
    """Kolmogorov-Smirnov's statistic times sqrt(n)."""
    ordered, n = numbers.sort().values, len(numbers)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return max((ordered - steps[:-1]).max().item(), (steps[1:] - ordered).max().item()) * math.sqrt(n)


@pytest.mark.parametrize("stream", [0, 1, 2, 77])
def test_equals_a_reference_in_unbounded_integers(stream: int) -> None:
    print("seed 5")
    rng = random.Random(5)
    seeds = EXTREMES + [rng.randrange(-(2**63), 2**63) for _ in range(200)]
    positions = [rng.randrange(2**20) for _ in seeds]
    got = uniform(torch.tensor(seeds), torch.tensor(positions), stream)
    assert got.dtype == torch.float32
    want = [sampling_reference.uniform(s, p, stream) for s, p in zip(seeds, positions, strict=True)]
    assert got.tolist() == want


def test_numbers_are_inside_the_unit_interval_and_have_23_bits() -> None:
    numbers = torch.cat([sequence(seed) for seed in EXTREMES])
    assert numbers.min() > 0 and numbers.max() < 1
    bits = numbers.double() * 2.0**23 - 0.5
    assert torch.equal(bits, bits.floor())
    for bit in range(23):
        share = ((bits.long() >> bit) & 1).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(len(numbers)), f"bit {bit}"


@pytest.mark.parametrize("seed", [0, 1, 2, 12345, -1, 2**62])
def test_positions_of_a_seed_are_uniform(seed: int) -> None:
    assert distance_to_uniform(sequence(seed)) < 1.95  # exceeded once in 1000 random sequences


@pytest.mark.parametrize("position", [0, 1, 1000])
def test_seeds_at_a_position_are_uniform(position: int) -> None:
    numbers = uniform(torch.arange(COUNT), torch.full((COUNT,), position))
    assert distance_to_uniform(numbers) < 1.95


LIMIT = 4.5 / math.sqrt(COUNT)  # of a correlation whose standard deviation is 1 / sqrt(COUNT)


def test_neighbouring_positions_are_independent() -> None:
    numbers = sequence(3, count=COUNT + 64)
    for lag in (1, 2, 3, 8, 64):
        assert abs(correlation(numbers[:COUNT], numbers[lag : lag + COUNT])) < LIMIT, f"lag {lag}"


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (0, -1), (7, 7 + 2**32), (5, 5 + 2**62)])
def test_seeds_are_independent(one: int, other: int) -> None:
    assert abs(correlation(sequence(one), sequence(other))) < LIMIT
    assert abs(correlation(sequence(one)[1:], sequence(other)[:-1])) < LIMIT


@pytest.mark.parametrize("seed", [0, 42])
def test_streams_are_independent(seed: int) -> None:
    streams = [sequence(seed, stream) for stream in range(4)]
    for i in range(4):
        for j in range(i):
            assert abs(correlation(streams[i], streams[j])) < LIMIT, f"streams {i} and {j}"


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    seeds, positions = torch.tensor([9, 9, 4]), torch.tensor([3, 4, 3])
    together = uniform(seeds, positions)
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1]).item() for i in range(3)]
    assert together.tolist() == alone
    assert len(set(alone)) == 3


def test_a_draw_equals_a_race_in_unbounded_integers() -> None:
    print("seed 6")
    rng = random.Random(6)
    seeds = EXTREMES + [rng.randrange(-(2**63), 2**63) for _ in range(100)]
    positions = [rng.randrange(2**20) for _ in seeds]
    streams = [rng.randrange(3) for _ in seeds]
    probs = torch.rand(len(seeds), 50, generator=torch.Generator().manual_seed(6)).softmax(-1)
    got = draw(probs, torch.tensor(seeds), torch.tensor(positions), torch.tensor(streams))
    rows = zip(probs.tolist(), seeds, positions, streams, strict=True)
    assert got.tolist() == [sampling_reference.draw(p, seed, at, stream) for p, seed, at, stream in rows]


def test_drawing_never_picks_what_has_no_probability() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).repeat(COUNT, 1)
    drawn = draw(probs, torch.full((COUNT,), 3), torch.arange(COUNT)).bincount(minlength=6) / COUNT
    assert drawn[[0, 2, 5]].tolist() == [0, 0, 0]
    assert (drawn - probs[0]).abs().max() < 5 * 0.5 / math.sqrt(COUNT)


def test_draws_that_share_numbers_agree_as_often_as_their_distributions_allow() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.4, 0.3, 0.1, 0.2]]).unbind()
    seeds, positions = torch.full((COUNT,), 11), torch.arange(COUNT)
    same = draw(p.expand(COUNT, -1), seeds, positions) == draw(q.expand(COUNT, -1), seeds, positions)
    distance = (p - q).abs().sum().item() / 2
    assert same.double().mean() >= (1 - distance) / (1 + distance) - 5 * 0.5 / math.sqrt(COUNT)
