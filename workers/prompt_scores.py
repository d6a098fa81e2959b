"""Scores of prompt tokens: log-probabilities for `echo`, raw logits for parity checks."""

from collections.abc import Callable

import numpy as np
import torch

from workers.sampler import as_lists, score_tokens
from workers.step import Admission, PromptScores, StepPlan, TokenLogprobs
from workers.tables import StepBatch


class PromptScorer:
    """Scores chunks of the sequences that asked. A chunk's last row scores a token of the next chunk, so its logits
    are kept until that one comes."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._asked: dict[int, Admission] = {}
        self._kept: dict[int, torch.Tensor] = {}  # slot -> [1, vocab]

    def admit(self, admission: Admission) -> None:
        """Notes whether the slot's new sequence wants scores."""
        if admission.params.prompt_logits or admission.params.prompt_logprobs is not None:
            self._asked[admission.slot] = admission

    def release(self, slot: int) -> None:
        """Forgets the sequence that left the slot."""
        self._kept.pop(slot, None)
        self._asked.pop(slot, None)

    def score(
        self,
        plan: StepPlan,
        batch: StepBatch,
        hidden: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[PromptScores]:
        """hidden [rows, hidden] of the step; `head` gives logits and is called alike on every rank."""
        results = []
        spans = batch.chunks.spans if batch.chunks is not None else []
        for chunk, (lo, hi) in zip(plan.chunks, spans, strict=True):
            admission = self._asked.get(chunk.slot)
            prompt_rows = min(hi - lo, admission.num_prompt - chunk.start) if admission is not None else 0
            if admission is None or prompt_rows <= 0:
                continue
            logits = head(hidden[lo : lo + prompt_rows])
            raw = logits.cpu().numpy().astype("<f4").tobytes() if admission.params.prompt_logits else b""
            start = chunk.start
            logprobs: list[TokenLogprobs] = []
            if admission.params.prompt_logprobs is not None:
                start, logprobs = self._logprobs(admission, chunk.start, logits, chunk.token_ids[:prompt_rows])
            results.append(PromptScores(chunk.slot, start, logprobs, raw))
        return results

    def _logprobs(
        self, admission: Admission, start: int, logits: torch.Tensor, token_ids: list[int]
    ) -> tuple[int, list[TokenLogprobs]]:
        """Scores of the tokens after the kept row and after this chunk's rows but the last, which is kept."""
        kept = self._kept.pop(admission.slot, None)
        scoring = logits[:-1] if kept is None else torch.cat((kept, logits[:-1]))
        targets = token_ids[1:] if kept is None else token_ids
        self._kept[admission.slot] = logits[-1:].clone()
        if not targets:
            return start, []
        tops = [admission.params.prompt_logprobs or 0] * len(targets)
        tokens = torch.from_numpy(np.asarray(targets)).to(logits.device)
        return start - (kept is not None), as_lists(score_tokens(scoring, tokens), tops)
