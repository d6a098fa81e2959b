"""A bound on what may wait: a request beyond it is told at once to come again, before anything reaches the engine."""

from collections.abc import Sequence
from http import HTTPStatus

from serve.api.errors import ApiError

RETRY_AFTER_S = 1  # about the time in which sequences end under load


class Admission:
    """Counts the sequences in the engine, and the prompt tokens of those that have not begun to answer."""

    def __init__(self, max_sequences: int | None = None, max_waiting_tokens: int | None = None) -> None:
        """None = no bound."""
        self._max_sequences = max_sequences
        self._max_waiting_tokens = max_waiting_tokens
        self.num_sequences = 0
        self.num_waiting_tokens = 0

    def enter(self, prompt_lens: Sequence[int]) -> "Ticket":
        """Lets in the sequences of a request, given their prompts' lengths. Raises ApiError (429) when that would
        exceed a bound; a request that finds nobody there is let in however large."""
        sequences = self.num_sequences + len(prompt_lens)
        tokens = self.num_waiting_tokens + sum(prompt_lens)
        if self._max_sequences is not None and self.num_sequences and sequences > self._max_sequences:
            raise _full(f"{self.num_sequences} sequences")
        if self._max_waiting_tokens is not None and self.num_waiting_tokens and tokens > self._max_waiting_tokens:
            raise _full(f"prompts of {self.num_waiting_tokens} tokens")
        return Ticket(self, prompt_lens)


class Ticket:
    """A request that was let in. It leaves with `leave`, or when nobody holds the ticket any more: a stream that was
    opened may be dropped before it is read."""

    def __init__(self, admission: Admission, prompt_lens: Sequence[int]) -> None:
        self._admission = admission
        self._waiting = dict(enumerate(prompt_lens))
        self._sequences = len(prompt_lens)
        admission.num_sequences += self._sequences
        admission.num_waiting_tokens += sum(prompt_lens)

    def begun(self, index: int) -> None:
        """The sequence answers: its prompt does not wait any longer."""
        self._admission.num_waiting_tokens -= self._waiting.pop(index, 0)

    def leave(self) -> None:
        """Only the first call counts."""
        self._admission.num_sequences -= self._sequences
        self._admission.num_waiting_tokens -= sum(self._waiting.values())
        self._sequences = 0
        self._waiting = {}

    def __del__(self) -> None:
        self.leave()


def _full(what: str) -> ApiError:
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"The server is full: {what} are before this request. Try again in a moment.",
        "rate_limit_error",
        code="server_full",
        retry_after_s=RETRY_AFTER_S,
    )
