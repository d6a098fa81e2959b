"""A server of its own for a benchmark."""

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from configs.base import ConfigError
from configs.engine import EngineConfig
from serve.bench.requests import Endpoint

_START_S = 600.0


@asynccontextmanager
async def serving(config: EngineConfig) -> AsyncIterator[tuple[aiohttp.ClientSession, Endpoint, int]]:
    """`shoal serve` in a process of its own until the end of the context -> a session, the endpoint of completions
    (end-of-sequence ignored) and the process's id. Of `config`, only what has flags counts; prefixes are not cached.
    Raises ConfigError when it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "serve.cli", "serve", *_serve_flags(config), "--port", str(port)]
    log = Path(tempfile.mkstemp(prefix="shoal-serve-", suffix=".log")[1])
    print(f"starting shoal serve, its output goes to {log} ...", file=sys.stderr)
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as session:
            deadline = time.monotonic() + _START_S
            while not await _is_up(session, url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ConfigError(f"the server did not start: {log} says why")
                await asyncio.sleep(0.5)
            async with session.get(f"{url}/v1/models") as response:
                model = (await response.json())["data"][0]["id"]
            yield session, Endpoint(url, "/v1/completions", model, {}, ignore_eos=True), process.pid
    finally:
        process.terminate()
        process.wait()


def _serve_flags(config: EngineConfig) -> list[str]:
    """What makes `shoal serve` start the same engine."""
    flags = {
        "--model": config.model,
        "--tp": config.parallel.tp_size,
        "--ep": config.parallel.ep_size,
        "--device": config.device,
        "--dtype": config.dtype,
        "--load-format": config.load_format,
        "--max-num-seqs": config.max_num_seqs,
        "--num-draft-tokens": config.num_draft_tokens,
    }
    return [str(part) for flag in flags.items() for part in flag] + ["--no-prefix-caching"]


async def _is_up(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError):
        return False
