"""One Ray session for the suite, with the shipped model served on two tensor-parallel workers."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve as ray_serve

from serve.app import build

APPLICATION = "shoal-test"
MODEL = "shoal-tiny"


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str

    def metric(self, name: str) -> float:
        """The value of one series of /metrics."""
        text = httpx.get(f"{self.url}/metrics").text
        (line,) = (line for line in text.splitlines() if line.startswith(f"{name}{{"))
        return float(line.rsplit(" ", 1)[1])


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[Server]:
    """Deployed once; tests that break it wait until it is whole again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(
        num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False, object_store_memory=80 << 20
    )
    ray_serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    args = {
        "engine": {
            "model": str(tiny_model),
            "device": "cpu",
            "parallel": {"tp_size": 2},
            "kv_cache_bytes": 96 << 20,
            "num_draft_tokens": 2,
            "max_model_len": 768,
            "max_num_seqs": 16,
        },
        "served_model_name": MODEL,
        "tool_call_parser": "glm",  # whose tags are few tokens of this vocabulary
        "deployment": {"graceful_shutdown_timeout_s": 5},
    }
    ray_serve.run(build(args), name=APPLICATION, route_prefix="/")
    yield Server(f"http://127.0.0.1:{port}")
    ray_serve.shutdown()
    ray.shutdown()
