"""Times the attention of decode rows: every backend that runs on this GPU, checked against the torch reference first.

    python benchmarks/attention.py [--heads 16 64 128] [--quick] [--out results.md]

A figure is the median time of a call in a CUDA graph of 20 calls over different queries, in microseconds; a plan that
is made once a step is made once. The floor is the cache's bytes at 4.8 TB/s. bfloat16, latents of 512 + 64.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from roofline import Card, config_of
from topk import CALLS, time_on_gpu

from configs.base import ConfigError
from configs.model import MLAConfig
from layers.attention.backend import AttentionBackend, PagedRows, TorchAttention
from layers.attention.backends import make_attention_backend

BACKENDS = ("triton", "flashinfer_fa3", "trtllm_gen")
# (kind, batch, context, rows of a sequence); sparse rows attend to 2048 positions of their context
CASES = [
    ("dense", 1, 1024, 1),
    ("dense", 64, 1024, 1),
    ("dense", 1, 16384, 1),
    ("dense", 16, 16384, 1),
    ("dense", 16, 4096, 2),
    ("sparse", 1, 16384, 1),
    ("sparse", 8, 16384, 1),
    ("sparse", 64, 16384, 1),
]
TOP_K = 2048
CUDA = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--quick", action="store_true", help="the first of the dense and of the sparse cases")
    parser.add_argument("--out", type=Path, help="file to write the table to")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures GPU kernels, and torch finds no GPU")
    cases = [CASES[0], CASES[5]] if args.quick else CASES
    header = ["heads", "kind", "batch", "context", "rows", *BACKENDS, "floor"]
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds a call", ""]
    lines += [" | ".join(header), " | ".join(["---"] * len(header))]
    print("\n".join(lines))
    for heads in args.heads:
        mla = config_of("v3-slice").attention.model_copy(update={"num_heads": heads})
        backends = {name: _make(name, mla, heads) for name in BACKENDS}
        for case in cases:
            lines.append(" | ".join([str(heads), *measure(case, heads, mla, backends)]))
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


def _make(name: str, mla: MLAConfig, heads: int) -> AttentionBackend | None:
    try:
        return make_attention_backend(name, mla, heads, 256, torch.bfloat16, CUDA)
    except ConfigError:
        return None


def measure(
    case: tuple[str, int, int, int], heads: int, mla: MLAConfig, backends: dict[str, AttentionBackend | None]
) -> list[str]:
    kind, batch, context, n = case
    generator = torch.Generator(CUDA).manual_seed(0)
    pages = batch * context // 64
    cache = torch.randn(pages, 64, mla.cache_dim, device=CUDA, dtype=torch.bfloat16, generator=generator)
    shape = (CALLS, batch * n, heads, mla.cache_dim)
    queries = torch.randn(shape, device=CUDA, dtype=torch.bfloat16, generator=generator)
    table = torch.randperm(pages, device=CUDA, generator=generator).int().view(batch, -1)
    lengths = (context - n + 1 + torch.arange(n, device=CUDA)).int().repeat(batch)
    rows = PagedRows(table, lengths, n, context)
    options: dict[str, Any] = {"scale": mla.softmax_scale, "value_dim": mla.kv_lora_rank}
    slots = None
    if kind == "sparse":
        chosen = torch.rand(batch, context, device=CUDA, generator=generator).topk(TOP_K).indices.sort(-1).values
        slots = (table.gather(1, chosen // 64).long() * 64 + chosen % 64).int()

    def run(backend: AttentionBackend, q: torch.Tensor) -> torch.Tensor:
        if slots is None:
            return backend.decode(q, cache, rows, **options)
        return backend.sparse(q, cache, slots, rows, **options)

    want = run(TorchAttention(), queries[0]).float()
    shown = []
    for name, backend in backends.items():
        if backend is None:
            shown.append("-")
            continue
        error = ((run(backend, queries[0]).float() - want).norm() / want.norm()).item()
        if not error < 0.02:
            raise SystemExit(f"{name} and torch differ by {error:.3f} in {case}")
        seconds = time_on_gpu(lambda i, backend=backend: run(backend, queries[i]))
        shown.append(f"{seconds * 1e6:.1f}")
    seen = batch * context if slots is None else batch * n * TOP_K
    floor = seen * mla.cache_dim * 2 / Card().bandwidth
    return [kind, str(batch), str(context), str(n), *shown, f"{floor * 1e6:.1f}"]


if __name__ == "__main__":
    main()
