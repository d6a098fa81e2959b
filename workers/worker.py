"""A worker: owns one device and one rank's shard, and runs the driver's plans until told to stop.

The class has no base: it is hosted by a Ray actor (one per rank, in one placement group) or by a local process. Ray or
the parent process watches `run`; steps do not go through it but over ZeroMQ.
"""

import logging
import os
import socket
import threading
import time
import traceback
from collections import deque
from functools import partial

import msgspec
import torch
import zmq

from configs.base import ConfigError
from configs.engine import EngineConfig
from configs.hf import load_model_config
from workers import parallel
from workers.result import LaunchedStep
from workers.runner import ModelRunner
from workers.step import (
    FromWorker,
    GrammarReady,
    Loaded,
    Loading,
    PrepareGrammar,
    Ready,
    StartCache,
    StepPlan,
    Stop,
    ToWorker,
    WorkerFailed,
)

logger = logging.getLogger(__name__)

_PROGRESS_PERIOD_S = 0.2


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told when it starts; plain data, so that it crosses processes by any means."""

    config: str  # EngineConfig as JSON
    max_model_len: int
    rank: int
    device: str  # "cpu", or "cuda:0" under Ray (which shows an actor its own card only)
    steps: str  # ZeroMQ address of the plans
    replies: str
    rendezvous: str  # torch.distributed init_method


class Worker:
    """One rank. `run` is called once."""

    def node_address(self) -> str:
        """The address that other nodes reach this worker under."""
        import ray

        return str(ray.util.get_node_ip_address())

    def free_rendezvous(self, host: str) -> str:
        """A torch.distributed init_method on a port that is free on this node."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def run(self, spec: WorkerSpec) -> None:
        """Loads the shard, then runs plans until `Stop`. What goes wrong is told to the driver, then raised."""
        channel = _Channel(spec)
        try:
            _serve(spec, channel)
        except Exception as error:
            known = isinstance(error, ConfigError)
            if not known:
                logger.error("rank %d failed:\n%s", spec.rank, traceback.format_exc())
            channel.send(WorkerFailed(spec.rank, str(error) if known else f"{type(error).__name__}: {error}"))
            raise
        finally:
            channel.close()
            parallel.leave()


class _Channel:
    """Plans in, replies out."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._context = zmq.Context()
        self._plans = self._context.socket(zmq.SUB)
        self._plans.setsockopt(zmq.SUBSCRIBE, b"")
        self._plans.setsockopt(zmq.RCVHWM, 0)
        self._plans.setsockopt(zmq.LINGER, 1000)
        self._plans.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._plans.connect(spec.steps)
        self._address = spec.replies
        self._replies = self._make_push()
        self._from_threads: zmq.Socket[bytes] | None = None
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._encoder = msgspec.msgpack.Encoder()

    def _make_push(self) -> "zmq.Socket[bytes]":
        sock = self._context.socket(zmq.PUSH)
        sock.setsockopt(zmq.LINGER, 1000)
        sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
        sock.connect(self._address)
        return sock

    def receive(self) -> ToWorker:
        """The next message; blocks without spinning."""
        return self._decoder.decode(self._plans.recv())

    def waiting(self) -> bool:
        """Whether `receive` would return at once."""
        return bool(self._plans.poll(0))

    def send(self, message: FromWorker) -> None:
        self._replies.send(self._encoder.encode(message))

    def send_from_thread(self, message: FromWorker) -> None:
        """For other threads than the one that calls the other methods."""
        with self._lock:
            if self._from_threads is None:
                self._from_threads = self._make_push()
            self._from_threads.send(self._encoder.encode(message))

    def close(self) -> None:
        with self._lock:
            self._context.destroy()


def _serve(spec: WorkerSpec, channel: _Channel) -> None:
    runner, seconds = _start(spec, channel)
    channel.send(Loaded(spec.rank, runner.num_pages, runner.layout.page_bytes, seconds))
    running: deque[LaunchedStep] = deque()

    def finish(keep: int) -> None:
        """Finishes the oldest steps until `keep` run."""
        while len(running) > keep:
            output = runner.finish(running.popleft())
            if spec.rank == 0:
                channel.send(output)

    while True:
        if running and (runner.synchronous or not channel.waiting()):
            finish(keep=len(running) - 1)
            continue
        message = channel.receive()
        if isinstance(message, Stop):
            if runner.grammars is not None:
                runner.grammars.compiler.close()
            return
        if isinstance(message, StepPlan):
            # A decode step is launched at once, so that the device has it when the step before ends. One with prefill
            # takes the host long to launch, and no finished step should wait for that.
            finish(keep=1 if not message.chunks else 0)
            running.append(runner.launch(message))
        elif isinstance(message, PrepareGrammar):
            if runner.grammars is not None:
                done = partial(_compiled, channel, message.key)
                runner.grammars.compiler.prepare(message.grammar, done)
        elif isinstance(message, StartCache):
            runner.start_cache(message.num_pages)
            channel.send(Ready(spec.rank))


def _compiled(channel: _Channel, key: int, problem: str | None) -> None:
    channel.send_from_thread(GrammarReady(key, problem))


def _start(spec: WorkerSpec, channel: _Channel) -> tuple[ModelRunner, dict[str, float]]:
    """The loaded runner, and where the time went."""
    config = EngineConfig.model_validate_json(spec.config)
    model_config = load_model_config(config.model)
    begin = time.perf_counter()
    device = _prepare_device(spec, config)
    tp = parallel.init_tensor_parallel(config.parallel, spec.rank, spec.rendezvous, device, config.start_timeout_s)
    joined = time.perf_counter()
    next_report = joined

    def progress(done: int, total: int) -> None:
        nonlocal next_report
        if done == total or time.perf_counter() >= next_report:
            next_report = time.perf_counter() + _PROGRESS_PERIOD_S
            channel.send(Loading(spec.rank, done, total))

    runner = ModelRunner(config, model_config, spec.max_model_len, tp, device, progress)
    loaded = time.perf_counter()
    logger.info(
        "rank %d of %d: %s on %s, %s, cache room for %d pages",
        *(tp.rank, tp.size, runner.dtype, device, runner.backends, runner.num_pages),
    )
    return runner, {"join": joined - begin, "load": loaded - joined}


def _prepare_device(spec: WorkerSpec, config: EngineConfig) -> torch.device:
    device = torch.device(spec.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "device cuda was asked for but torch finds no usable GPU: install torch with CUDA, or use cpu"
            )
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(config.cpu_threads or max(1, (os.cpu_count() or 1) // config.parallel.tp_size))
    return device
