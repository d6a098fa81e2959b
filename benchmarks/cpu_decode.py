"""Decode speed of the shipped model on a CPU, against transformers' generate: same run, same threads, same tokens.

    python benchmarks/cpu_decode.py [--threads 2] [--tokens 100] [--repeats 3]

Prints tokens a second of each (batch 1, greedy, float32, tp 1) and their ratio. On shared cores only the ratio counts.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from serve.llm import LLM
from workers.step import SamplingParams

MODEL = Path(__file__).parent.parent / "examples" / "tiny-model"
PROMPT = "In the beginning God"


def best_rate(run: Callable[[], int], repeats: int) -> float:
    """Tokens a second of the fastest of `repeats` runs; `run` returns how many tokens it made."""
    rates = []
    for _ in range(repeats):
        begin = time.perf_counter()
        count = run()
        rates.append(count / (time.perf_counter() - begin))
    return max(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with LLM(MODEL, device="cpu", dtype="float32", cpu_threads=args.threads) as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(PROMPT, add_special_tokens=True)
        tensor = torch.tensor([ids])

        def ours() -> int:
            return len(llm.generate([ids], params)[0].token_ids)

        def theirs() -> int:
            out = model.generate(
                tensor, do_sample=False, min_new_tokens=args.tokens, max_new_tokens=args.tokens, pad_token_id=2
            )
            return out.shape[1] - tensor.shape[1]

        ours(), theirs()  # warm up
        shoal, reference = best_rate(ours, args.repeats), best_rate(theirs, args.repeats)
    print(f"threads {args.threads}, {args.tokens} tokens: shoal {shoal:.0f} tok/s, transformers {reference:.0f} tok/s")
    print(f"ratio {shoal / reference:.2f}")


if __name__ == "__main__":
    main()
