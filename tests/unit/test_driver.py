"""The driver over its real sockets, with threads as workers and the test as front end."""

import itertools
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from configs.engine import PAGE_SIZE, EngineConfig
from serve.driver.channels import Channels, Endpoints
from serve.driver.driver import Driver
from serve.driver.messages import (
    AbortRequests,
    AddRequest,
    EngineDead,
    EngineOutputs,
    EngineReady,
    FromDriver,
    Shutdown,
    StartupProgress,
    ToDriver,
)
from tests.fake_workers import FakeWorker, expected_output
from workers.step import (
    FromWorker,
    Loaded,
    Loading,
    Ready,
    SamplingParams,
    StartCache,
    StepOutput,
    StepPlan,
    Stop,
    ToWorker,
    WorkerFailed,
)

MAX_MODEL_LEN = 300
WAIT_MS = 20_000
NUM_PROGRESS = 50  # messages of a rank while it loads


class WorkerThread(threading.Thread):
    """A rank: greets, then answers plans by `execute` (rank 0 only) until Stop. Keeps what it was sent."""

    def __init__(
        self,
        endpoints: Endpoints,
        rank: int,
        num_pages: int,
        execute: Callable[[FakeWorker, StepPlan], FromWorker | None],
        *,
        tcp: bool = False,
    ) -> None:
        super().__init__(daemon=True)
        self.rank, self.num_pages, self.execute = rank, num_pages, execute
        self.steps, self.replies = endpoints.steps[tcp], endpoints.replies[tcp]
        self.received: list[ToWorker] = []

    def run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as steps, context.socket(zmq.PUSH) as replies:
            replies.linger = 1000
            steps.subscribe(b"")
            steps.connect(self.steps)
            replies.connect(self.replies)
            seconds = {"read": 1.0 + self.rank}
            for done in range(NUM_PROGRESS):
                replies.send(msgspec.msgpack.encode(Loading(self.rank, done + 1, NUM_PROGRESS)))
            replies.send(msgspec.msgpack.encode(Loaded(self.rank, self.num_pages, 1000, seconds)))
            worker: FakeWorker | None = None
            while True:
                message = msgspec.msgpack.decode(steps.recv(), type=ToWorker)
                self.received.append(message)
                if isinstance(message, Stop):
                    return
                if isinstance(message, StartCache):
                    worker = FakeWorker(message.num_pages, 4, 100)
                    replies.send(msgspec.msgpack.encode(Ready(self.rank)))
                elif worker is not None and (reply := self.execute(worker, message)) is not None and self.rank == 0:
                    replies.send(msgspec.msgpack.encode(reply))


class FrontEnd:
    """The other end of a running driver."""

    def __init__(self, driver: Driver, workers: list[WorkerThread]) -> None:
        self.driver, self.workers = driver, workers
        self.context = zmq.Context()
        self.requests = self.context.socket(zmq.PUSH)
        self.outputs = self.context.socket(zmq.PULL)
        self.requests.linger = 0
        self.outputs.rcvtimeo = WAIT_MS
        self.requests.connect(driver.endpoints.requests)
        self.outputs.connect(driver.endpoints.outputs)
        self.thread = threading.Thread(target=driver.run, daemon=True)
        self.thread.start()

    def send(self, message: ToDriver) -> None:
        self.requests.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromDriver:
        return msgspec.msgpack.decode(self.outputs.recv(), type=FromDriver)

    def receive_ready(self) -> EngineReady:
        while not isinstance(message := self.receive(), EngineReady):
            assert isinstance(message, StartupProgress)
        return message

    def receive_outputs(self) -> EngineOutputs:
        message = self.receive()
        assert isinstance(message, EngineOutputs)
        return message

    def collect(self, request_ids: set[str]) -> dict[str, tuple[list[int], str | None]]:
        """Tokens and finish reason of each request, once all have ended."""
        tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        reasons: dict[str, str | None] = {}
        while reasons.keys() != request_ids:
            for delta in self.receive_outputs().deltas:
                tokens[delta.request_id] += delta.token_ids
                if delta.finish_reason is not None:
                    reasons[delta.request_id] = delta.finish_reason
        return {request_id: (tokens[request_id], reasons[request_id]) for request_id in request_ids}

    def join(self) -> None:
        self.thread.join(WAIT_MS / 1000)
        assert not self.thread.is_alive()
        for worker in self.workers:
            worker.join(WAIT_MS / 1000)
            assert not worker.is_alive()
            assert worker.received[-1] == Stop()


def make_config(model: Path, **settings: Any) -> EngineConfig:
    (model / "config.json").write_text("{}")
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 100, "step_timeout_s": 20, "start_timeout_s": 20}
    return EngineConfig.model_validate({"model": model} | limits | settings)


