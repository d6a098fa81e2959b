"""Times top-k selection with page-table transform: every backend that runs here, checked against torch first.

    python benchmarks/topk.py --quick              a few cases, for a CPU
    python benchmarks/topk.py --out results.md     all of them; the table goes to the file, too

On a GPU a case is captured in a CUDA graph of 20 calls over different score matrices and replayed; a figure is the
median time of a call. On a CPU calls are timed one by one.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from configs.base import ConfigError
from layers.attention.topk import TopKBackend, TopKMetadata
from layers.attention.topk_backends import make_topk_backend

BACKENDS = ("torch", "flashinfer", "flashinfer_unfused")
KS, LENGTHS, BATCHES, PAGE_SIZES = (512, 1024, 2048), (8192, 65536), (1, 4, 16, 64), (1, 64)
CALLS, REPLAYS = 20, 20
MATRICES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="K 512 and 2048, length 8192, batches of 1 and 16")
    parser.add_argument("--out", type=Path, help="file to write the table to")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    grid = ((512, 2048), (8192,), (1, 16), PAGE_SIZES) if args.quick else (KS, LENGTHS, BATCHES, PAGE_SIZES)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    lines = [f"{name}, torch {torch.__version__}; microseconds a call", ""]
    header = ["K", "length", "batch", "page size", *BACKENDS]
    lines += [" | ".join(header), " | ".join(["---"] * len(header))]
    print("\n".join(lines))
    for k, length, batch, page_size in itertools.product(*grid):
        times = [measure(backend, k, length, batch, page_size, device) for backend in BACKENDS]
        shown = [f"{seconds * 1e6:.1f}" if seconds is not None else "-" for seconds in times]
        lines.append(" | ".join([str(k), str(length), str(batch), str(page_size), *shown]))
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


def measure(name: str, k: int, length: int, batch: int, page_size: int, device: torch.device) -> float | None:
    """Median seconds of a call; None where the backend does not run."""
    try:
        backend = make_topk_backend(name, k, "small", True, device)
    except ConfigError:
        return None
    generator = torch.Generator(device=device).manual_seed(0)
    scores = torch.randn(MATRICES, batch, length, generator=generator, device=device)
    pages = torch.randperm(batch * length // page_size, generator=generator, device=device)
    metadata = TopKMetadata(
        pages.view(batch, -1).int(),
        torch.full((batch,), length, dtype=torch.int32, device=device),
        page_size,
        k,
        backend.needs_plan,
    )
    outputs = torch.empty(2, batch, k, dtype=torch.int32, device=device)
    check(backend, scores[0], metadata, outputs)

    def call(i: int) -> None:
        backend.select(scores[i % MATRICES], metadata, *outputs)

    return time_on_gpu(call) if device.type == "cuda" else time_on_cpu(call)


def check(backend: TopKBackend, scores: torch.Tensor, metadata: TopKMetadata, outputs: torch.Tensor) -> None:
    reference = make_topk_backend("torch", metadata.k, "small", True, scores.device)
    want = torch.empty_like(outputs)
    reference.select(scores, metadata, *want)
    backend.select(scores, metadata, *outputs)
    if not torch.equal(outputs, want):
        raise SystemExit(f"{backend.name} and torch select differently")


def time_on_gpu(call: Callable[[int], None]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(times)


def time_on_cpu(call: Callable[[int], None]) -> float:
    times = []
    for i in range(3 + REPLAYS):
        begin = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
