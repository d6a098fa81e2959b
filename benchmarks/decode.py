"""Decode steps of the offline engine, by batch, context and drafts, beside the least time that the card allows.

    python benchmarks/decode.py v2-lite --batch 1 8 64 --context 1024 [--drafts 0 1] [--json FILE]

The model is a preset (random weights made in place, unless --folder says where `random_checkpoint.py` wrote it) or a
checkpoint's folder. Every sequence has its own random prompt; a figure is the median time from one step's tokens to the
next, as the front end sees them, over steps in which all sequences decode.
"""

import argparse
import asyncio
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
from serve.hosting import EnginePlan, LocalHost
from workers.step import SamplingParams


class Arrival(NamedTuple):
    """Tokens of one sequence that came together."""

    at: float  # time.perf_counter()
    tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a checkpoint's folder, or {', '.join(PRESETS)}")
    parser.add_argument("--folder", type=Path, help="where the preset's checkpoint is; default: weights are not read")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100, help="tokens of every sequence")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="engine settings, values as JSON")
    parser.add_argument("--bandwidth", type=float, default=Card().bandwidth / 1e12, help="TB/s, for the floor")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    config_of(str(args.folder or args.model))
    with tempfile.TemporaryDirectory(prefix="shoal-preset-") as made:
        asyncio.run(bench(args, Path(made)))


async def bench(args: argparse.Namespace, made: Path) -> None:
    """Prints a row for every case; `made`: an empty folder for a preset's config.json."""
    figures: dict[str, Any] = {"model": args.model, "date": time.strftime("%Y-%m-%d"), **_place(), "rows": []}
    print(f"{args.model}, {figures['card']}, commit {figures['commit']}\n")
    print(
        "drafts | context | batch | step, ms | p99 | floor, ms | of floor | tokens/s | tokens a step | first token, ms"
    )
    print(" | ".join(["---"] * 10), flush=True)
    for drafts in args.drafts:
        begin = time.perf_counter()
        engine = await AsyncEngine.start(_plan(args, made, drafts), LocalHost)
        figures["start_s"] = time.perf_counter() - begin
        figures["phases_s"] = engine.start_seconds
        try:
            await _run(engine, 1, 16, 4)
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
    print(f"\nstart: {figures['start_s']:.1f} s { ({k: round(v, 1) for k, v in figures['phases_s'].items()}) }")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


def _plan(args: argparse.Namespace, made: Path, drafts: int) -> EnginePlan:
    """SystemExit with a sentence for what cannot work."""
    settings: dict[str, Any] = {
        "max_model_len": max(args.context) + args.steps * (1 + drafts) + 16,
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
        return EnginePlan.make(EngineConfig(model=folder, **settings))
    except ValidationError as error:
        raise SystemExit(explain(error, where="engine")) from None
    except ConfigError as error:
        raise SystemExit(str(error)) from None


async def _measure(
    engine: AsyncEngine, args: argparse.Namespace, batch: int, context: int, drafts: int
) -> dict[str, float]:
    begin = time.perf_counter()
    streams = await _run(engine, batch, context, args.steps)
    whole = time.perf_counter() - begin
    # Between the last sequence's first tokens and the first one's last all decode together.
    start = max(stream[0].at for stream in streams)
    end = min(stream[-1].at for stream in streams)
    together = [[a for a in stream if start <= a.at <= end] for stream in streams]
    gaps = sorted(b.at - a.at for a, b in zip(together[0][1:], together[0][2:], strict=False))
    tokens = sum(arrival.tokens for stream in together for arrival in stream[1:])
    card = Card(bandwidth=args.bandwidth * 1e12)
    parts = step_parts(config_of(str(args.folder or args.model)), Step(batch, context, 1 + drafts), drafts, args.tp)
    return {
        "drafts": drafts,
        "context": context,
        "batch": batch,
        "step_ms": statistics.median(gaps) * 1e3,
        "p99_ms": gaps[int(len(gaps) * 0.99)] * 1e3,
        "floor_ms": floor_seconds(parts, card) * 1e3,
        "tokens_per_s": tokens / (end - start),
        "tokens_a_step": statistics.mean(a.tokens for stream in together for a in stream[1:]),
        "ttft_ms": min(stream[0].at for stream in streams) * 1e3 - begin * 1e3,
        "whole_s": whole,
    }


async def _run(engine: AsyncEngine, batch: int, context: int, steps: int) -> list[list[Arrival]]:
    """When tokens of each of `batch` sequences arrived."""
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    generator = torch.Generator().manual_seed(batch * context)

    async def stream(index: int, prompt: list[int]) -> list[Arrival]:
        arrivals = []
        async for delta in engine.generate(prompt, params, request_id=f"{batch}-{context}-{index}-{steps}"):
            if delta.token_ids:
                arrivals.append(Arrival(time.perf_counter(), len(delta.token_ids)))
        return arrivals

    prompts = torch.randint(engine.vocab_size, (batch, context), generator=generator).tolist()
    return await asyncio.gather(*(stream(i, prompt) for i, prompt in enumerate(prompts)))


def _place() -> dict[str, str]:
    """Card and commit that the figures are of."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"card": card, "commit": git.stdout.strip() or "unknown", "torch": torch.__version__}


if __name__ == "__main__":
    main()
