"""What HTTP costs: the same load on the engine alone and on `shoal serve`, one after the other."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from configs.base import ConfigError
from configs.engine import ServeConfig
from serve.bench import load, summary
from serve.bench.requests import BenchRequest, Record, send
from serve.bench.server import serving
from serve.engine import AsyncEngine
from serve.hosting import EnginePlan, LocalHost
from workers.step import SamplingParams

Send = Callable[[BenchRequest], Awaitable[Record]]

_WARMUPS = 4
_METRICS = ("ttft", "tpot")


def measure(
    engine: dict[str, Any], concurrencies: Sequence[int], requests_each: int, input_len: int, output_len: int
) -> dict[str, Any]:
    """For each number of streams at a time: medians in ms of the time to the first token and of that per further token,
    from the engine alone, over HTTP, and their difference. `engine`: fields of EngineConfig that `shoal serve` has
    flags for, but for prefix caching, which is off. Raises ConfigError for settings that cannot work, lengths that do
    not fit and a server that does not start."""
    config = ServeConfig.from_args({"engine": {**engine, "enable_prefix_caching": False}})
    plan = EnginePlan.make(config.engine)
    if input_len + output_len > plan.max_model_len:
        raise ConfigError(
            f"--input-len {input_len} and --output-len {output_len} exceed max_model_len ({plan.max_model_len})"
        )
    loads = [
        load.random_prompts(count * requests_each, input_len, output_len, plan.model.vocab_size, seed=count)
        for count in concurrencies
    ]
    return asyncio.run(_measure(plan, concurrencies, loads))


def table(result: dict[str, Any]) -> str:
    """For people."""
    head = f"{'streams':>8}" + "".join(
        f"{f'{metric} {what}':>14}" for metric in _METRICS for what in ("alone", "HTTP", "added")
    )
    lines = ["medians in ms", head + f"{'tokens/s HTTP':>16}"]
    for row in result["rows"]:
        cells = "".join(
            f"{value:>14.3f}"
            for metric in _METRICS
            for value in (row[f"{metric}_alone_ms"], row[f"{metric}_http_ms"], row[f"{metric}_added_ms"])
        )
        lines.append(f"{row['streams']:>8}{cells}{row['http_tokens_per_s']:>16.0f}")
    return "\n".join(lines)


async def _measure(
    plan: EnginePlan, concurrencies: Sequence[int], loads: Sequence[list[BenchRequest]]
) -> dict[str, Any]:
    engine = await AsyncEngine.start(plan, LocalHost)
    try:
        alone = await _run(partial(_generate, engine), concurrencies, loads)
    finally:
        await engine.stop()
    async with serving(plan.config) as (session, endpoint, _):
        http = await _run(partial(send, session, endpoint), concurrencies, loads)
    rows = []
    for streams, one, other in zip(concurrencies, alone, http, strict=True):
        row = {"streams": streams, "http_tokens_per_s": other["output_throughput"]}
        for metric in _METRICS:
            before, after = one[f"median_{metric}_ms"], other[f"median_{metric}_ms"]
            row |= {f"{metric}_alone_ms": before, f"{metric}_http_ms": after, f"{metric}_added_ms": after - before}
        rows.append(row)
    return {"model": plan.config.model.name, "rows": rows}


async def _run(
    send_one: Send, concurrencies: Sequence[int], loads: Sequence[list[BenchRequest]]
) -> list[dict[str, Any]]:
    figures = []
    for streams, requests in zip(concurrencies, loads, strict=True):
        warm = [BenchRequest([2 + i] * 8, 8) for i in range(_WARMUPS)]
        await load.run_load(send_one, warm, [0.0] * _WARMUPS, streams)
        records, duration = await load.run_load(send_one, requests, [0.0] * len(requests), streams)
        if failed := [record.error for record in records if record.error]:
            raise ConfigError(f"{len(failed)} of {len(records)} requests failed, the first with: {failed[0]}")
        figures.append(summary.summarise(records, duration, (), {}))
    return figures


async def _generate(engine: AsyncEngine, request: BenchRequest) -> Record:
    """As `send` does, without a server."""
    record = Record(start=time.perf_counter(), input_tokens=len(request.prompt))
    params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
    stream = engine.generate(list(map(int, request.prompt)), params, request_id=f"overhead-{id(record)}-{record.start}")
    async for delta in stream:
        if delta.error is not None:
            record.error = delta.error
        elif delta.token_ids:
            record.latency = time.perf_counter() - record.start
            record.ttft = record.ttft or record.latency
            record.output_tokens += len(delta.token_ids)
    return record
