"""Figures of a benchmark, under the names that vLLM's `bench serve` writes."""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from serve.bench.requests import Record

METRICS = ("ttft", "tpot", "itl", "e2el")
_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token (after the first)",
    "itl": "between parts of the stream",
    "e2el": "whole request",
}


def summarise(
    records: Sequence[Record], duration: float, percentiles: Sequence[float], goodput: dict[str, float]
) -> dict[str, Any]:
    """Statistics of the completed requests; `goodput`: limits in ms by metric (ttft, tpot, e2el), all of which a good
    request keeps. Metrics that nothing was measured of are 0."""
    done = [record for record in records if not record.error]
    tokens_in, tokens_out = sum(r.input_tokens for r in done), sum(r.output_tokens for r in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(done) / duration,
        "request_goodput": sum(_is_good(r, goodput) for r in done) / duration if goodput else None,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
    }
    for name, values in _measured(done).items():
        data = np.array(values or [0.0]) * 1e3
        result |= {f"mean_{name}_ms": data.mean(), f"median_{name}_ms": np.median(data), f"std_{name}_ms": data.std()}
        for percentile in percentiles:
            result[f"p{percentile:g}_{name}_ms"] = np.percentile(data, percentile)
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in result.items()}


def details(records: Sequence[Record]) -> dict[str, Any]:
    """What was measured of each request, in order; times in seconds."""
    return {
        "input_lens": [record.input_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "start_times": [record.start for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itls for record in records],
        "errors": [record.error for record in records],
    }


def header(model: str, num_prompts: int, rate: float, concurrency: int | None, path: str) -> dict[str, Any]:
    """How it was measured."""
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if path.endswith("chat/completions") else "openai",
        "model_id": model,
        "num_prompts": num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "max_concurrency": concurrency,
    }


def table(result: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """For people; without the times if no metrics are asked for."""
    lines = [
        f"requests     {result['completed']} done, {result['failed']} failed, in {result['duration']:.2f} s",
        f"tokens       {result['total_input_tokens']} in, {result['total_output_tokens']} out",
        f"throughput   {result['request_throughput']:.2f} requests/s, {result['output_throughput']:.1f} tokens/s out, "
        f"{result['total_token_throughput']:.1f} in and out",
    ]
    if result["request_goodput"] is not None:
        lines.append(f"goodput      {result['request_goodput']:.2f} requests/s")
    if not metrics:
        return "\n".join(lines)
    shown = ["mean", "median", *(f"p{percentile:g}" for percentile in percentiles)]
    lines.append(f"\n{'ms':<40}" + "".join(f"{name:>10}" for name in shown))
    for name in metrics:
        cells = "".join(f"{result[f'{statistic}_{name}_ms']:>10.2f}" for statistic in shown)
        lines.append(f"{_TITLES[name]:<40}{cells}")
    return "\n".join(lines)


def _measured(done: Sequence[Record]) -> dict[str, list[float]]:
    return {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done if record.tpot is not None],
        "itl": [itl for record in done for itl in record.itls],
        "e2el": [record.latency for record in done],
    }


def _is_good(record: Record, goodput: dict[str, float]) -> bool:
    values = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
    return all(values[name] * 1e3 <= limit for name, limit in goodput.items())
