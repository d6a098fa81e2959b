"""Which tokens the grammars of a step's requests allow: a matcher for each, followed token by token on the host.

The masks of a step need the tokens of the step before. They are made while the device runs the step's forward pass, so
that nothing waits for them but the sampling.
"""

import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from workers.grammar_compiler import GrammarCompiler
from workers.result import LaunchedStep
from workers.step import Admission

if TYPE_CHECKING:
    import xgrammar

logger = logging.getLogger(__name__)


class _Followed(NamedTuple):
    """A step whose tokens the matchers have not seen; `matchers` of its sampled sequences."""

    step: LaunchedStep
    matchers: list["Matcher | None"]


class Matcher:
    """One sequence under its grammar, up to its last token known on the host."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar") -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._is_free = False  # after the end of the grammar, or when it was broken
        self.drafts: list[int] = []  # that follow the last token

    def accept(self, tokens: list[int]) -> None:
        """Takes in tokens of the sequence. One that the grammar does not allow can only come from logits that are not
        numbers; the sequence then goes on without it."""
        for token in tokens:
            if not self._is_free and not self._matcher.accept_token(token):
                logger.error("token %d is not what the request's grammar allows: its output is free from here", token)
                self._is_free = True
            self._is_free = self._is_free or self._matcher.is_terminated()

    def fill(self, rows: torch.Tensor) -> None:
        """Writes what may follow the last token and each draft to rows [1 + k, words] int32, which hold ones. Behind
        a draft that is not allowed nothing matters, as it is not taken."""
        if self._is_free:
            return
        self._matcher.fill_next_token_bitmask(rows, 0)
        accepted = 0
        for row, token in enumerate(self.drafts[: rows.shape[0] - 1], 1):
            # Asking the mask first, since the matcher prints a warning for special tokens.
            allowed = int(rows[row - 1, token // 32]) >> token % 32 & 1
            if not (allowed and self._matcher.accept_token(token)):
                break
            accepted += 1
            if self._matcher.is_terminated():
                break
            self._matcher.fill_next_token_bitmask(rows, row)
        if accepted:
            self._matcher.rollback(accepted)


class Grammars:
    """The matchers of all slots, and the masks of a step. Of the rank that samples."""

    def __init__(
        self, compiler: GrammarCompiler, max_num_seqs: int, max_rows: int, vocab_size: int, device: torch.device
    ) -> None:
        """`max_rows`: of one sequence in a step."""
        self.compiler = compiler
        self._matchers: list[Matcher | None] = [None] * max_num_seqs
        self._unseen: deque[_Followed] = deque()
        self._words = -(-vocab_size // 32)
        self._size = max_num_seqs * max_rows * self._words
        self._device = device
        self._host: torch.Tensor | None = None
        self._on_device: torch.Tensor | None = None

    def admit(self, admission: Admission) -> None:
        """A sequence enters its slot, with the output it had before a preemption."""
        self._matchers[admission.slot] = None
        if admission.params.grammar:
            matcher = Matcher(self.compiler.compile(admission.params.grammar))
            matcher.accept(admission.history[admission.num_prompt :])
            self._matchers[admission.slot] = matcher

    def release(self, slot: int) -> None:
        """The slot's sequence has left."""
        self._matchers[slot] = None

    def follow(self, step: LaunchedStep) -> None:
        """A step was launched: its tokens will be seen before the next masks are made."""
        matchers = [self._matchers[slot] for slot in step.slots]
        if any(matchers):
            self._unseen.append(_Followed(step, matchers))

    def buffer(self, count: int, rows: int) -> torch.Tensor:
        """The masks [count, rows, words] int32 on the device, at an address that stays; bit t of a row's words says
        whether token t may come."""
        if self._on_device is None:
            self._on_device = torch.full((self._size,), -1, dtype=torch.int32, device=self._device)
            pinned = self._device.type == "cuda"
            self._host = self._on_device if not pinned else torch.empty(self._size, dtype=torch.int32, pin_memory=True)
        return self._on_device[: count * rows * self._words].view(count, rows, self._words)

    def write(self, slots: list[int], count: int, rows: int) -> torch.Tensor:
        """Fills `buffer(count, rows)` for these slots, once the tokens of the steps before have come; sequences without
        a grammar, and those that pad the batch, may do anything."""
        self.see()
        masks = self.buffer(count, rows)
        assert self._host is not None
        host = self._host[: masks.numel()].view(masks.shape).fill_(-1)
        for i, slot in enumerate(slots):
            if (matcher := self._matchers[slot]) is not None:
                matcher.fill(host[i])
        if host.data_ptr() != masks.data_ptr():
            masks.copy_(host, non_blocking=True)
        return masks

    def see(self, step: LaunchedStep | None = None) -> None:
        """Takes in the tokens of all steps launched, or up to the given one; waits for them."""
        while self._unseen and (step is None or self._unseen[0].step.step <= step.step):
            followed = self._unseen.popleft()
            tokens, counts, _, drafts = followed.step.result.wait()
            for i, matcher in enumerate(followed.matchers):
                if matcher is not None:
                    matcher.accept(tokens[i, : int(counts[i])].tolist())
                    matcher.drafts = [] if drafts is None else drafts[i].tolist()
