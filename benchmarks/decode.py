"""Decode steps of the offline engine, by batch, context and drafts, beside the least time that the card allows.

    python benchmarks/decode.py v2-lite --batch 1 8 64 --context 1024 [--drafts 0 1] [--json FILE]

The model is a preset (random weights made in place, unless --folder says where `random_checkpoint.py` wrote it) or a
checkpoint's folder. Every sequence has its own random prompt; a figure is the median time from one step's tokens to the
next, as the front end sees them, over --steps steps in which all sequences decode, after the last prompt was read.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from presets import PRESETS
from pydantic import ValidationError
from roofline import Card, Step, config_of, floor_seconds, step_parts

from configs.base import ConfigError, explain
from configs.engine import EngineConfig
from serve.engine import AsyncEngine
from serve.errors import EngineDeadError
from serve.hosting import EnginePlan, LocalHost
from workers.step import SamplingParams


class Arrival(NamedTuple):
    """Tokens of one sequence that came together."""

    at: float  # time.perf_counter()
    tokens: int


class Course:
    """When tokens of each of `batch` sequences arrived, until `steps` steps were seen of all together."""

    def __init__(self, batch: int, steps: int) -> None:
        self.streams: list[list[Arrival]] = [[] for _ in range(batch)]
        self._waiting = batch
        self._start = 0.0
        self._left = steps + 1

    def add(self, index: int, tokens: int) -> None:
        stream, at = self.streams[index], time.perf_counter()
        if self._waiting == 0 and index == 0:
            self._left -= 1
        elif not stream:
            self._waiting -= 1
            self._start = at
        stream.append(Arrival(at, tokens))

    @property
    def is_over(self) -> bool:
        """A step gives tokens to every sequence, so that one of them counts for all."""
        return self._left <= 0

    def together(self, index: int) -> list[Arrival]:
        """A sequence's arrivals after the last sequence's first."""
        return [arrival for arrival in self.streams[index] if arrival.at > self._start]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a checkpoint's folder, or {', '.join(PRESETS)}")
    parser.add_argument("--folder", type=Path, help="where the preset's checkpoint is; default: weights are not read")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100, help="that are measured in every case")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="engine settings, values as JSON")
    parser.add_argument("--bandwidth", type=float, default=Card().bandwidth / 1e12, help="TB/s, for the floor")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if args.steps < 1:
        raise SystemExit(f"--steps {args.steps}: give 1 or more")
    for case in itertools.product(args.batch, args.context, args.drafts):
        _floor_ms(args, *case)  # refuses what cannot be before anything starts
    with tempfile.TemporaryDirectory(prefix="shoal-preset-") as made:
        plans = {drafts: _plan(args, Path(made), drafts) for drafts in args.drafts}
        try:
            asyncio.run(bench(args, plans))
        except EngineDeadError as error:
            raise SystemExit(str(error)) from None


async def bench(args: argparse.Namespace, plans: dict[int, EnginePlan]) -> None:
    """Prints a row for every case; `plans`: of the engine for each number of drafts. EngineDeadError if one fails."""
    figures: dict[str, Any] = {
        "model": args.model,
        "date": time.strftime("%Y-%m-%d"),
        **_place(),
        "starts": [],
        "rows": [],
    }
    print(f"{args.model}, {figures['card']}, commit {figures['commit']}\n")
    print(
        "drafts | context | batch | step, ms | p99 | floor, ms | of floor | tokens/s | tokens a step | first token, ms"
    )
    print(" | ".join(["---"] * 10), flush=True)
    for drafts, plan in plans.items():
        begin = time.perf_counter()
        engine = await AsyncEngine.start(plan, LocalHost)
        start = {"drafts": drafts, "start_s": time.perf_counter() - begin, "phases_s": engine.start_seconds}
        figures["starts"].append(start)
        try:
            await _run(engine, 1, 16, 1)
            for context in args.context:
                for batch in args.batch:
                    row = await _measure(engine, args, batch, context, drafts)
                    figures["rows"].append(row)
                    step, p99, floor = row["step_ms"], row["p99_ms"], row["floor_ms"]
                    shown = [drafts, context, batch, f"{step:.3f}", f"{p99:.3f}", f"{floor:.3f}", f"{floor / step:.0%}"]
                    shown += [f"{row['tokens_per_s']:.0f}", f"{row['tokens_a_step']:.2f}", f"{row['ttft_ms']:.1f}"]
                    print(" | ".join(map(str, shown)), flush=True)
        finally:
            await engine.stop()
    print()
    for start in figures["starts"]:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start["phases_s"].items())
        print(f"start with {start['drafts']} drafts: {start['start_s']:.1f} s ({phases})")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


def _plan(args: argparse.Namespace, made: Path, drafts: int) -> EnginePlan:
    """SystemExit with a sentence for what cannot work. `made`: a folder for a preset's config.json."""
    settings: dict[str, Any] = {
        "max_num_seqs": max(args.batch),
        "enable_prefix_caching": False,
        "draft_policy": "fixed",
        "num_draft_tokens": drafts,
        "device": args.device,
        "parallel": {"tp_size": args.tp, "ep_size": args.tp if args.model in PRESETS else 1},
    }
    try:
        for item in args.set:
            name, _, value = item.partition("=")
            settings[name] = json.loads(value)
    except ValueError:
        example = "text in quotes, as in attention_backend='\"triton\"'"
        raise SystemExit(f"--set {item}: write NAME=VALUE with the value as JSON ({example})") from None
    folder = args.folder or Path(args.model)
    if args.folder is None and args.model in PRESETS:
        folder, settings["load_format"] = made, "dummy"
        (folder / "config.json").write_text(json.dumps(PRESETS[args.model]))
    try:
        config = EngineConfig(model=folder, **settings)
        if config.max_model_len is None:
            cases = itertools.product(args.batch, args.context)
            longest = max(context + _num_tokens(config, batch, context, args.steps) for batch, context in cases)
            config = EngineConfig(model=folder, max_model_len=longest, **settings)
        return EnginePlan.make(config)
    except ValidationError as error:
        raise SystemExit(explain(error, where="engine")) from None
    except ConfigError as error:
        raise SystemExit(str(error)) from None


