"""`shoal bench serve`, `shoal bench latency` and `shoal bench throughput`."""

import argparse
import asyncio
import functools
import json
import math
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from configs.base import ConfigError
from serve.bench import load, summary
from serve.bench.requests import MAX_ERROR, BenchRequest, Endpoint, Record, send

if TYPE_CHECKING:
    from serve.llm import LLM

_SHOWN_ERRORS = 3


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command and its three kinds to the parser."""
    bench = commands.add_parser("bench", help="measure a server, or the engine without one")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")
    _add_serve(kinds.add_parser("serve", help="send requests to any OpenAI-compatible server"))

    latency = kinds.add_parser("latency", help="time of one batch, offline")
    _add_offline(latency)
    latency.add_argument("--batch-size", type=_positive, default=8)
    latency.add_argument("--num-iters", type=_positive, default=10, help="batches that are timed")
    latency.add_argument("--num-iters-warmup", type=_count, default=2, help="batches before them")
    latency.set_defaults(run=_latency)

    throughput = kinds.add_parser("throughput", help="tokens a second of many prompts, offline")
    _add_offline(throughput)
    throughput.add_argument("--num-prompts", type=_positive, default=256)
    throughput.set_defaults(run=_throughput)

    overhead = kinds.add_parser("overhead", help="what HTTP and Serve add to the engine's own latency")
    _add_offline(overhead)
    overhead.add_argument("--streams", type=_positive, nargs="+", default=[1, 8, 32], help="requests at a time")
    overhead.add_argument("--requests-each", type=_positive, default=8, help="requests for each of them")
    overhead.set_defaults(run=_overhead)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="an API key is taken from OPENAI_API_KEY")
    parser.add_argument("--endpoint", default="/v1/completions", help="or /v1/chat/completions")
    parser.add_argument("--model", help="default: the first that /v1/models names")
    parser.add_argument("--num-prompts", type=_positive, default=100)
    parser.add_argument("--request-rate", type=_rate, default=math.inf, help="a second, Poisson; default: all at once")
    parser.add_argument("--max-concurrency", type=_positive, help="requests in flight, at most")
    parser.add_argument("--random-input-len", type=_positive, default=128, help="tokens (chat: words) of a prompt")
    parser.add_argument("--random-output-len", type=_positive, default=128, help="tokens to ask for")
    parser.add_argument("--vocab-size", type=_positive, default=1000, help="random token ids are below it")
    parser.add_argument("--dataset-path", type=Path, help='prompts in place of random ones: JSON lines {"prompt": ...}')
    parser.add_argument("--ignore-eos", action="store_true", help="let every request have its whole length")
    parser.add_argument("--extra-body", type=_json_object, default={}, help="JSON of more parameters")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    parser.add_argument("--num-warmups", type=_count, default=1, help="requests sent before, and not counted")
    parser.add_argument("--goodput", nargs="*", default=[], metavar="METRIC:MS", help="ttft, tpot, e2el: limits in ms")
    parser.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", help="metrics to print")
    parser.add_argument("--metric-percentiles", default="90,99")
    parser.add_argument("--save-result", action="store_true", help="write a JSON file with vLLM's keys")
    parser.add_argument("--result-dir", type=Path, default=Path("."))
    parser.add_argument("--result-filename", help="default: from date and model")
    parser.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="also put into the file")
    parser.set_defaults(run=_serve)


def _add_offline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--input-len", type=_positive, default=32)
    parser.add_argument("--output-len", type=_positive, default=128)
    parser.add_argument("--tp", type=_positive, default=1, help="tensor-parallel ranks")
    parser.add_argument("--ep", type=_positive, default=1, help="expert partitions (divides --tp)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--load-format", choices=["safetensors", "dummy"], default="safetensors")
    parser.add_argument("--max-num-seqs", type=_positive, default=64)
    parser.add_argument("--num-draft-tokens", type=_count, default=0)
    parser.add_argument("--output-json", type=Path, help="write the figures here")


def _serve(args: argparse.Namespace) -> int:
    percentiles = _numbers(args.metric_percentiles, "--metric-percentiles")
    metrics = [name for name in args.percentile_metrics.split(",") if name]
    if unknown := set(metrics) - set(summary.METRICS):
        raise ConfigError(f"--percentile-metrics {', '.join(unknown)}: choose from {', '.join(summary.METRICS)}")
    if not args.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {args.base_url}: write it with http:// or https://")
    goodput = _goodput(args.goodput)
    metadata = dict(_pair(item, "=", "--metadata") for item in args.metadata)
    requests = _requests(args)
    model, records, duration = asyncio.run(_run(args, requests))
    result = summary.summarise(records, duration, percentiles, goodput)
    print(summary.table(result, metrics if result["completed"] else (), percentiles))
    for error, count in Counter(record.error for record in records if record.error).most_common(_SHOWN_ERRORS):
        print(f"{count} failed: {error}", file=sys.stderr)
    if args.save_result:
        head = summary.header(model, args.num_prompts, args.request_rate, args.max_concurrency, args.endpoint)
        name = args.result_filename or f"{head['backend']}-{model.rpartition('/')[2]}-{head['date']}.json"
        args.result_dir.mkdir(parents=True, exist_ok=True)
        (args.result_dir / name).write_text(json.dumps({**head, **metadata, **result, **summary.details(records)}))
        print(f"\nwritten to {args.result_dir / name}")
    return 0 if result["completed"] else 1


def _requests(args: argparse.Namespace) -> list[BenchRequest]:
    count, output_len = args.num_prompts, args.random_output_len
    if args.dataset_path is not None:
        return load.read_prompts(args.dataset_path, count, output_len)
    if args.endpoint.endswith("chat/completions"):
        return load.random_words(count, args.random_input_len, output_len, args.seed)
    return load.random_prompts(count, args.random_input_len, output_len, args.vocab_size, args.seed)


async def _run(args: argparse.Namespace, requests: list[BenchRequest]) -> tuple[str, list[Record], float]:
    """-> the model's name, records and duration."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        model = args.model or await _first_model(session, args.base_url)
        endpoint = Endpoint(args.base_url, args.endpoint, model, args.extra_body, args.ignore_eos)
        send_one = functools.partial(send, session, endpoint)
        warm = load.random_words if args.endpoint.endswith("chat/completions") else None
        for i in range(args.num_warmups):
            request = warm(1, 8, 2, i - 1)[0] if warm else BenchRequest([1 + i % 7] * 8, 2)
            await load.run_load(send_one, [request], [0.0], None)
        times = load.arrivals(len(requests), args.request_rate, args.seed)
        whole = asyncio.create_task(load.run_load(send_one, requests, times, args.max_concurrency))
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, whole.cancel)
        return model, *await whole


