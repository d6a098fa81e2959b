"""Hosts an engine in Ray actors: one driver beside the front end, one worker for each rank, in one placement group.

Ray places, starts, watches and kills; steps go over ZeroMQ. A lost worker is never restarted alone: its peers hold a
broken communicator, so the whole engine is replaced.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from configs.base import ConfigError
from configs.engine import EngineConfig, ServeConfig
from serve.driver.channels import Endpoints
from serve.driver.driver import Driver
from serve.hosting import EnginePlan, IpcFolder
from workers.worker import Worker, WorkerSpec

_STOP_TIMEOUT_S = 5.0


def ray_device(config: EngineConfig) -> str:
    """The device type of workers of this cluster; `auto` takes GPUs when the cluster has any."""
    if config.device == "auto":
        return "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
    return config.device


def placement_bundles(config: ServeConfig, device: str) -> list[dict[str, float]]:
    """Bundle 0 is the replica's (and driver's); the others are the ranks'."""
    worker = {"CPU": config.deployment.cpus_per_worker} | ({"GPU": 1.0} if device == "cuda" else {})
    return [{"CPU": config.deployment.cpus_per_replica}, *([worker] * config.engine.parallel.tp_size)]


class DriverActor:
    """The driver in a process of its own, on the front end's node."""

    def __init__(self, config: str, max_model_len: int, ipc_dir: str, host: str | None) -> None:
        self._driver = Driver(EngineConfig.model_validate_json(config), max_model_len, ipc_dir, host)

    def endpoints(self) -> Endpoints:
        return self._driver.endpoints

    def run(self) -> None:
        """Blocks until the engine ends."""
        self._driver.run()


class RayHost:
    """Driver and workers as actors in `group`, whose bundle 0 holds the calling process.

    `on_death(message)` is called from a thread when one of them ends before `stop`.
    """

    def __init__(
        self, plan: EnginePlan, on_death: Callable[[str], object], *, group: PlacementGroup, device: str
    ) -> None:
        self._on_death = on_death
        self._stopping = False
        self._ipc_dir = IpcFolder()
        ranks = range(plan.config.parallel.tp_size)
        self._workers = [self._actor(Worker, group, 1 + rank, group.bundle_specs[1 + rank]).remote() for rank in ranks]
        here = ray.util.get_node_ip_address()
        addresses = ray.get([worker.node_address.remote() for worker in self._workers])
        one_node = set(addresses) == {here}
        self._driver = self._actor(DriverActor, group, 0, {}).remote(
            plan.config.model_dump_json(), plan.max_model_len, str(self._ipc_dir.path), None if one_node else here
        )
        self._endpoints: Endpoints = ray.get(self._driver.endpoints.remote())
        rendezvous = self._ipc_dir.rendezvous
        if not one_node:
            rendezvous = ray.get(self._workers[0].free_rendezvous.remote(addresses[0]))
        self._runs = {self._driver.run.remote(): "the driver"}
        for rank, (worker, address) in enumerate(zip(self._workers, addresses, strict=True)):
            transport = 0 if address == here else 1  # ipc on the driver's node, else tcp
            spec = WorkerSpec(
                config=plan.config.model_dump_json(),
                max_model_len=plan.max_model_len,
                rank=rank,
                device="cuda:0" if device == "cuda" else "cpu",
                steps=self._endpoints.steps[transport],
                replies=self._endpoints.replies[transport],
                rendezvous=rendezvous,
            )
            self._runs[worker.run.remote(spec)] = f"worker {rank}"
        threading.Thread(target=self._watch, name="shoal-watch", daemon=True).start()

    @property
    def endpoints(self) -> Endpoints:
        return self._endpoints

    def stop(self, *, graceful: bool) -> None:
        self._stopping = True
        ray.wait(list(self._runs), num_returns=len(self._runs), timeout=_STOP_TIMEOUT_S if graceful else 0)
        for actor in (self._driver, *self._workers):
            ray.kill(actor)
        self._ipc_dir.remove()

    @staticmethod
    def _actor(kind: type, group: PlacementGroup, bundle: int, resources: dict[str, float]) -> Any:
        return ray.remote(kind).options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            max_restarts=0,
            max_task_retries=0,
        )

    def _watch(self) -> None:
        done, _ = ray.wait(list(self._runs), num_returns=1)
        if self._stopping:
            return
        cause = "ended"
        try:
            ray.get(done[0])
        except Exception as error:
            cause = f"died ({type(error).__name__})"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._on_death(f"{self._runs[done[0]]} {cause}")


def preflight(config: ServeConfig, device: str) -> None:
    """Raises ConfigError when the cluster, as it is now, can never place the engines."""
    total = ray.cluster_resources()
    wanted: dict[str, float] = {}
    for bundle in placement_bundles(config, device) * config.deployment.num_replicas:
        for resource, amount in bundle.items():
            wanted[resource] = wanted.get(resource, 0) + amount
    short = [f"{need:g} {name} of {total.get(name, 0):g}" for name, need in wanted.items() if total.get(name, 0) < need]
    if short:
        raise ConfigError(
            f"num_replicas {config.deployment.num_replicas} with tp_size {config.engine.parallel.tp_size} on {device} "
            f"needs {', '.join(short)} in the cluster: start Ray with more (ray start --num-cpus N --num-gpus M), or "
            "lower tp_size, num_replicas, cpus_per_worker or cpus_per_replica"
        )
