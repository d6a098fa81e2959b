"""A bound on what may wait: a request beyond it is told at once to come again, before anything reaches the engine."""

from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus

from serve.api.errors import ApiError

RETRY_AFTER_S = 1  # about the time in which sequences end under load


class Admission:
    """Counts the sequences in the engine, and the prompt tokens of those that have not begun to answer.

    When it is full, a tenant that holds less than its share (the bound, divided by the tenants that are there) is let
    in all the same, so that one that floods the server shuts out nobody but itself.
    """

    def __init__(self, max_sequences: int | None = None, max_waiting_tokens: int | None = None) -> None:
        """None = no bound."""
        self._max_sequences = max_sequences
        self._max_waiting_tokens = max_waiting_tokens
        self.num_sequences = 0
        self.num_waiting_tokens = 0
        self._held: Counter[str] = Counter()  # sequences by tenant

    def enter(self, prompt_lens: Sequence[int], tenant: str = "") -> "Ticket":
        """Lets in the sequences of a request, given their prompts' lengths. Raises ApiError (429) when that would
        exceed a bound; a request that finds nobody there is let in however large."""
        sequences = self.num_sequences + len(prompt_lens)
        tokens = self.num_waiting_tokens + sum(prompt_lens)
        if self._max_sequences is not None and self.num_sequences and sequences > self._max_sequences:
            if not self._has_share(tenant, len(prompt_lens)):
                raise _full(f"{self.num_sequences} sequences")
        elif self._max_waiting_tokens is not None and self.num_waiting_tokens and tokens > self._max_waiting_tokens:
            raise _full(f"prompts of {self.num_waiting_tokens} tokens")
        return Ticket(self, prompt_lens, tenant)

    def _has_share(self, tenant: str, more: int) -> bool:
        """Whether a tenant keeps to its share of the sequences with so many more."""
        others = len(self._held.keys() - {tenant})
        return bool(others) and (self._held[tenant] + more) * (1 + others) <= (self._max_sequences or 0)

    def count(self, tenant: str, sequences: int, tokens: int) -> None:
        """Adds to the counts, or takes from them."""
        self.num_sequences += sequences
        self.num_waiting_tokens += tokens
        self._held[tenant] += sequences
        if not self._held[tenant]:
            del self._held[tenant]


class Ticket:
    """A request that was let in. It leaves with `leave`, or when nobody holds the ticket any more: a stream that was
    opened may be dropped before it is read."""

    def __init__(self, admission: Admission, prompt_lens: Sequence[int], tenant: str) -> None:
        self._admission = admission
        self._tenant = tenant
        self._waiting = dict(enumerate(prompt_lens))
        self._sequences = len(prompt_lens)
        admission.count(tenant, self._sequences, sum(prompt_lens))

    def begun(self, index: int) -> None:
        """The sequence answers: its prompt does not wait any longer."""
        self._admission.count(self._tenant, 0, -self._waiting.pop(index, 0))

    def leave(self) -> None:
        """Only the first call counts."""
        self._admission.count(self._tenant, -self._sequences, -sum(self._waiting.values()))
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