@contextmanager
def running(
    execute: Callable[[FakeWorker, StepPlan], FromWorker | None] = FakeWorker.execute,
    *,
    pages: tuple[int, ...] = (20,),
    host: str | None = None,
    missing: int = 0,
    **settings: Any,
) -> Iterator[FrontEnd]:
    """A driver with a worker for each entry of `pages`, `missing` ones too few. Stopped and joined at the end."""
    with tempfile.TemporaryDirectory() as ipc_dir, tempfile.TemporaryDirectory() as model:
        config = make_config(Path(model), parallel={"tp_size": len(pages) + missing}, **settings)
        driver = Driver(config, MAX_MODEL_LEN, ipc_dir, host)
        workers = [
            WorkerThread(driver.endpoints, rank, num_pages, execute, tcp=host is not None and rank % 2 == 1)
            for rank, num_pages in enumerate(pages)
        ]
        front_end = FrontEnd(driver, workers)
        for worker in workers:
            worker.start()
        try:
            yield front_end
            front_end.send(Shutdown())
            front_end.join()
        finally:
            front_end.context.destroy(linger=0)


def request(request_id: str, length: int = 5, **params: Any) -> AddRequest:
    prompt = [(ord(request_id[0]) + 3 * i) % 50 for i in range(length)]
    return AddRequest(request_id, prompt, SamplingParams(**({"temperature": 0, "max_tokens": 10} | params)))


def failing_after(steps: int, reply: Callable[[StepPlan], FromWorker | None]) -> Callable:
    """Executes plans until step `steps`, then answers with `reply`."""

    def execute(worker: FakeWorker, plan: StepPlan) -> FromWorker | None:
        return worker.execute(plan) if plan.step < steps else reply(plan)

    return execute


# ------------------------------------------------------------------------------------------------ start


def test_start_takes_the_smallest_cache_and_the_slowest_rank() -> None:
    with running(pages=(30, 20, 25)) as engine:
        messages = []
        while not messages or not isinstance(messages[-1], EngineReady):
            messages.append(engine.receive())
        assert messages[-1] == EngineReady(20, PAGE_SIZE, 1000, {"read": 3.0})
        assert messages[-2] == StartupProgress(3 * NUM_PROGRESS, 3 * NUM_PROGRESS)
        assert len(messages) < NUM_PROGRESS, "progress is rate limited"
    assert all(worker.received == [StartCache(20), Stop()] for worker in engine.workers)


def test_no_room_for_a_cache_is_a_clear_death() -> None:
    with running(pages=(5, 0)) as engine:
        while not isinstance(message := engine.receive(), EngineDead):
            pass
        assert message.message.startswith("no room for a KV cache beside the weights: raise kv_cache_bytes")


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    with running(missing=1, start_timeout_s=0.3) as engine:
        while not isinstance(message := engine.receive(), EngineDead):
            pass
    assert message.message == (
        "the engine did not start within start_timeout_s = 0.3: ranks [1] have not loaded their weights"
    )


def test_shutdown_while_starting() -> None:
    with running(missing=1) as engine:
        assert engine.receive() == StartupProgress(1, NUM_PROGRESS)


# ------------------------------------------------------------------------------------------------ serving


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_are_answered_and_counted(depth: int) -> None:
    with running(pages=(20, 20), max_inflight_steps=depth) as engine:
        engine.receive_ready()
        requests = [request(name, length) for name, length in (("a", 5), ("b", 130), ("c", 64), ("d", 1), ("e", 70))]
        for item in requests:
            engine.send(item)
        answers = engine.collect({item.request_id for item in requests})
        assert answers == {item.request_id: expected_output(item, MAX_MODEL_LEN) for item in requests}
        engine.send(request("a again", 100, max_tokens=1))
        stats = engine.receive_outputs().stats
        assert (stats.running, stats.waiting, stats.pages_used, stats.pages_total) == (0, 0, 0, 20)
        assert (stats.prompt_tokens, stats.generated_tokens) == (5 + 130 + 64 + 1 + 70 + 100, 51)
        assert (stats.step_seconds, stats.step_tokens) == (0.25, 100)
    assert engine.workers[0].received == engine.workers[1].received


def test_workers_over_tcp_and_ipc_get_the_same_plans() -> None:
    with running(pages=(20, 20), host="127.0.0.1") as engine:
        assert [endpoint.split(":")[0] for endpoint in engine.driver.endpoints.steps] == ["ipc", "tcp"]
        engine.receive_ready()
        engine.send(request("a"))
        assert engine.collect({"a"}) == {"a": expected_output(request("a"), MAX_MODEL_LEN)}
    assert engine.workers[0].received == engine.workers[1].received
    assert len(engine.workers[0].received) == 12


def test_a_step_is_sent_before_the_last_one_is_answered() -> None:
    gate = threading.Semaphore(0)
    seen = threading.Semaphore(0)

    def execute(worker: FakeWorker, plan: StepPlan) -> StepOutput:
        seen.release()
        gate.acquire()
        return worker.execute(plan)

    with running(execute) as engine:
        engine.receive_ready()
        engine.send(request("a", max_tokens=3))
        assert seen.acquire(timeout=WAIT_MS / 1000)
        gate.release()
        engine.receive_outputs()  # of step 0
        for _ in range(2):
            gate.release()
            engine.receive_outputs()
    plans = [message for message in engine.workers[0].received if isinstance(message, StepPlan)]
    assert [(len(plan.chunks), plan.decode) for plan in plans] == [(1, []), (0, [0]), (0, [0])]


