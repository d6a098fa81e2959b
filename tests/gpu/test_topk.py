"""Selection backends on a GPU against the torch reference, and under CUDA graphs. Skipped where torch finds no GPU."""

import pytest
import torch

from configs.base import ConfigError
from layers.attention.topk import TopKBackend, TopKMetadata, TorchTopK
from layers.attention.topk_backends import make_topk_backend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda")
POISON = 987_654
backends = pytest.mark.parametrize("name", ["torch", "flashinfer", "flashinfer_unfused"])


def make(name: str, k: int, tie_break: str = "small") -> TopKBackend:
    try:
        return make_topk_backend(name, k, tie_break, True, CUDA)
    except ConfigError as error:
        pytest.skip(str(error))


def metadata(lengths: list[int], k: int, page_size: int, width: int, seed: int) -> TopKMetadata:
    print(f"seed {seed}")
    rows, entries = len(lengths), -(-width // page_size)
    pages = torch.randperm(rows * entries, generator=torch.Generator().manual_seed(seed)).view(rows, entries)
    return TopKMetadata(pages.int().to(CUDA), torch.tensor(lengths, dtype=torch.int32).to(CUDA), page_size, k, False)


def outputs(meta: TopKMetadata) -> torch.Tensor:
    return torch.full((2, len(meta.lengths), meta.k), POISON, dtype=torch.int32, device=CUDA)


def check(backend: TopKBackend, scores: torch.Tensor, meta: TopKMetadata, tie_break: str = "small") -> None:
    want, got = outputs(meta), outputs(meta)
    TorchTopK(tie_break).select(scores, meta, *want)
    backend.select(scores, meta, *got)
    assert torch.equal(got, want)


@backends
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("k", [16, 128, 512, 2048])
def test_lengths_around_k(name: str, k: int, page_size: int) -> None:
    width = 2 * k + 128
    lengths = [0, 1, k - 1, k, k + 1, width, width - 1, 2 * k]
    scores = torch.randn(len(lengths), width, generator=torch.Generator().manual_seed(1)).to(CUDA)
    check(make(name, k), scores, metadata(lengths, k, page_size, width, 2))


@backends
@pytest.mark.parametrize("tie_break", ["small", "large"])
def test_equal_scores(name: str, tie_break: str) -> None:
    meta = metadata([1000, 700, 129, 1000], 128, 64, 1024, 3)
    scores = torch.randn(4, 1024, generator=torch.Generator().manual_seed(4)).mul(2).round().to(CUDA)
    scores[3] = 0
    check(make(name, 128, tie_break), scores, meta, tie_break)


@backends
def test_padded_rows_and_strided_tables(name: str) -> None:
    wide = torch.randn(4, 1000, generator=torch.Generator().manual_seed(5)).to(CUDA)
    plain = metadata([600, 20, 640, 129], 128, 64, 640, 6)
    table = torch.full((8, 13), 5000, dtype=torch.int32, device=CUDA)
    table[::2, 2:12] = plain.page_table
    lengths = torch.stack((plain.lengths, plain.lengths), dim=1)[:, 0]
    meta = TopKMetadata(table[::2, 2:12], lengths, 64, 128, False)
    check(make(name, 128), wide[:, :640], meta)


@backends
def test_verified_rows_and_packed_prefill(name: str) -> None:
    tables = torch.randperm(30, generator=torch.Generator().manual_seed(7)).view(3, 10).int().to(CUDA)
    lengths = torch.tensor([636, 637, 638, 0, 1, 2, 126, 127, 128], dtype=torch.int32, device=CUDA)
    row_to_table = torch.arange(3, dtype=torch.int32, device=CUDA).repeat_interleave(3)
    scores = torch.randn(9, 640, generator=torch.Generator().manual_seed(8)).to(CUDA)
    backend = make(name, 128)
    check(backend, scores, TopKMetadata(tables, lengths, 64, 128, False, row_to_table))
    starts = torch.tensor([0, 64, 320], dtype=torch.int32, device=CUDA).repeat_interleave(3)
    lengths = torch.tensor([64, 10, 0, 256, 200, 1, 320, 129, 128], dtype=torch.int32, device=CUDA)
    check(backend, scores, TopKMetadata(tables, lengths, 64, 128, False, row_to_table, starts, starts // 64))


@backends
def test_a_replayed_graph_follows_its_inputs(name: str) -> None:
    backend, k, width = make(name, 128), 128, 1024
    kept = metadata([1000, 50], k, 64, width, 9)
    scores = torch.randn(2, width, generator=torch.Generator().manual_seed(10)).to(CUDA)
    got = outputs(kept)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        backend.select(scores, kept, *got)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.select(scores, kept, *got)
    for seed, lengths in enumerate(([1024, 700], [0, 128], [129, 1], [5, 1000]), start=11):
        kept.copy_from(metadata(lengths, k, 64, width, seed))
        scores.copy_(torch.randn(2, width, generator=torch.Generator().manual_seed(seed)))
        got.fill_(POISON)
        graph.replay()
        want = outputs(kept)
        TorchTopK("small").select(scores, kept, *want)
        assert torch.equal(got, want), f"lengths {lengths}"
