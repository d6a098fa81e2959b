"""Bringing the workers from connected to ready."""

import time

from configs.engine import PAGE_SIZE
from serve.driver.channels import Channels
from serve.driver.errors import EngineFailure
from serve.driver.messages import EngineReady, Shutdown, StartupProgress, ToDriver
from workers.step import FromWorker, Loaded, Loading, Ready, StartCache, WorkerFailed

PROGRESS_PERIOD_S = 0.2


class Startup:
    """The handshake: all ranks subscribe and load, the cache size is agreed on, all ranks are ready.

    Raises EngineFailure when a rank fails, when there is no room for a cache, or past the deadline.
    """

    def __init__(self, channels: Channels, *, tp_size: int, timeout_s: float) -> None:
        self._channels = channels
        self._tp_size = tp_size
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._loading: dict[int, Loading] = {}
        self._loaded: dict[int, Loaded] = {}
        self._ready: set[int] = set()
        self._next_progress = 0.0
        self.early_requests: list[ToDriver] = []  # sent before EngineReady

    def run(self) -> EngineReady | None:
        """What to tell the front end; None when it asked for a shutdown meanwhile."""
        while not (self._channels.num_subscribers >= self._tp_size and len(self._loaded) == self._tp_size):
            if not self._step():
                return None
        self._report_progress()
        num_pages = min(rank.num_pages for rank in self._loaded.values())
        if num_pages < 1:
            raise EngineFailure(
                "no room for a KV cache beside the weights: raise kv_cache_bytes (on a GPU: "
                "kv_cache_memory_fraction) or use more ranks"
            )
        self._channels.broadcast(StartCache(num_pages))
        while len(self._ready) < self._tp_size:
            if not self._step():
                return None
        slowest = max(self._loaded.values(), key=lambda rank: sum(rank.seconds.values()))
        page_bytes = max(rank.page_bytes for rank in self._loaded.values())
        return EngineReady(num_pages, PAGE_SIZE, page_bytes, slowest.seconds)

    def _step(self) -> bool:
        """Waits for messages and takes them in; False after a Shutdown."""
        now = time.monotonic()
        if now >= self._deadline:
            raise EngineFailure(self._what_is_missing())
        self._channels.poll(self._deadline - now)
        for reply in self._channels.replies():
            self._take(reply)
        for request in self._channels.requests():
            if isinstance(request, Shutdown):
                return False
            self.early_requests.append(request)
        return True

    def _take(self, reply: FromWorker) -> None:
        if isinstance(reply, Loading):
            self._loading[reply.rank] = reply
            if time.monotonic() >= self._next_progress:
                self._report_progress()
        elif isinstance(reply, Loaded):
            self._loaded[reply.rank] = reply
        elif isinstance(reply, Ready):
            self._ready.add(reply.rank)
        elif isinstance(reply, WorkerFailed):
            raise EngineFailure(f"worker {reply.rank} failed while starting: {reply.message}")
        else:
            raise EngineFailure("a worker answered a step before any was sent")

    def _report_progress(self) -> None:
        if not self._loading:
            return
        self._next_progress = time.monotonic() + PROGRESS_PERIOD_S
        ranks = self._loading.values()
        self._channels.send(StartupProgress(sum(rank.done for rank in ranks), sum(rank.total for rank in ranks)))

    def _what_is_missing(self) -> str:
        ranks = range(self._tp_size)
        if not_loaded := [rank for rank in ranks if rank not in self._loaded]:
            problem = f"ranks {not_loaded} have not loaded their weights"
        elif self._channels.num_subscribers < self._tp_size:
            problem = f"{self._channels.num_subscribers} of {self._tp_size} workers are connected"
        else:
            problem = f"ranks {[rank for rank in ranks if rank not in self._ready]} have not allocated their KV cache"
        return f"the engine did not start within start_timeout_s = {self._timeout_s:g}: {problem}"
