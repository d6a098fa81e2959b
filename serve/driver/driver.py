"""The driver: between a front end that sends requests and workers that run steps."""

import contextlib
import logging
import time

import zmq

from configs.engine import EngineConfig
from serve.driver.channels import Channels, Endpoints
from serve.driver.errors import EngineFailure
from serve.driver.messages import AbortRequests, AddRequest, EngineDead, EngineOutputs, RequestDelta, ToDriver
from serve.driver.scheduler import Scheduler
from serve.driver.startup import Startup
from workers.step import FromWorker, GrammarReady, StepOutput, Stop, WorkerFailed

logger = logging.getLogger(__name__)


class Driver:
    """Binds its sockets when made; `run` starts the workers, serves until told to stop, and closes the sockets.

    It blocks on sockets and sets no signal handlers, so it runs in a thread as well as in a process of its own. `host`
    is the address under which workers on other nodes reach this one; None when all are on this node. `ipc_dir` is an
    existing folder that no other driver uses.
    """

    def __init__(self, config: EngineConfig, max_model_len: int, ipc_dir: str, host: str | None) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._channels = Channels(ipc_dir, host)

    @property
    def endpoints(self) -> Endpoints:
        """Where front end and workers connect."""
        return self._channels.endpoints

    def run(self) -> None:
        """Returns after a Shutdown, or after the engine died: the front end then got EngineDead, the log the cause."""
        try:
            self._serve()
        except EngineFailure as failure:
            logger.error("the engine stops: %s", failure)
            self._announce_death(str(failure))
        except Exception as error:
            logger.exception("the engine stops after an error in its driver")
            summary = str(error).partition("\n")[0]
            self._announce_death(f"internal error in the driver: {type(error).__name__}: {summary}")
        finally:
            with contextlib.suppress(zmq.ZMQError):
                self._channels.broadcast(Stop())
            self._channels.close()

    def close(self) -> None:
        """Closes the sockets of a driver that was never run."""
        self._channels.close()

    def _serve(self) -> None:
        startup = Startup(self._channels, tp_size=self._config.parallel.tp_size, timeout_s=self._config.start_timeout_s)
        ready = startup.run()
        if ready is None:
            return
        scheduler = Scheduler.from_config(self._config, max_model_len=self._max_model_len, num_pages=ready.num_pages)
        self._channels.send(ready)
        StepLoop(self._channels, scheduler, self._config).run(startup.early_requests)

    def _announce_death(self, message: str) -> None:
        try:
            self._channels.send(EngineDead(message))
        except zmq.ZMQError as error:
            logger.error("nobody could be told that the engine died: %s", error)


class StepLoop:
    """Keeps up to `max_inflight_steps` plans with the workers, and the front end informed."""

    def __init__(self, channels: Channels, scheduler: Scheduler, config: EngineConfig) -> None:
        self._channels = channels
        self._scheduler = scheduler
        self._max_inflight = config.max_inflight_steps
        self._timeout_s = config.step_timeout_s
        self._oldest_started = 0.0  # when the oldest plan in flight could begin to run

    def run(self, early_requests: list[ToDriver]) -> None:
        """Returns after a Shutdown. Raises EngineFailure when a worker failed, or was too slow."""
        requests = iter(early_requests)
        while True:
            changed = False
            for request in requests:
                if isinstance(request, AddRequest):
                    self._scheduler.add(request)
                    for message in self._scheduler.take_preparations():
                        self._channels.broadcast(message)
                elif isinstance(request, AbortRequests):
                    self._scheduler.abort(request.request_ids)
                    changed = True
                else:
                    return
            self._plan_ahead()
            self._report([], even_if_empty=changed)
            for reply in self._channels.replies():
                self._take(reply)
            self._channels.poll(self._time_left())
            requests = self._channels.requests()

    def _take(self, reply: FromWorker) -> None:
        if isinstance(reply, GrammarReady):
            self._scheduler.prepared(reply)
            self._plan_ahead()
            self._report([], even_if_empty=False)
        elif isinstance(reply, StepOutput):
            deltas = self._scheduler.update(reply)
            self._oldest_started = time.monotonic()
            self._plan_ahead()  # first the device, then the front end
            self._report(deltas, even_if_empty=True)
        elif isinstance(reply, WorkerFailed):
            raise EngineFailure(f"worker {reply.rank} failed: {reply.message}")

    def _plan_ahead(self) -> None:
        while self._scheduler.num_in_flight < self._max_inflight:
            plan = self._scheduler.schedule()
            if plan is None:
                break
            if self._scheduler.num_in_flight == 1:
                self._oldest_started = time.monotonic()
            self._channels.broadcast(plan)

    def _report(self, deltas: list[RequestDelta], *, even_if_empty: bool) -> None:
        deltas = deltas + self._scheduler.take_failures()
        if deltas or even_if_empty:
            self._channels.send(EngineOutputs(deltas, self._scheduler.stats()))

    def _time_left(self) -> float | None:
        """How long the oldest plan may still take; None when nothing is in flight."""
        if not self._scheduler.num_in_flight:
            self._scheduler.check_integrity()
            return None
        left = self._oldest_started + self._timeout_s - time.monotonic()
        if left <= 0:
            raise EngineFailure(f"a step took longer than step_timeout_s = {self._timeout_s:g}: a worker hangs")
        return left
