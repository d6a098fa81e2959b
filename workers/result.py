"""What a step leaves on the device, and its way to the host."""

from typing import NamedTuple

import torch

from workers.sampler import TokenScores, Verdict
from workers.step import PromptScores
from workers.tables import Unsettled


class StepResult(NamedTuple):
    """Of the sampled sequences, on the device."""

    verdict: Verdict
    scores: TokenScores | None  # of the verdict's tokens, where a request asked (rank 0)


class OnHost:
    """A copy of a StepResult that is under way to the host."""

    def __init__(self, result: StepResult, device: torch.device) -> None:
        self._tensors = [t if device.type == "cpu" else _pinned(t) for t in (*result.verdict, *(result.scores or ()))]
        self._arrived = None
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> tuple[torch.Tensor, torch.Tensor, TokenScores | None]:
        """tokens, counts, and the tokens' scores."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, counts, *scores = self._tensors
        return tokens, counts, TokenScores(*scores) if scores else None


class LaunchedStep(NamedTuple):
    """A step that runs, or has run."""

    step: int
    slots: list[int]  # of the sampled sequences
    unsettled: Unsettled
    result: OnHost
    prompt_scores: list[PromptScores]
    begin: float  # time.perf_counter() at its launch


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
