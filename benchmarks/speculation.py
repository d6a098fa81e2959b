"""What speculation brings on the shipped model: tokens a second by batch size and number of drafts, in one run.

    python benchmarks/speculation.py [--device cpu] [--batches 1 8 32] [--tokens 128] [--rounds 3] [--out results.md]

Greedy, on the model's own kind of text; the texts of all runs must be equal. Each figure is the best of the rounds, in
turns over the engines, so that a disturbance of a shared machine does not meet one of them alone. On shared cores only
the ratios count.
"""

import argparse
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from serve.llm import LLM
from workers.step import SamplingParams

MODEL = Path(__file__).parent.parent / "examples" / "tiny-model"
NAMES = ("Moses", "Aaron", "David", "Solomon", "Elijah", "Isaiah", "Ezekiel", "Daniel", "Job", "Abraham", "Jacob")
ENGINES = [(0, "fixed"), (1, "fixed"), (2, "fixed"), (3, "fixed"), (3, "adaptive")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    lines = ["| batch | " + " | ".join(f"k = {k}" if p == "fixed" else f"k <= {k}" for k, p in ENGINES) + " |"]
    lines.append("|---" * (1 + len(ENGINES)) + "|")
    with ExitStack() as stack:
        engines = []
        for k, policy in ENGINES:
            settings = {"device": args.device, "dtype": "float32", "enable_prefix_caching": False}
            settings |= {"kv_cache_bytes": 512 << 20, "max_num_seqs": max(args.batches)}
            llm = stack.enter_context(LLM(MODEL, num_draft_tokens=k, draft_policy=policy, **settings))
            llm.generate(["And"], params)
            engines.append(llm)
        for batch in args.batches:
            prompts = [f"And it came to pass that {NAMES[i % len(NAMES)]} said {i}" for i in range(batch)]
            best = [0.0] * len(engines)
            texts: list[list[list[int]]] = []
            for _ in range(args.rounds):
                texts.clear()
                for i, llm in enumerate(engines):
                    begin = time.perf_counter()
                    texts.append([done.token_ids for done in llm.generate(prompts, params)])
                    best[i] = max(best[i], batch * args.tokens / (time.perf_counter() - begin))
                if any(text != texts[0] for text in texts):
                    raise SystemExit("speculation changed a text")
            lines.append(f"| {batch} | " + " | ".join(f"{r:.0f} ({r / best[0]:.2f}x)" for r in best) + " |")
            print(lines[-1], flush=True)
        for (k, policy), llm in zip(ENGINES, engines, strict=True):
            stats = llm.engine.stats
            if stats is not None and stats.verifications:
                length = 1 + sum(stats.accepted_per_position) / stats.verifications
                lines.append(f"\nk {k} {policy}: {length:.2f} tokens a verification")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    text = f"Tokens a second, {where}, torch {torch.__version__}, tp 1\n\n" + "\n".join(lines) + "\n"
    print("\n" + text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
