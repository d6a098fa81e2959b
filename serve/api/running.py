"""Runs jobs on an engine: what every endpoint shares, whatever the shape of its answer."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from serve.api.admission import Admission, Ticket
from serve.api.caller import Lease
from serve.api.choice import Choice
from serve.api.engine_protocol import Engine
from serve.api.errors import ApiError, client_gone, draining, engine_dead, engine_stalled, request_timeout, to_api_error
from serve.api.fanout import Fanout
from serve.api.job import Job
from serve.driver.messages import RequestDelta
from serve.metrics import EngineMetrics, SequenceTimer

logger = logging.getLogger("ray.serve")  # whose records bear X-Request-Id

_DRAIN_POLL_S = 0.05


class JobRunner:
    """`timeout_s` bounds a request, None = not at all; `stall_s`: an engine with pending requests that ends no step for
    longer is unwell. All calls raise ApiError and nothing else."""

    def __init__(
        self, engine: Engine, metrics: EngineMetrics, admission: Admission, timeout_s: float | None, stall_s: float
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._admission = admission
        self._timeout_s = timeout_s
        self._stall_s = stall_s
        self._draining = False

    def check_progress(self) -> None:
        """For health checks: raises ApiError (503) once the engine is gone, while the server drains, or when requests
        are pending and no step has ended for too long. A busy engine, however many wait, is well."""
        self._check_open()
        if self._engine.stalled_s > self._stall_s:
            raise engine_stalled(self._stall_s)

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new jobs from now on, and waits for those in progress; returns whether all have ended in time."""
        self._draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._admission.num_sequences and loop.time() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        return not self._admission.num_sequences

    def enter(self, job: Job) -> Ticket:
        """Raises ApiError: 503 when the engine is gone or the server drains, 429 when it is full."""
        self._check_open()
        prompts = [len(job.prompt(index).token_ids) for index in range(len(job.choices))]
        try:
            return self._admission.enter(prompts, job.caller.tenant)
        except ApiError:
            self._metrics.refused.inc()
            raise

    async def run_all(self, job: Job) -> None:
        """Enters the job and runs it to its end: its choices then hold the whole answer."""
        async with aclosing(self.run(job, self.enter(job))) as changes:
            async for _ in changes:
                pass

    async def run(self, job: Job, ticket: Ticket) -> AsyncGenerator[Choice, None]:
        """Runs the job's sequences; yields a choice whenever it has changed, the last time with a finish reason."""
        timers = [SequenceTimer(self._metrics) for _ in job.choices]
        begin = asyncio.get_running_loop().time()
        deadline = math.inf if self._timeout_s is None else begin + self._timeout_s
        ended = "abort"
        try:
            async with Fanout([self._generate(job, index) for index in range(len(job.choices))]) as fanout:
                left = len(job.choices)
                while left:
                    changed = _take_in(job, await self._next(fanout, deadline, job.caller.lease), timers)
                    for choice in changed:
                        ticket.begun(choice.index)
                        if choice.finish_reason:
                            fanout.stop(choice.index)
                            left -= 1
                    for choice in changed:
                        yield choice
        except Exception as error:
            ended = "error"
            raise to_api_error(error) from None
        finally:
            ticket.leave()
            _log(job, asyncio.get_running_loop().time() - begin)
            for timer in timers:
                timer.finish(ended)

    def _check_open(self) -> None:
        if self._engine.dead is not None:
            raise engine_dead()
        if self._draining:
            raise draining()

    async def _next(self, fanout: Fanout, deadline: float, lease: Lease | None) -> list[tuple[int, RequestDelta]]:
        """Raises ApiError past the deadline (504), a time of the event loop, and for a client that is gone (408)."""
        now = asyncio.get_running_loop().time
        while True:
            expires = math.inf if lease is None else lease.expires
            try:
                async with asyncio.timeout_at(None if (end := min(deadline, expires)) == math.inf else end):
                    return await fanout.batch()
            except TimeoutError:
                if now() >= deadline and self._timeout_s is not None:
                    raise request_timeout(self._timeout_s) from None
                if lease is not None and now() >= lease.expires:
                    raise client_gone() from None

    def _generate(self, job: Job, index: int) -> AsyncIterator[RequestDelta]:
        return self._engine.generate(
            job.prompt(index).token_ids,
            job.params[index],
            request_id=f"{job.id}-{index}",
            priority=job.priority,
            cache_salt=job.cache_salt,
            tenant=job.caller.tenant,
        )


def _take_in(job: Job, batch: list[tuple[int, RequestDelta]], timers: list[SequenceTimer]) -> list[Choice]:
    """The choices that the deltas changed, each once: what arrived together leaves in one chunk."""
    changed: dict[int, Choice] = {}
    for index, delta in batch:
        choice = job.choices[index]
        if choice.is_finished():  # the engine was ahead of a stop string
            continue
        before = choice.num_tokens
        choice.add(delta)
        changed[index] = choice
        timers[index].add_tokens(choice.num_tokens - before)
        if choice.finish_reason:
            timers[index].finish(choice.finish_reason)
    return list(changed.values())


def _log(job: Job, seconds: float) -> None:
    usage, reasons = job.usage(), ",".join(choice.finish_reason or "cut" for choice in job.choices)
    tokens = usage["prompt_tokens"], usage["completion_tokens"]
    logger.info("%s: %d tokens in, %d out, %s, %.3f s", job.id, *tokens, reasons, seconds)
