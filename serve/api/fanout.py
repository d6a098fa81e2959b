"""Several sequences of the engine followed at once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from serve.driver.messages import RequestDelta


class Fanout:
    """Pulls each stream in a task of its own. What has piled up while the consumer was busy comes in one batch;
    nothing ever waits for more to come. Leaving the context stops every stream that still runs, which aborts it.
    """

    def __init__(self, streams: Sequence[AsyncIterator[RequestDelta]]) -> None:
        self._streams = streams
        self._tasks: list[asyncio.Task[None]] = []
        self._arrived: list[tuple[int, RequestDelta | Exception]] = []
        self._wake = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._pump(index, stream)) for index, stream in enumerate(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def batch(self) -> list[tuple[int, RequestDelta]]:
        """All deltas that have arrived, with their stream's index; waits for the first.

        Raises a stream's error, after the deltas that came before it.
        """
        await self._wake.wait()
        deltas: list[tuple[int, RequestDelta]] = []
        for index, item in self._arrived:
            if isinstance(item, Exception):
                if deltas:
                    break
                raise item
            deltas.append((index, item))
        del self._arrived[: len(deltas)]
        if not self._arrived:
            self._wake.clear()
        return deltas

    def stop(self, index: int) -> None:
        """No more of this stream is wanted."""
        self._tasks[index].cancel()

    async def _pump(self, index: int, stream: AsyncIterator[RequestDelta]) -> None:
        finished = False
        try:
            async for delta in stream:
                finished = finished or delta.finish_reason is not None
                self._put(index, delta)
            if not finished:
                raise RuntimeError("the engine's stream ended without a finish reason")
        except Exception as error:
            self._put(index, error)

    def _put(self, index: int, item: RequestDelta | Exception) -> None:
        self._arrived.append((index, item))
        self._wake.set()