async def _first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    url = f"{base_url.rstrip('/')}/v1/models"
    try:
        async with session.get(url) as response:
            if response.status != 200:
                told = (await response.text())[:MAX_ERROR]
                raise ConfigError(f"{url} answers HTTP {response.status}: {told} (a key is taken from OPENAI_API_KEY)")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{url} names no model ({type(error).__name__}: {error}): is the server up at --base-url? Or give --model"
        ) from None


def _latency(args: argparse.Namespace) -> int:
    from serve.bench import offline

    with _llm(args) as llm:
        result = offline.latency(
            llm, args.batch_size, args.input_len, args.output_len, args.num_iters, args.num_iters_warmup
        )
    mean = result["avg_latency"]
    print(f"{mean:.4f} s a batch on average, {mean / args.output_len * 1e3:.3f} ms for each token of a sequence")
    for percentile, seconds in result["percentiles"].items():
        print(f"p{percentile:<3} {seconds:.4f} s")
    return _write(args, result)


def _throughput(args: argparse.Namespace) -> int:
    from serve.bench import offline

    with _llm(args) as llm:
        result = offline.throughput(llm, args.num_prompts, args.input_len, args.output_len)
    print(
        f"{result['requests_per_second']:.2f} requests/s, {result['output_tokens_per_second']:.1f} tokens/s out, "
        f"{result['tokens_per_second']:.1f} in and out"
    )
    return _write(args, result)


def _overhead(args: argparse.Namespace) -> int:
    from serve.bench import overhead

    engine = {
        "model": str(args.model),
        "parallel": {"tp_size": args.tp, "ep_size": args.ep},
        "device": args.device,
        "dtype": args.dtype,
        "load_format": args.load_format,
        "max_num_seqs": args.max_num_seqs,
        "num_draft_tokens": args.num_draft_tokens,
    }
    result = overhead.measure(engine, args.streams, args.requests_each, args.input_len, args.output_len)
    print(overhead.table(result))
    return _write(args, result)


def _llm(args: argparse.Namespace) -> "LLM":
    from serve.llm import LLM

    return LLM(
        args.model,
        tp=args.tp,
        ep=args.ep,
        device=args.device,
        dtype=args.dtype,
        load_format=args.load_format,
        max_num_seqs=args.max_num_seqs,
        num_draft_tokens=args.num_draft_tokens,
        enable_prefix_caching=False,
    )


def _write(args: argparse.Namespace, result: dict[str, Any]) -> int:
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(result, indent=2))
    return 0


def _goodput(items: list[str]) -> dict[str, float]:
    limits = {}
    for item in items:
        name, value = _pair(item, ":", "--goodput")
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput {item}: metrics are ttft, tpot and e2el")
        limits[name] = _numbers(value, f"--goodput {name}")[0]
    return limits


def _pair(item: str, by: str, flag: str) -> tuple[str, str]:
    name, found, value = item.partition(by)
    if not found or not name or not value:
        raise ConfigError(f"{flag} {item}: write NAME{by}VALUE")
    return name, value


def _numbers(text: str, flag: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 <= number < math.inf for number in numbers):
        raise ConfigError(f"{flag} {text}: write numbers of 0 and more, with commas between")
    if flag == "--metric-percentiles" and max(numbers) > 100:
        raise ConfigError(f"{flag} {text}: percentiles are 0 to 100")
    return numbers


def _positive(text: str) -> int:
    return _checked(int(text), 1, text)


def _count(text: str) -> int:
    return _checked(int(text), 0, text)


def _checked(value: int, least: int, text: str) -> int:
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a rate above 0 (or inf)")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
