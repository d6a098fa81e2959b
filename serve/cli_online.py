"""`shoal serve` and `shoal chat`."""

import argparse
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from configs.base import ConfigError
from configs.engine import ServeConfig
from serve.api.auth import load_api_keys
from serve.chat_cli import run_chat
from serve.tokenizer import Tokenizer

APPLICATION = "shoal"
_LAST_BYTES_S = 0.5
_PHASES = ("Ray", "Serve's proxy", "replica and workers")


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds both commands to the parser."""
    serve = commands.add_parser("serve", help="start Ray (or join RAY_ADDRESS) and serve a model over OpenAI's API")
    serve.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    serve.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    serve.add_argument("--ep", type=int, default=1, help="expert partitions (divides --tp)")
    serve.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    serve.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    serve.add_argument("--load-format", choices=["safetensors", "dummy"], help="dummy = random weights, for benchmarks")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (0.0.0.0 = all)")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--api-key-file", type=Path, help="keys that clients must send, one a line (or SHOAL_API_KEYS)")
    serve.add_argument("--served-model-name", help="name clients use (default: the folder's)")
    serve.add_argument("--max-model-len", type=int, help="prompt and output tokens of a request, at most")
    serve.add_argument("--max-num-seqs", type=int, help="sequences that run at a time")
    serve.add_argument("--max-num-batched-tokens", type=int, help="rows of one step")
    serve.add_argument("--kv-cache-bytes", type=int, help="KV cache of each rank")
    serve.add_argument("--num-draft-tokens", type=int, help="speculation: tokens that MTP drafts a step, at most")
    serve.add_argument("--draft-policy", choices=["adaptive", "fixed"], help="how many of them a step drafts")
    serve.add_argument("--tool-call-parser", help="how the model writes tool calls (default: as its template says)")
    serve.add_argument("--reasoning-parser", help="auto, think or none")
    serve.add_argument("--no-prefix-caching", action="store_true", help="never reuse cached prefixes")
    serve.set_defaults(run=_serve)

    chat = commands.add_parser("chat", help="talk to a running server (key: OPENAI_API_KEY)")
    chat.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    chat.add_argument("--model", help="served name (default: the one that is served)")
    chat.set_defaults(run=lambda args: run_chat(args.url, args.model))


def serve_args(args: argparse.Namespace) -> dict[str, Any]:
    """The application's `args:` that the flags stand for."""
    engine = {
        "model": str(args.model),
        "parallel": {"tp_size": args.tp, "ep_size": args.ep},
        "device": args.device,
        "dtype": args.dtype,
        "load_format": args.load_format,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "kv_cache_bytes": args.kv_cache_bytes,
        "num_draft_tokens": args.num_draft_tokens,
        "draft_policy": args.draft_policy,
        "enable_prefix_caching": False if args.no_prefix_caching else None,
    }
    given = {name: value for name, value in engine.items() if value is not None}
    front = {
        "served_model_name": args.served_model_name,
        "api_key_file": None if args.api_key_file is None else str(args.api_key_file.resolve()),
        "tool_call_parser": args.tool_call_parser,
        "reasoning_parser": args.reasoning_parser,
    }
    return {"engine": given, **{name: value for name, value in front.items() if value is not None}}


def _serve(args: argparse.Namespace) -> int:
    from serve.hosting import EnginePlan  # loads torch, which other commands can do without

    application_args = serve_args(args)
    config = ServeConfig.from_args(application_args)
    EnginePlan.make(config.engine)
    load_api_keys(config.api_key_file, "")
    Tokenizer(config.engine.model)  # what the replica needs, too, is refused now rather than there
    _check_port(args.host, args.port)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Behind HAProxy Serve waits 30 s before a replica ends; by then `_drain` has seen the last request off.
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "0")
    print("starting Ray ...", flush=True)
    # Imported late, so that a wrong flag or file is told at once.
    import ray
    from ray import serve as ray_serve

    from serve.app import build

    stop = threading.Event()
    marks = [time.perf_counter()]
    _init_ray(ray, args.tp)
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray's start, which sets its own
        signal.signal(number, lambda *_: stop.set())
    try:
        marks.append(time.perf_counter())
        ray_serve.start(proxy_location="HeadOnly", http_options={"host": args.host, "port": args.port})
        marks.append(time.perf_counter())
        print(f"loading {config.model_name} from {config.engine.model} ...", flush=True)
        ray_serve.run(build(application_args), name=APPLICATION, route_prefix="/")
        marks.append(time.perf_counter())
        took = ", ".join(f"{what} {b - a:.1f} s" for what, a, b in zip(_PHASES, marks, marks[1:], strict=False))
        print(_banner(config.model_name, args.host, args.port), flush=True)
        print(f"(the start took {marks[-1] - marks[0]:.1f} s: {took})", flush=True)
        stop.wait()
        _drain(ray_serve, stop, config.deployment.graceful_shutdown_timeout_s)
        print("stopping ...", flush=True)
    except RuntimeError as error:  # Serve's "Deploying application failed: <traceback>"
        raise ConfigError(str(error)) from None
    finally:
        ray_serve.shutdown()
        ray.shutdown()
    return 0


def _drain(ray_serve: Any, stop: threading.Event, timeout_s: float) -> None:
    """Lets requests in progress finish while new ones get a 503, until all have or a second signal comes."""
    print("finishing requests in progress, new ones are refused (Ctrl-C again stops at once) ...", flush=True)
    stop.clear()
    ended = threading.Event()

    def wait() -> None:
        with contextlib.suppress(Exception):  # a replica that is gone has nothing to finish
            ray_serve.get_app_handle(APPLICATION).broadcast("drain", timeout_s).results()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    while not stop.is_set() and not ended.wait(0.1):
        pass
    if ended.is_set():
        stop.wait(_LAST_BYTES_S)  # until what the replica has sent is through the proxy


def _init_ray(ray: Any, tp_size: int) -> None:
    """Joins the cluster of RAY_ADDRESS, or starts one on this machine with room for the replica and its workers.

    A started cluster has no dashboard: that takes seconds and memory, and `serve deploy` has its own way to start one.
    """
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level=logging.WARNING)
        return
    # Logical CPUs: on a small machine more actors than cores is right, since most of them wait.
    cpus = max(os.cpu_count() or 1, tp_size + 2)
    ray.init(num_cpus=cpus, include_dashboard=False, logging_level=logging.WARNING)


def _check_port(host: str, port: int) -> None:
    """Raises ConfigError when the address cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error}): choose another --host or --port") from None


def _banner(model: str, host: str, port: int) -> str:
    url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Genesis 1:1"}}], "max_tokens": 48}}'
    return f"""
Shoal serves {model} at {url}/v1 (Ctrl-C stops it). Try, from another shell:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{body}'
"""
