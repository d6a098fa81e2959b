"""Attention backends on a GPU against the torch reference in float64, and under CUDA graphs."""

import pytest
import torch

from configs.base import ConfigError
from configs.hf import load_model_config
from layers.attention.backend import AttentionBackend, PagedRows, TorchAttention
from layers.attention.backends import make_attention_backend
from tests.oracles import SHIPPED

pytest.importorskip("triton")

from layers.attention.split_kv import SplitKVAttention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda")
LATENT, ROPE, PAGE = 512, 64, 64
CONFIG = load_model_config(SHIPPED / "tiny-deepseek_v3-yarn").attention.model_copy(
    update={"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
)
SCALE = CONFIG.softmax_scale
BORDERS = [0, 1, 63, 64, 65, 127, 128, 129, 1000, 4097]
backends = pytest.mark.parametrize("name", ["triton", "flashinfer_fa3"])


def make(name: str, heads: int, max_rows: int = 64) -> AttentionBackend:
    try:
        return make_attention_backend(name, CONFIG, heads, max_rows, torch.bfloat16, CUDA)
    except ConfigError as error:
        pytest.skip(str(error))


def decode(backend: AttentionBackend, q: torch.Tensor, cache: torch.Tensor, rows: PagedRows) -> torch.Tensor:
    """One launch; whatever it was, it leaves all counters at zero."""
    got = backend.decode(q, cache, rows, scale=SCALE, value_dim=LATENT)
    check_counters(backend)
    return got


def check_counters(backend: AttentionBackend) -> None:
    if isinstance(backend, SplitKVAttention):
        assert not backend.counters.reserve(1).any()


class Batch:
    """Sequences of random entries in shuffled pages of one cache."""

    def __init__(self, lengths: list[int], heads: int, per_sequence: int, seed: int, room: int = 0) -> None:
        print(f"seed {seed}")
        gen = torch.Generator(device=CUDA).manual_seed(seed)
        columns = max(room, -(-max(lengths) // PAGE)) + 1
        order = torch.randperm(len(lengths) * columns, device=CUDA, generator=gen)
        self.table = order.view(len(lengths), columns).int()
        self.cache = torch.randn(order.numel(), PAGE, LATENT + ROPE, device=CUDA, generator=gen).bfloat16()
        rows = len(lengths) * per_sequence
        self.q = torch.randn(rows, heads, LATENT + ROPE, device=CUDA, generator=gen).bfloat16()
        ends = torch.tensor(lengths, device=CUDA)[:, None]
        seen = (ends - per_sequence + 1 + torch.arange(per_sequence, device=CUDA)).clamp(min=0)
        self.rows = PagedRows(self.table, seen.flatten().int(), per_sequence, columns * PAGE)

    def want(self) -> torch.Tensor:
        cache = self.cache.double()
        return TorchAttention().decode(self.q.double(), cache, self.rows, scale=SCALE, value_dim=LATENT)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.isfinite().all()
    error = (got.double() - want).norm() / want.norm()
    assert error < 1e-2, f"relative error {error:.2e}"
    empty = want.abs().amax((1, 2)) == 0
    assert (got[empty] == 0).all()


@backends
@pytest.mark.parametrize(("heads", "n"), [(1, 1), (8, 4), (16, 1), (16, 2), (20, 3), (64, 1), (128, 1), (128, 2)])
def test_dense(name: str, heads: int, n: int) -> None:
    backend = make(name, heads)
    for seed, lengths in enumerate(([4097], BORDERS, [300] * 70)):
        batch = Batch(lengths, heads, n, seed)
        close(decode(backend, batch.q, batch.cache, batch.rows), batch.want())


@backends
@pytest.mark.parametrize("heads", [8, 128])
def test_sparse(name: str, heads: int) -> None:
    backend, k = make(name, heads), 300
    for seed, counts in enumerate(([300], [0, 1, 64, 65, 299, 300, 300], [250] * 140)):
        batch = Batch([640] * len(counts), heads, 1, 10 + seed)
        flat = batch.table[:, :, None].long() * PAGE + torch.arange(PAGE, device=CUDA)
        shuffled = flat.flatten(1)[:, torch.randperm(640, device=CUDA)][:, :k].int()
        lengths = torch.tensor(counts, dtype=torch.int32, device=CUDA)
        slots = torch.where(torch.arange(k, device=CUDA) < lengths[:, None], shuffled, -1)
        rows = PagedRows(batch.table, lengths, 1, 640)
        got = backend.sparse(batch.q, batch.cache, slots, rows, scale=SCALE, value_dim=LATENT)
        check_counters(backend)
        want = TorchAttention().sparse(
            batch.q.double(), batch.cache.double(), slots, rows, scale=SCALE, value_dim=LATENT
        )
        close(got, want)


@backends
def test_more_rows_than_a_plan_takes(name: str) -> None:
    """A chunk of 8193 rows of one sequence, each a position further."""
    backend = make(name, 4, 64)
    batch = Batch([8193], 4, 1, 20)
    q = torch.randn(8193, 4, LATENT + ROPE, device=CUDA, generator=torch.Generator(CUDA).manual_seed(21)).bfloat16()
    rows = PagedRows(batch.table, torch.arange(1, 8194, device=CUDA).int(), 8193, 8193, start=0)
    got = decode(backend, q, batch.cache, rows)
    some = torch.tensor([0, 63, 64, 5000, 8191, 8192], device=CUDA)
    seen = PagedRows(batch.table.expand(6, -1), rows.lengths[some], 1, 8193)
    want = TorchAttention().decode(q[some].double(), batch.cache.double(), seen, scale=SCALE, value_dim=LATENT)
    close(got[some], want)


@backends
@pytest.mark.parametrize("heads", [16, 128])
def test_a_replayed_graph_follows_its_inputs(name: str, heads: int) -> None:
    """Lengths, tables and entries change in place; between replays other batches run, one of 8193 rows among them."""
    backend = make(name, heads)
    batch = Batch([700, 1, 64, 65], heads, 2, 30, room=70)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        backend.decode(batch.q, batch.cache, batch.rows, scale=SCALE, value_dim=LATENT)
    torch.cuda.synchronize()
    graph, rows = torch.cuda.CUDAGraph(), PagedRows(batch.table, batch.rows.lengths, 2, batch.rows.max_length)
    with torch.cuda.graph(graph, stream=stream):
        got = backend.decode(batch.q, batch.cache, rows, scale=SCALE, value_dim=LATENT)
    other = Batch([8193], heads, 1, 31)
    wide = PagedRows(other.table, torch.full((8193,), 100, dtype=torch.int32, device=CUDA), 8193, 100)
    wide_q = other.q.expand(8193, -1, -1).contiguous()
    for seed, lengths in enumerate(([4480, 4000, 2, 3], [3, 300, 129, 4096], [2, 2, 2, 2]), start=32):
        new = Batch(lengths, heads, 2, seed, room=70)
        for old, changed in (
            (batch.q, new.q),
            (batch.cache, new.cache),
            (batch.table, new.table),
            (batch.rows.lengths, new.rows.lengths),
        ):
            old.copy_(changed)
        decode(backend, wide_q, other.cache, wide)
        graph.replay()
        close(got, new.want())
        check_counters(backend)
