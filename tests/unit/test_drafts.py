"""The draft policy: it settles on what measured costs and acceptance make fastest, and keeps looking."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from serve.driver.drafts import DraftPolicy

Cost = Callable[[int, int], float]  # (sequences, drafts) -> seconds


def run(
    policy: DraftPolicy, cost: Cost, acceptance: float, sequences: int, steps: int, *, noise: float = 0.0, seed: int = 1
) -> Counter[int]:
    """Steps of a server with two plans in flight; returns how often each number of drafts was chosen."""
    rng = random.Random(seed)
    chosen: Counter[int] = Counter()
    held, queue = 0, []
    for _ in range(steps):
        draft = policy.choose(sequences)
        chosen[draft] += 1
        queue.append((held, draft))
        held = draft
        if len(queue) == 2:
            verify, made = queue.pop(0)
            seconds = cost(sequences, (verify + made) // 2) * rng.lognormvariate(0, noise)
            if verify == made:
                policy.observe(sequences, verify, seconds)
            for _ in range(min(sequences, 8) if verify else 0):
                accepted = 0
                while accepted < verify and rng.random() < acceptance:
                    accepted += 1
                policy.verified(verify, accepted)
    return chosen


def memory_bound(sequences: int, drafts: int) -> float:
    return 0.010 + 0.0005 * drafts


def compute_bound(sequences: int, drafts: int) -> float:
    return 0.001 * sequences * (1 + drafts)


def crossing(sequences: int, drafts: int) -> float:
    """Rows are free up to 32, then each costs."""
    return 0.010 + 0.0005 * drafts + 0.0005 * max(0, sequences * (1 + drafts) - 32)


def best_of(cost: Cost, acceptance: float, sequences: int, limit: int) -> int:
    def rate(k: int) -> float:
        return sum(acceptance**j for j in range(k + 1)) / cost(sequences, k)

    return max(range(limit + 1), key=rate)


@pytest.mark.parametrize("adaptive", [True, False])
def test_without_drafts_none_are_chosen(adaptive: bool) -> None:
    policy = DraftPolicy(0, adaptive=adaptive)
    assert run(policy, memory_bound, 0.9, 4, 50) == {0: 50}


def test_fixed_is_always_the_same() -> None:
    policy = DraftPolicy(3, adaptive=False)
    assert run(policy, compute_bound, 0.1, 64, 300) == {3: 300}


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("acceptance", [0.3, 0.8])
@pytest.mark.parametrize("sequences", [1, 6, 16, 64])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound, crossing])
def test_it_settles_near_the_fastest(cost: Cost, sequences: int, acceptance: float, noise: float) -> None:
    policy = DraftPolicy(3, adaptive=True)
    run(policy, cost, acceptance, sequences, 300, noise=noise)
    chosen = run(policy, cost, acceptance, sequences, 2000, noise=noise, seed=2)

    def rate(k: int) -> float:
        return sum(acceptance**j for j in range(k + 1)) / cost(sequences, k)

    mean = sum(rate(k) * count for k, count in chosen.items()) / 2000
    assert mean > (0.97 if not noise else 0.93) * rate(best_of(cost, acceptance, sequences, 3))


def test_a_busy_server_is_not_slowed_down() -> None:
    policy = DraftPolicy(3, adaptive=True)
    run(policy, compute_bound, 0.7, 64, 100)
    chosen = run(policy, compute_bound, 0.7, 64, 5000)
    assert chosen[0] > 0.97 * 5000
    seconds = sum(compute_bound(64, k) * count for k, count in chosen.items())
    tokens = sum(sum(0.7**j for j in range(k + 1)) * count for k, count in chosen.items())
    assert tokens / seconds > 0.98 * 5000 / (5000 * compute_bound(64, 0))


def test_it_follows_the_load() -> None:
    policy = DraftPolicy(3, adaptive=True)
    for _ in range(2):
        assert run(policy, crossing, 0.8, 2, 600).most_common(1)[0][0] == best_of(crossing, 0.8, 2, 3) == 3
        assert run(policy, crossing, 0.8, 100, 600).most_common(1)[0][0] == best_of(crossing, 0.8, 100, 3) == 0


def test_a_new_size_of_batch_is_not_explored_from_nothing() -> None:
    """Batches of 16, of 8 and of 1 cost alike: what was learnt at one holds for the others at once."""
    policy = DraftPolicy(3, adaptive=True)
    run(policy, memory_bound, 0.9, 16, 300)
    for sequences in (8, 1):
        assert run(policy, memory_bound, 0.9, sequences, 100)[3] >= 94


def test_at_a_larger_size_a_wrong_start_is_soon_corrected() -> None:
    policy = DraftPolicy(3, adaptive=True)
    run(policy, crossing, 0.8, 1, 300)
    chosen = run(policy, crossing, 0.8, 120, 100)
    assert chosen[0] >= 60


def test_it_follows_acceptance() -> None:
    policy = DraftPolicy(3, adaptive=True)
    run(policy, memory_bound, 0.9, 4, 500)
    run(policy, crossing, 0.02, 40, 1500)
    assert run(policy, crossing, 0.02, 40, 500).most_common(1)[0][0] == 0
    run(policy, memory_bound, 0.9, 4, 1500)
    assert run(policy, memory_bound, 0.9, 4, 500).most_common(1)[0][0] == 3


def test_many_drafts_are_tried_on_a_ladder() -> None:
    policy = DraftPolicy(15, adaptive=True)
    chosen = run(policy, memory_bound, 0.95, 1, 3000)
    assert set(chosen) <= {0, 1, 2, 3, 4, 6, 9, 13, 15}
    assert chosen.most_common(1)[0][0] in (13, 15)


def test_while_nothing_can_be_measured_trials_stay_rare() -> None:
    """All steps have prefill: no costs come in."""
    policy = DraftPolicy(3, adaptive=True)
    chosen = Counter(policy.choose(8) for _ in range(2560))
    assert chosen[3] > 0.9 * 2560


def test_accept_length_is_that_of_the_recent_past() -> None:
    policy = DraftPolicy(2, adaptive=True)
    assert policy.accept_length == 0
    for _ in range(600):
        policy.verified(2, 2)
    assert policy.accept_length == pytest.approx(3)
    for _ in range(3000):
        policy.verified(2, 0)
    assert policy.accept_length < 1.1
    policy.verified(0, 0)
    assert policy.accept_length < 1.1