async def _measure(
    engine: AsyncEngine, args: argparse.Namespace, batch: int, context: int, drafts: int
) -> dict[str, float]:
    begin = time.perf_counter()
    course = await _run(engine, batch, context, args.steps)
    whole = time.perf_counter() - begin
    own = course.together(0)
    gaps = sorted(b.at - a.at for a, b in itertools.pairwise(own))
    seen = [a for i in range(batch) for a in course.together(i) if own[0].at < a.at <= own[-1].at]
    step, floor = statistics.median(gaps) * 1e3, _floor_ms(args, batch, context, drafts)
    return {
        "drafts": drafts,
        "context": context,
        "batch": batch,
        "steps": len(gaps),
        "step_ms": step,
        "p99_ms": gaps[int(len(gaps) * 0.99)] * 1e3,
        "floor_ms": floor,
        "of_floor": floor / step,
        "tokens_per_s": sum(arrival.tokens for arrival in seen) / (own[-1].at - own[0].at),
        "tokens_a_step": statistics.mean(arrival.tokens for arrival in seen),
        "ttft_ms": min(stream[0].at for stream in course.streams) * 1e3 - begin * 1e3,
        "whole_s": whole,
    }


def _floor_ms(args: argparse.Namespace, batch: int, context: int, drafts: int) -> float:
    """SystemExit with a sentence for a case that cannot be."""
    parts = step_parts(config_of(str(args.folder or args.model)), Step(batch, context, 1 + drafts), drafts, args.tp)
    return floor_seconds(parts, Card(bandwidth=args.bandwidth * 1e12)) * 1e3


def _num_tokens(config: EngineConfig, batch: int, context: int, steps: int) -> int:
    """That a sequence may make while the others' prompts are read, and in `steps` steps and some more."""
    most = 1 + config.num_draft_tokens
    left = max(1, config.max_num_batched_tokens - batch * most)
    reading = -(-batch * context // left) + batch
    return (reading + steps + 8) * most


async def _run(engine: AsyncEngine, batch: int, context: int, steps: int) -> Course:
    """SystemExit with a sentence if the engine cannot run so many sequences at a time for so long."""
    count = _num_tokens(engine.plan.config, batch, context, steps)
    ready = engine.started
    if context + count > engine.max_model_len:
        raise SystemExit(
            f"--batch {batch} --context {context} --steps {steps}: sequences may become {context + count} long, "
            f"max_model_len is {engine.max_model_len}: raise or drop it"
        )
    if (need := batch * -(-(context + count) // ready.page_size)) > ready.num_pages:
        raise SystemExit(
            f"--batch {batch} --context {context}: needs {need} pages of the cache, which has {ready.num_pages}: take "
            f"fewer or shorter sequences, or --set kv_cache_bytes={need * ready.page_bytes}"
        )
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    generator = torch.Generator().manual_seed(batch * context)
    course = Course(batch, steps)

    async def stream(index: int, prompt: list[int]) -> None:
        deltas = engine.generate(prompt, params, request_id=f"{batch}-{context}-{index}-{steps}")
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                if delta.error is not None:
                    raise RuntimeError(delta.error)
                if delta.token_ids:
                    course.add(index, len(delta.token_ids))
                if course.is_over:
                    return

    prompts = torch.randint(engine.vocab_size, (batch, context), generator=generator).tolist()
    await asyncio.gather(*(stream(i, prompt) for i, prompt in enumerate(prompts)))
    if not course.is_over:
        raise SystemExit(
            f"--batch {batch} --context {context}: the sequences did not decode together for {steps} steps"
        )
    return course


def _place() -> dict[str, str]:
    """Card and commit that the figures are of."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"card": card, "commit": git.stdout.strip() or "unknown", "torch": torch.__version__}


if __name__ == "__main__":
    main()
