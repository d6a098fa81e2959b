"""What hosts an engine's driver and workers: this process and local children here, Ray actors in `serve.ray_host`."""

import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from configs.base import ConfigError
from configs.engine import EngineConfig
from configs.hf import load_model_config
from configs.model import ModelConfig
from serve.driver.channels import Endpoints
from serve.driver.driver import Driver
from workers.worker import WorkerSpec

_STOP_TIMEOUT_S = 5.0
_LONGEST_PARENT = 70


@dataclass(frozen=True)
class EnginePlan:
    """A checked engine: what must hold before a process is started or a device taken."""

    config: EngineConfig
    model: ModelConfig
    max_model_len: int

    @classmethod
    def make(cls, config: EngineConfig) -> "EnginePlan":
        """Raises ConfigError for what cannot work: unknown architecture, indivisible dimensions, too long a context."""
        model = load_model_config(config.model)
        model.check_parallel(config.parallel.tp_size, config.parallel.ep_size)
        model.check_drafts(config.num_draft_tokens)
        longest = model.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > longest:
            raise ConfigError(
                f"max_model_len ({config.max_model_len}) exceeds {longest}, max_position_embeddings of "
                f"{config.model.name}: use at most {longest}"
            )
        return cls(config, model, config.max_model_len or longest)


class Host(Protocol):
    """A running driver with its workers."""

    @property
    def endpoints(self) -> Endpoints:
        """Where the front end connects."""

    def stop(self, *, graceful: bool) -> None:
        """Ends what is still running: when graceful after some seconds (the driver was sent Shutdown), else at once."""


HostFactory = Callable[[EnginePlan, Callable[[str], object]], Host]


class IpcFolder:
    """A new folder for an engine's sockets, removed at the latest when the process ends in an orderly way."""

    def __init__(self) -> None:
        # A socket's path may have about 100 characters, which some TMPDIRs exceed.
        parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_PARENT else "/tmp"
        self.path = Path(tempfile.mkdtemp(prefix="shoal-", dir=parent))
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    @property
    def rendezvous(self) -> str:
        """A torch.distributed init_method for ranks on this node."""
        return f"file://{self.path / 'rendezvous'}"


class LocalHost:
    """The driver in a thread, each worker in a child process. One node.

    `on_death(message)` is called from a thread when a worker exits before `stop`.
    """

    def __init__(self, plan: EnginePlan, on_death: Callable[[str], object]) -> None:
        device = local_device(plan.config)
        self._on_death = on_death
        self._stopping = False
        self._ipc_dir = IpcFolder()
        self._driver = Driver(plan.config, plan.max_model_len, str(self._ipc_dir.path), None)
        self._driver_thread = threading.Thread(target=self._driver.run, name="shoal-driver", daemon=True)
        self._driver_thread.start()
        self._workers = [self._spawn(plan, rank, device) for rank in range(plan.config.parallel.tp_size)]
        for rank, process in enumerate(self._workers):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    @property
    def endpoints(self) -> Endpoints:
        return self._driver.endpoints

    def stop(self, *, graceful: bool) -> None:
        self._stopping = True
        self._driver_thread.join(_STOP_TIMEOUT_S)
        for process in self._workers:
            try:
                process.wait(_STOP_TIMEOUT_S if graceful else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._ipc_dir.remove()

    def _spawn(self, plan: EnginePlan, rank: int, device: str) -> subprocess.Popen[bytes]:
        spec = WorkerSpec(
            config=plan.config.model_dump_json(),
            max_model_len=plan.max_model_len,
            rank=rank,
            device=f"cuda:{rank}" if device == "cuda" else "cpu",
            steps=self.endpoints.steps[0],
            replies=self.endpoints.replies[0],
            rendezvous=self._ipc_dir.rendezvous,
        )
        # A session of its own: Ctrl-C reaches the parent alone, which then stops its workers in order.
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.process"], stdin=subprocess.PIPE, start_new_session=True
        )
        if process.stdin is None:
            raise RuntimeError("a worker process has no stdin pipe")
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()
        return process

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._stopping:
            self._on_death(f"worker {rank} exited with status {code}")


def local_device(config: EngineConfig) -> str:
    """The device type of workers on this machine; `auto` takes GPUs when there are any.

    Raises ConfigError when there are fewer GPUs than ranks.
    """
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    device = ("cuda" if gpus else "cpu") if config.device == "auto" else config.device
    if device == "cuda" and gpus < config.parallel.tp_size:
        raise ConfigError(
            f"tp_size {config.parallel.tp_size} needs as many GPUs and this machine has {gpus}: "
            "lower tp_size, or use device cpu"
        )
    return device
