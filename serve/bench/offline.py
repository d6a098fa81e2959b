"""Latency and throughput of the engine without a server."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from configs.base import ConfigError
from serve.bench.load import random_prompts
from serve.llm import LLM
from workers.step import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def latency(
    llm: LLM, batch_size: int, input_len: int, output_len: int, iterations: int, warmups: int
) -> dict[str, Any]:
    """How long a batch of random prompts takes from its submission to its last token, in seconds; every iteration has
    other prompts, so that no prefix is cached. Raises ConfigError for lengths that the context does not hold."""
    _check_lengths(llm, input_len, output_len)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    taken = []
    for i in range(warmups + iterations):
        prompts = _prompts(llm, batch_size, input_len, seed=i)
        begin = time.perf_counter()
        llm.generate(prompts, params)
        if i >= warmups:
            taken.append(time.perf_counter() - begin)
    return {
        "avg_latency": float(np.mean(taken)),
        "latencies": taken,
        "percentiles": {str(p): float(np.percentile(taken, p)) for p in PERCENTILES},
    }


def throughput(llm: LLM, num_prompts: int, input_len: int, output_len: int) -> dict[str, Any]:
    """Random prompts, all submitted at once, after a few to warm up. Raises ConfigError like `latency`."""
    _check_lengths(llm, input_len, output_len)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    llm.generate(_prompts(llm, min(num_prompts, 4), input_len, seed=1), params)
    prompts = _prompts(llm, num_prompts, input_len, seed=0)
    begin = time.perf_counter()
    done = llm.generate(prompts, params)
    elapsed = time.perf_counter() - begin
    output = sum(len(completion.token_ids) for completion in done)
    total = output + num_prompts * input_len
    return {
        "elapsed_time": elapsed,
        "num_requests": num_prompts,
        "total_num_tokens": total,
        "requests_per_second": num_prompts / elapsed,
        "tokens_per_second": total / elapsed,
        "output_tokens_per_second": output / elapsed,
    }


def _check_lengths(llm: LLM, input_len: int, output_len: int) -> None:
    longest = llm.plan.max_model_len
    if input_len + output_len > longest:
        raise ConfigError(
            f"--input-len {input_len} and --output-len {output_len} exceed the model's context of {longest} tokens: "
            "lower one of them"
        )


def _prompts(llm: LLM, count: int, input_len: int, seed: int) -> Sequence[list[int]]:
    requests = random_prompts(count, input_len, 0, llm.plan.model.vocab_size, seed)
    return [list(request.prompt) for request in requests if not isinstance(request.prompt, str)]
