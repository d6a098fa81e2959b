"""What the front end needs of an engine."""

from collections.abc import AsyncIterator
from typing import Protocol

from serve.driver.messages import EngineStats, RequestDelta
from workers.step import SamplingParams


class Engine(Protocol):
    """Runs requests of token ids. Every request is validated before it comes here."""

    max_model_len: int  # tokens, prompt + output
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def generate(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
    ) -> AsyncIterator[RequestDelta]:
        """An async generator of what each step adds; the last delta has a finish_reason, and a delta may be empty.

        Closing or cancelling it aborts the request. Raises EngineDeadError when the engine is gone.
        """

    @property
    def stats(self) -> EngineStats | None: ...

    @property
    def dead(self) -> str | None:
        """Why the engine can serve no more, or None."""

    @property
    def stalled_s(self) -> float:
        """Seconds since a step last ended while requests are pending; 0 when none are."""