def test_requests_sent_before_the_engine_is_ready_are_kept() -> None:
    with running() as engine:
        engine.send(request("a"))
        engine.receive_ready()
        assert engine.collect({"a"}) == {"a": expected_output(request("a"), MAX_MODEL_LEN)}


def test_failures_and_aborts_outside_a_step_are_reported() -> None:
    with running(pages=(1,)) as engine:
        engine.receive_ready()
        engine.send(request("big", 200))
        (delta,) = engine.receive_outputs().deltas
        assert (delta.request_id, delta.finish_reason) == ("big", "error")
        assert "kv_cache_bytes" in delta.error
        engine.send(AbortRequests(["unknown"]))
        outputs = engine.receive_outputs()
        assert (outputs.deltas, outputs.stats.running) == ([], 0)


def test_an_abort_ends_a_running_request_without_a_delta() -> None:
    gate = threading.Semaphore(2)

    def execute(worker: FakeWorker, plan: StepPlan) -> StepOutput:
        gate.acquire()
        return worker.execute(plan)

    with running(execute) as engine:
        engine.receive_ready()
        engine.send(request("a", max_tokens=200))
        assert [len(engine.receive_outputs().deltas) for _ in range(2)] == [1, 1]
        engine.send(AbortRequests(["a"]))
        outputs = engine.receive_outputs()
        assert (outputs.deltas, outputs.stats.running, outputs.stats.pages_used) == ([], 0, 0)
        for _ in range(2):
            gate.release()
            assert engine.receive_outputs().deltas == [], "ghosts"
        engine.send(request("b"))
        for _ in range(20):
            gate.release()
        assert engine.collect({"b"}) == {"b": expected_output(request("b"), MAX_MODEL_LEN)}


def test_an_idle_driver_blocks() -> None:
    polls = itertools.count()
    poll = Channels.poll

    def counting(channels: Channels, timeout_s: float | None) -> None:
        next(polls)
        assert timeout_s is None or timeout_s > 1
        poll(channels, timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channels, "poll", counting)
        with running() as engine:
            engine.receive_ready()
            polls_before = next(polls)
            engine.send(request("a", max_tokens=1))
            engine.receive_outputs()
    assert next(polls) - polls_before < 8


# ------------------------------------------------------------------------------------------------ death


def expect_death(engine: FrontEnd) -> str:
    """Starts, sends a request, and returns the message of the death that follows."""
    engine.receive_ready()
    engine.send(request("a", max_tokens=100))
    while not isinstance(message := engine.receive(), EngineDead):
        assert isinstance(message, EngineOutputs)
    engine.join()
    return message.message


def test_a_step_past_its_deadline_kills_the_engine() -> None:
    with running(failing_after(3, lambda plan: None), step_timeout_s=0.3) as engine:
        assert expect_death(engine) == "a step took longer than step_timeout_s = 0.3: a worker hangs"


def test_the_deadline_is_for_one_step_not_for_all() -> None:
    def execute(worker: FakeWorker, plan: StepPlan) -> StepOutput:
        time.sleep(0.06)
        return worker.execute(plan)

    with running(execute, step_timeout_s=1) as engine:
        engine.receive_ready()
        engine.send(request("a", max_tokens=25))
        assert engine.collect({"a"}) == {"a": expected_output(request("a", max_tokens=25), MAX_MODEL_LEN)}


def test_a_failed_worker_kills_the_engine() -> None:
    with running(failing_after(2, lambda plan: WorkerFailed(0, "out of memory"))) as engine:
        assert expect_death(engine) == "worker 0 failed: out of memory"


def test_an_answer_to_another_step_kills_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with running(failing_after(2, lambda plan: StepOutput(plan.step + 1, [], [], [], 0.0))) as engine:
        assert expect_death(engine) == (
            "internal error in the driver: RuntimeError: a worker answered step 3, expected 2"
        )
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert errors[0].exc_info is not None


def test_a_message_that_is_none_kills_the_engine() -> None:
    with running() as engine:
        engine.receive_ready()
        engine.requests.send(b"\xc1")
        message = engine.receive()
        assert isinstance(message, EngineDead)
        assert message.message.startswith("internal error in the driver: DecodeError: ")


def test_a_folder_too_deep_for_a_socket_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ipc_dir: .*/requests is longer than the \d+ bytes a socket may have"):
        Channels(str(tmp_path / ("x" * 120)), None)


def test_a_driver_that_is_never_run_can_be_closed(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as ipc_dir:
        driver = Driver(make_config(tmp_path), MAX_MODEL_LEN, ipc_dir, None)
        driver.close()
        driver.close()
