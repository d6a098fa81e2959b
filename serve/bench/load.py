"""Prompts for a benchmark, and their arrival."""

import asyncio
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from configs.base import ConfigError
from serve.bench.requests import BenchRequest, Record

_PROGRESS_S = 1.0


def random_prompts(count: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> list[BenchRequest]:
    """Prompts of random token ids, each another."""
    numbers = random.Random(seed)
    return [BenchRequest([numbers.randrange(vocab_size) for _ in range(input_len)], output_len) for _ in range(count)]


def random_words(count: int, num_words: int, output_len: int, seed: int) -> list[BenchRequest]:
    """Texts of random short words, for endpoints that take no token ids."""
    numbers = random.Random(seed)
    return [
        BenchRequest(" ".join("".join(numbers.choices("aeioulmnrst", k=4)) for _ in range(num_words)), output_len)
        for _ in range(count)
    ]


def read_prompts(path: Path, count: int, output_len: int) -> list[BenchRequest]:
    """JSON lines {"prompt": ..., "output_len": ...}, from the start again if there are too few."""
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            value = json.loads(line)
            requests.append(BenchRequest(str(value["prompt"]), int(value.get("output_len", output_len))))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f'{path}, line {number}: must be JSON like {{"prompt": "...", "output_len": 64}}'
            ) from None
    if not requests:
        raise ConfigError(f"{path} holds no prompts")
    return list(itertools.islice(itertools.cycle(requests), count))


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which requests are sent: a Poisson process of `rate` a second, or all at once."""
    if math.isinf(rate):
        return [0.0] * count
    numbers = random.Random(seed)
    return list(itertools.accumulate(numbers.expovariate(rate) for _ in range(count)))


async def run_load(
    send_one: Callable[[BenchRequest], Awaitable[Record]],
    requests: Sequence[BenchRequest],
    times: Sequence[float],
    max_concurrency: int | None,
) -> tuple[list[Record], float]:
    """Sends all requests by `send_one` and waits for them -> their records, in order, and the whole duration in
    seconds. Cancelled (Ctrl-C) it returns what has ended."""
    limit = asyncio.Semaphore(max_concurrency or len(requests))
    begin = time.perf_counter()

    async def one(request: BenchRequest, at: float) -> Record:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        async with limit:
            return await send_one(request)

    tasks = [asyncio.create_task(one(request, at)) for request, at in zip(requests, times, strict=True)]
    progress = asyncio.create_task(_show_progress(tasks))
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        print("\nstopped; of what has ended:", file=sys.stderr)
    duration = time.perf_counter() - begin
    ended = [task for task in tasks if task.done() and not task.cancelled()]
    for task in (*tasks, progress):
        task.cancel()
    await asyncio.gather(*tasks, progress, return_exceptions=True)
    return [task.result() for task in ended], duration


async def _show_progress(tasks: Sequence["asyncio.Task[Record]"]) -> None:
    while sys.stderr.isatty():
        done = sum(task.done() for task in tasks)
        print(f"\r{done} of {len(tasks)} requests done", end="", file=sys.stderr, flush=True)
        await asyncio.sleep(_PROGRESS_S)
