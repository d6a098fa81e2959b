"""Many streams at a time, cut off at random, for minutes: what a server holds must come back to where it was.

    python benchmarks/soak.py examples/tiny-model --streams 256 --seconds 120

Starts `shoal serve`, warms it with a first, shorter round, soaks it, waits until it is idle, and prints what ran, then
slots, pages, open files and memory before and after. Exit status 1 when slots, pages or files did not come back.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp

from configs.engine import EngineConfig
from serve.bench.requests import BenchRequest, Endpoint
from serve.bench.server import serving

_IDLE_S = 30.0
_GAUGES = ("shoal_num_requests_running", "shoal_num_requests_waiting", "shoal_kv_cache_usage_perc")
_WARM_SHARE = 0.5  # of the soak's duration
_FILES_SLACK = 8  # sockets of the probes themselves, and of Ray's


def main() -> int:
    """Parses flags and runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = EngineConfig.model_validate(
        {
            "model": args.model,
            "parallel": {"tp_size": args.tp},
            "num_draft_tokens": args.num_draft_tokens,
        }
    )
    return asyncio.run(_run(args, config))


async def _run(args: argparse.Namespace, config: EngineConfig) -> int:
    chance = random.Random(args.seed)
    async with serving(config) as (session, endpoint, pid):
        await _soak(session, endpoint, args.streams, args.seconds * _WARM_SHARE, chance)
        before = await _held(session, endpoint, pid)
        outcomes = await _soak(session, endpoint, args.streams, args.seconds, chance)
        after = await _held(session, endpoint, pid)
    print(f"seed {args.seed}: {args.streams} streams for {args.seconds:.0f} s: {dict(outcomes)}")
    print(f"{'':>28}{'before':>12}{'after':>12}")
    for name in before:
        print(f"{name:>28}{before[name]:>12.0f}{after[name]:>12.0f}")
    leaks = [name for name in _GAUGES if after[name]]
    leaks += [name for name in after if name.endswith("files") and after[name] > before[name] + _FILES_SLACK]
    if leaks or set(outcomes) - {"whole", "cut off"}:
        print(f"not as it was: {', '.join(leaks) or 'some requests failed'}", file=sys.stderr)
        return 1
    return 0


async def _soak(
    session: aiohttp.ClientSession, endpoint: Endpoint, streams: int, seconds: float, chance: random.Random
) -> Counter[str]:
    """Keeps `streams` requests in flight for so long; half of them hang up somewhere -> how many ended how."""
    end = time.monotonic() + seconds
    outcomes: Counter[str] = Counter()

    async def client() -> None:
        while time.monotonic() < end:
            outcomes[await _one(session, endpoint, chance)] += 1

    clients = [asyncio.create_task(client()) for _ in range(streams)]
    while not all(task.done() for task in clients):
        await asyncio.wait(clients, timeout=10)
        print(f"{sum(outcomes.values())} requests, {max(0.0, end - time.monotonic()):.0f} s to go", file=sys.stderr)
    for task in clients:
        task.result()
    return outcomes


async def _one(session: aiohttp.ClientSession, endpoint: Endpoint, chance: random.Random) -> str:
    """-> "whole", "cut off", or what went wrong."""
    request = BenchRequest([chance.randrange(3, 1000) for _ in range(chance.randrange(1, 64))], chance.randrange(1, 64))
    hang_up_at = chance.randrange(request.output_len) if chance.random() < 0.5 else None
    body = endpoint.body(request)
    if hang_up_at == 0:  # before there is an answer at all, whole or streamed
        body |= chance.choice([{}, {"stream": False, "stream_options": None}])
        try:
            async with asyncio.timeout(chance.random()), session.post(endpoint.url, json=body) as response:
                await response.read()
        except TimeoutError:
            return "cut off"
        return "whole" if response.status == 200 else f"HTTP {response.status}"
    async with session.post(endpoint.url, json=body) as response:
        if response.status != 200:
            return f"HTTP {response.status}"
        parts, last = 0, b""
        async for line in response.content:
            if line.startswith(b"data: "):
                parts, last = parts + 1, line
                if "error" in (json.loads(line[6:]) if line != b"data: [DONE]\n" else {}):
                    return "error in a stream"
            if hang_up_at is not None and parts >= hang_up_at:
                return "cut off"
    return "whole" if last == b"data: [DONE]\n" else "ended early"


async def _held(session: aiohttp.ClientSession, endpoint: Endpoint, pid: int) -> dict[str, float]:
    """Waits until the server is idle, at most _IDLE_S -> its gauges, and files and memory of its processes."""
    deadline = time.monotonic() + _IDLE_S
    while True:
        async with session.get(f"{endpoint.base_url}/metrics") as response:
            series = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
        held = {name: float(next(v for k, v in series.items() if k.startswith(f"{name}{{"))) for name in _GAUGES}
        if not any(held.values()) or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(2)  # sockets close after their requests
    for name, process in sorted((name, process) for process in _descendants(pid) if (name := _role(process))):
        held[f"{name} files"] = held.get(f"{name} files", 0) + len(os.listdir(f"/proc/{process}/fd"))
        status = Path(f"/proc/{process}/status").read_text()
        kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        held[f"{name} MiB"] = held.get(f"{name} MiB", 0) + kib / 1024
    return held


def _role(pid: int) -> str | None:
    """What is watched: the replica, its driver and workers, the proxy."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    marks = {
        b"ray::ServeReplica": "replica",
        b"ray::DriverActor": "driver",
        b"ray::Worker": "worker",
        b"ray::ProxyActor": "proxy",
        b"haproxy": "haproxy",
    }
    return next((name for mark, name in marks.items() if mark in command), None)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, rest = [], [pid]
    while rest:
        found += (below := children.get(rest.pop(), []))
        rest += below
    return found


if __name__ == "__main__":
    sys.exit(main())
