"""A naive sampler to compare with: one row at a time, in float64 and plain Python."""

import math
from dataclasses import dataclass, field

from workers.step import Admission, SamplingParams

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STREAM = 0xD1B54A32D192ED03


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """The number in (0, 1) that belongs to (seed, position, stream), by unbounded integers."""
    return _unit(_splitmix64(_key(seed, position, stream)))


def draw(probs: list[float], seed: int, position: int, stream: int = 0) -> int:
    """The id that wins the exponential race of (seed, position, stream)."""
    key = _key(seed, position, stream)
    scores = [p / -math.log(_unit(_splitmix64(key + token * _GOLDEN))) for token, p in enumerate(probs)]
    return scores.index(max(scores))


def _key(seed: int, position: int, stream: int) -> int:
    return _splitmix64(_splitmix64(seed & _MASK) + position * _GOLDEN + stream * _STREAM % 2**62)


def _unit(bits: int) -> float:
    return ((bits >> 41) + 0.5) / 2**23


def _splitmix64(x: int) -> int:
    """The finaliser of splitmix64 (Steele et al. 2014)."""
    x &= _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """What is drawn from at a temperature above 0: processed logits -> probabilities that sum to 1."""
    best_first = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = best_first[: params.top_k] if params.top_k > 0 else best_first
    weight = {token: math.exp((logits[token] - logits[kept[0]]) / params.temperature) for token in kept}
    total, before, nucleus = sum(weight.values()), 0.0, []
    for token in kept:
        if before < params.top_p * total:
            nucleus.append(token)
        before += weight[token]
    kept = [token for token in nucleus if weight[token] >= params.min_p * weight[nucleus[0]]]
    total = sum(weight[token] for token in kept)
    return [weight[token] / total if token in kept else 0.0 for token in range(len(logits))]


@dataclass
class Request:
    """A sequence as the sampler sees it."""

    params: SamplingParams
    seed: int = 0
    prompt: list[int] = field(default_factory=lambda: [0])
    stop_ids: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the next token goes."""
        return len(self.prompt) + len(self.output)

    def admission(self, slot: int) -> Admission:
        """As the driver admits it, at first or after a preemption."""
        history = [*self.prompt, *self.output] if self.params.has_penalties else []
        return Admission(slot, self.seed, self.params, len(self.prompt), 0, [], self.stop_ids, history)

    def processed(self, logits: list[float]) -> list[float]:
        """Logits after logit_bias, min_tokens and the penalties."""
        result = list(logits)
        for token, bias in self.params.logit_bias.items():
            result[token] += bias
        if len(self.output) < self.params.min_tokens:
            for token in self.stop_ids:
                result[token] = -math.inf
        repetition = self.params.repetition_penalty
        for token in {*self.prompt, *self.output}:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        for token in set(self.output):
            result[token] -= self.params.frequency_penalty * self.output.count(token) + self.params.presence_penalty
        return result

    def choose(self, logits: list[float]) -> int:
        """The next token."""
        processed = self.processed(logits)
        if self.params.temperature == 0:
            return processed.index(max(processed))
        return draw(probabilities(processed, self.params), self.seed, self.position)
