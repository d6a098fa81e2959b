"""`shoal generate` and `shoal logits`: the engine without Serve, for debugging, benchmarks and parity."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.driver.messages import StartupProgress
from workers.step import SamplingParams

if TYPE_CHECKING:  # what loads torch is imported when a command needs it: other commands start fast
    from serve.llm import LLM, Prompt


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds both commands to the parser."""
    generate = commands.add_parser("generate", help="print completions as JSON lines")
    _add_engine_flags(generate)
    generate.add_argument("--max-tokens", type=int, required=True, help="tokens to generate, at most")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    generate.add_argument("--seed", type=int, help="of every prompt's random draws")
    generate.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    generate.add_argument("--num-draft-tokens", type=int, default=0, help="speculative tokens a step (MTP)")
    generate.add_argument("--draft-policy", choices=["adaptive", "fixed"], default="adaptive", help="how many to draft")
    generate.set_defaults(run=_generate)

    logits = commands.add_parser("logits", help="write teacher-forced logits to a safetensors file")
    _add_engine_flags(logits)
    logits.add_argument("--out", type=Path, required=True, help='file for tensors "0", "1", ... [len, vocab] float32')
    logits.add_argument("--prefill-chunk", type=int, help="positions a prefill step runs, at most")
    logits.set_defaults(run=_logits)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--ids", type=Path, help="JSON file: a list of token-id lists")
    source.add_argument("--prompts", type=Path, help="JSON file: a list of strings")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--ep", type=int, default=1, help="expert partitions (divides --tp)")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")


def _generate(args: argparse.Namespace) -> int:
    prompts = _read_prompts(args)
    params = SamplingParams(
        temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos
    )
    with _llm(args, num_draft_tokens=args.num_draft_tokens, draft_policy=args.draft_policy) as llm:
        for future in llm.submit(prompts, params):
            done = future.result()
            line = {
                "index": done.index,
                "token_ids": done.token_ids,
                "text": done.text,
                "finish_reason": done.finish_reason,
            }
            if args.num_draft_tokens:
                line |= {"num_drafted": done.num_drafted, "num_accepted": done.num_accepted}
            print(json.dumps(line), flush=True)
    return 0


def _logits(args: argparse.Namespace) -> int:
    prompts = _read_prompts(args)
    chunk = {} if args.prefill_chunk is None else {"max_num_batched_tokens": args.prefill_chunk}
    with _llm(args, enable_prefix_caching=False, **chunk) as llm:
        results = llm.logits(prompts)
    from safetensors.numpy import save_file

    save_file({str(i): rows for i, rows in enumerate(results)}, args.out)
    return 0


def _llm(args: argparse.Namespace, **settings: Any) -> "LLM":
    from serve.llm import LLM

    return LLM(args.model, tp=args.tp, ep=args.ep, dtype=args.dtype, on_progress=_show_progress, **settings)


def _show_progress(progress: StartupProgress) -> None:
    if sys.stderr.isatty():
        end = "\n" if progress.done == progress.total else ""
        done, total = progress.done / 2**20, progress.total / 2**20
        print(f"\rloading weights {done:.0f} of {total:.0f} MiB", end=end, file=sys.stderr, flush=True)


def _read_prompts(args: argparse.Namespace) -> "list[Prompt]":
    path = args.ids or args.prompts
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if args.ids:
        valid = isinstance(value, list) and all(isinstance(ids, list) for ids in value)
        kind = "a list of token-id lists"
    else:
        valid = isinstance(value, list) and all(isinstance(text, str) for text in value)
        kind = "a list of strings"
    if not valid or not value:
        raise ValueError(f"{path} must hold {kind}, at least one")
    return list(value)
