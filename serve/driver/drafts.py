"""How many tokens to draft: what was measured decides."""

from collections import deque
from collections.abc import Callable, Collection
from statistics import median

_WINDOW = 100  # verifications that acceptance is averaged over: few, so that a trial can tell that it has changed
_SAMPLES = 15  # steps that a cost is the median of
_ENOUGH = 3  # steps without which a cost is not known
_TRIAL = 6  # steps that a number of drafts is tried for; the first two have another one before or after them
_PERIOD = 256  # steps from one trial of a neighbour to the next: trials of what is known take 2.3 % of the steps


class DraftPolicy:
    """Chooses the number of drafts of each step.

    Fixed: always `max_drafts`. Adaptive: the k with the most tokens a second, E[k] / t(b, k). E[k] = 1 + a1 + a1 a2 +
    ... counts the tokens of a verification, a_j the share of j-th drafts accepted when those before were; t(b, k) is
    the median of the latest durations of steps that verified and made k drafts for each of b sequences (to a power of
    two) and had no prefill. A k whose t is not known is tried for some steps; later the neighbours of the best are,
    now and then, so that figures stay fresh. A new size begins with the figures of the nearest: where it is larger
    they are too good to be true, and each k that they praise is soon measured. Where more rows make a step longer than
    their drafts are worth, k = 0 wins, so that a busy server is not slowed down.
    """

    def __init__(self, max_drafts: int, *, adaptive: bool) -> None:
        self.max_drafts = max_drafts
        self._adaptive = adaptive and max_drafts > 0
        self._candidates = _candidates(max_drafts)
        self._acceptance = [_Mean() for _ in range(max_drafts)]
        self._accept_length = _Mean()
        self._buckets: dict[int, _Bucket] = {}
        self._current = 0
        self.chosen = max_drafts

    @property
    def accept_length(self) -> float:
        """Mean tokens of a recent verification, the one that is not a draft included; 0 before the first."""
        return self._accept_length.value

    def choose(self, num_decoding: int) -> int:
        """Drafts to make in the next step for the one after it, in which so many sequences decode."""
        if self._adaptive:
            self.chosen = self._bucket(num_decoding).choose(self._expected_tokens)
        return self.chosen

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Takes in what became of one sequence's drafts."""
        for position in range(min(num_drafts, num_accepted + 1)):
            self._acceptance[position].add(position < num_accepted)
        if num_drafts:
            self._accept_length.add(1 + num_accepted)

    def observe(self, num_decoding: int, num_drafts: int, seconds: float) -> None:
        """Takes in a step without prefill that verified and made num_drafts for each sequence."""
        if self._adaptive and num_decoding:
            self._bucket(num_decoding).costs[num_drafts].append(seconds)

    def _bucket(self, num_decoding: int) -> "_Bucket":
        number = max(num_decoding, 1).bit_length()
        if number not in self._buckets:
            nearest = min(self._buckets, key=lambda other: (abs(other - number), other), default=None)
            near = None if nearest is None else self._buckets[nearest]
            self._buckets[number] = _Bucket(self._candidates, self.max_drafts, near)
        if number != self._current:
            self._buckets[number].stop_trial()
            self._current = number
        return self._buckets[number]

    def _expected_tokens(self, num_drafts: int) -> float:
        expected, reached = 1.0, 1.0
        for position in range(num_drafts):
            reached *= self._acceptance[position].value if self._acceptance[position].count else 1.0
            expected += reached
        return expected


class _Bucket:
    """The costs at one size of batch, and what is being tried."""

    def __init__(self, candidates: list[int], best: int, near: "_Bucket | None") -> None:
        self.costs: dict[int, deque[float]] = {k: deque(maxlen=_SAMPLES) for k in candidates}
        self.best: int = best if near is None else near.best
        self._borrowed: dict[int, float] = {} if near is None else near.known_costs()
        self._candidates = candidates
        self._trial = self.best  # number of drafts tried last
        self._left = 0  # steps of the trial to come
        self._wait = 0  # steps to the next trial
        self._up = False  # whether the neighbour tried last was the one above

    def choose(self, expected_tokens: Callable[[int], float]) -> int:
        if self._left:
            self._left -= 1
            return self._trial
        known = self.known_costs()
        if known:
            self.best = max(known, key=lambda k: expected_tokens(k) / known[k])
        self._wait -= 1
        # What is unknown is tried at once, unless the last trial could not be measured (all its steps had prefill).
        due = self._wait <= 0 or (len(known) < len(self._candidates) and self._trial in known)
        if due and (trial := self._next_trial(known)) is not None:
            self._trial, self._left, self._wait = trial, _TRIAL - 1, _PERIOD
            return trial
        return self.best

    def known_costs(self) -> dict[int, float]:
        """Seconds of a step by number of drafts: measured here, else borrowed."""
        measured = {k: median(costs) for k, costs in self.costs.items() if len(costs) >= _ENOUGH}
        return self._borrowed | measured

    def _next_trial(self, known: Collection[int]) -> int | None:
        unknown = [k for k in self._candidates if k not in known]
        if unknown:
            return min(unknown, key=lambda k: abs(k - self.best))
        self._up = not self._up
        at = self._candidates.index(self.best) + (1 if self._up else -1)
        return self._candidates[at] if 0 <= at < len(self._candidates) else None

    def stop_trial(self) -> None:
        self._left = 0


class _Mean:
    """Running mean of about the last _WINDOW values."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, _WINDOW)
        self.value += (value - self.value) / self.count


def _candidates(max_drafts: int) -> list[int]:
    """0, 1, 2, 3, then about half as many again each time, up to max_drafts."""
    numbers = [0]
    while numbers[-1] < max_drafts:
        numbers.append(min(max(numbers[-1] + 1, numbers[-1] * 3 // 2), max_drafts))
    return numbers
