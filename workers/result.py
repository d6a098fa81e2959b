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
    drafts: torch.Tensor | None = None  # [sampled, drafts] int64 made for the next step, where a grammar follows them


class OnHost:
    """A copy of a StepResult that is under way to the host."""

    def __init__(self, result: StepResult, device: torch.device) -> None:
        scores = () if result.scores is None else result.scores
        self._has_drafts = result.drafts is not None
        tensors = (*result.verdict, *(() if result.drafts is None else (result.drafts,)), *scores)
        self._tensors = [t if device.type == "cpu" else _pinned(t) for t in tensors]
        self._arrived = None
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> tuple[torch.Tensor, torch.Tensor, TokenScores | None, torch.Tensor | None]:
        """tokens, counts, the tokens' scores, and drafts."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, counts, *others = self._tensors
        drafts = others.pop(0) if self._has_drafts else None
        return tokens, counts, TokenScores(*others) if others else None, drafts


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
