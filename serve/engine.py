"""The engine as its front end sees it: requests of token ids in, deltas out, over asyncio."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future

import msgspec
import zmq

from serve.driver.messages import (
    AbortRequests,
    AddRequest,
    EngineDead,
    EngineOutputs,
    EngineReady,
    EngineStats,
    FromDriver,
    RequestDelta,
    Shutdown,
    StartupProgress,
    ToDriver,
)
from serve.errors import EngineDeadError
from serve.hosting import EnginePlan, Host, HostFactory
from workers.step import SamplingParams

logger = logging.getLogger(__name__)

# A worker's exit is noticed here at once; its last words to the driver may say more, and get this long to arrive.
_LAST_WORDS_S = 1.0


class AsyncEngine:
    """A started engine. Make it with `start`; use it from the event loop that started it."""

    def __init__(
        self,
        plan: EnginePlan,
        host: Host,
        exited: "asyncio.Future[str]",
        on_progress: Callable[[StartupProgress], None],
    ) -> None:
        self.plan = plan
        self.max_model_len = plan.max_model_len
        self.vocab_size = plan.model.vocab_size
        self.eos_token_ids = plan.model.eos_token_ids
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._queues: dict[str, asyncio.Queue[RequestDelta | EngineDeadError]] = {}
        self.start_seconds: dict[str, float] = {}  # where the start's time went: processes up, then workers' phases
        self._stats: EngineStats | None = None
        self._dead: str | None = None
        self._progress = time.monotonic()  # when a step last ended, or the first request came after a pause
        self._stopped = False
        self.died = asyncio.Event()
        self._ready: Future[EngineReady] = Future()
        self._host = host
        exited.add_done_callback(lambda message: self._on_exit(message.result()))
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.PUSH)
        self._requests.setsockopt(zmq.LINGER, 0)
        self._requests.setsockopt(zmq.SNDHWM, 0)
        self._requests.connect(self._host.endpoints.requests)
        self._encoder = msgspec.msgpack.Encoder()
        self._reader = threading.Thread(target=self._read, name="shoal-outputs", daemon=True)
        self._reader.start()

    @classmethod
    async def start(
        cls,
        plan: EnginePlan,
        host_factory: HostFactory,
        on_progress: Callable[[StartupProgress], None] = lambda progress: None,
    ) -> "AsyncEngine":
        """Starts driver and workers and waits for them. Raises EngineDeadError with the cause when they cannot."""
        loop = asyncio.get_running_loop()
        exited: asyncio.Future[str] = loop.create_future()

        def note_exit(message: str) -> None:
            if not exited.done():
                exited.set_result(message)

        begin = time.perf_counter()
        host = await asyncio.to_thread(
            host_factory, plan, lambda message: loop.call_soon_threadsafe(note_exit, message)
        )
        processes = time.perf_counter() - begin
        engine = cls(plan, host, exited, on_progress)
        try:
            ready = await asyncio.wrap_future(engine._ready)
            engine.start_seconds = {"processes": processes, **ready.seconds}
        except BaseException:
            await engine.stop()
            raise
        return engine

    @property
    def started(self) -> EngineReady:
        """What the workers said when they were up."""
        return self._ready.result()

    @property
    def stats(self) -> EngineStats | None:
        """As of the last step."""
        return self._stats

    @property
    def dead(self) -> str | None:
        """Why the engine can serve no more, or None."""
        return self._dead

    @property
    def stalled_s(self) -> float:
        """Seconds since a step last ended while requests are pending; 0 when none are."""
        return time.monotonic() - self._progress if self._queues else 0.0

    async def generate(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
    ) -> AsyncGenerator[RequestDelta, None]:
        """Yields what each step adds; closing the generator aborts the request.

        Raises EngineDeadError when the engine is gone, ValueError for a request_id that is in use or a parameter that
        names a token the model does not have.
        """
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if request_id in self._queues:
            raise ValueError(f"request_id {request_id!r} is in use")
        queue: asyncio.Queue[RequestDelta | EngineDeadError] = asyncio.Queue()
        eos = () if params.ignore_eos else self.eos_token_ids
        stop_ids = (*eos, *params.stop_token_ids)
        finished = False
        self._send(AddRequest(request_id, token_ids, params, priority, cache_salt, stop_ids, tenant))
        if not self._queues:
            self._progress = time.monotonic()
        self._queues[request_id] = queue  # after sending, which may fail; answers come through this same loop
        try:
            while not finished:
                delta = await queue.get()
                if isinstance(delta, EngineDeadError):
                    finished = True
                    raise delta
                finished = delta.finish_reason is not None
                yield delta
        finally:
            del self._queues[request_id]
            if not finished and not self._stopped:
                self._send(AbortRequests([request_id]))

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"{name} holds the token id {token_id}: this model's are 0 to {self.vocab_size - 1}")

    async def stop(self) -> None:
        """Ends driver and workers. Requests in flight fail."""
        if self._stopped:
            return
        self._stopped = True
        graceful = self._dead is None
        self._fail("the engine was stopped")
        self._send(Shutdown())
        await asyncio.to_thread(lambda: self._host.stop(graceful=graceful))
        await asyncio.to_thread(self._reader.join)
        self._context.destroy(linger=0)

    def _send(self, message: ToDriver) -> None:
        self._requests.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _read(self) -> None:
        """The reader thread: one message a step, handed to the loop."""
        decoder = msgspec.msgpack.Decoder(FromDriver)
        outputs = self._context.socket(zmq.PULL)
        outputs.setsockopt(zmq.LINGER, 0)
        outputs.setsockopt(zmq.RCVTIMEO, 200)  # between messages, look whether the engine was stopped
        outputs.connect(self._host.endpoints.outputs)
        while not self._stopped:
            try:
                message = decoder.decode(outputs.recv())
            except zmq.Again:
                continue
            if isinstance(message, EngineReady):
                self._ready.set_result(message)
            else:
                self._loop.call_soon_threadsafe(self._take, message)
        outputs.close()

    def _take(self, message: FromDriver) -> None:
        if isinstance(message, EngineOutputs):
            self._stats = message.stats
            self._progress = time.monotonic()
            for delta in message.deltas:
                if (queue := self._queues.get(delta.request_id)) is not None:
                    queue.put_nowait(delta)
        elif isinstance(message, StartupProgress):
            self._on_progress(message)
        elif isinstance(message, EngineDead):
            self._fail(message.message)

    def _on_exit(self, message: str) -> None:
        """The first process that ended: the cause, where the driver has only heard of it from the others."""
        if not self._stopped:
            logger.error("%s", message)
            self._loop.call_later(_LAST_WORDS_S, self._fail, message)

    def _fail(self, message: str) -> None:
        if self._dead is not None:
            return
        self._dead = message
        if not self._ready.done():
            self._ready.set_exception(EngineDeadError(message))
        for queue in self._queues.values():
            queue.put_nowait(EngineDeadError(message))
        self.died.set()
