"""Triton kernels against their torch references: on a GPU as compiled, elsewhere in Triton's interpreter (float32)."""

import pytest
import torch

from configs.model import RouterConfig
from layers.attention.backend import QUERY_TILE, PagedRows, PrefillRows, TorchAttention
from layers.attention.index_cache import Fp8IndexKeys, PlainIndexKeys
from layers.attention.index_scores import index_scores
from layers.moe.backend import TorchMoE
from layers.moe.routing import route as torch_route
from layers.rotary import Rotation, rotate
from tests.kernels import DEVICE, interpreted

pytest.importorskip("triton")

from layers.kernels.experts import grouped_experts
from layers.kernels.index_scores import paged_index_scores
from layers.kernels.mla import block_m, mla_decode
from layers.kernels.prefill import prefill_attention
from layers.kernels.route import route
from layers.kernels.rows import add_norm, rotate_and_store, silu_mul

PAGE = 64
EDGES = [0, 1, 63, 64, 65, 127, 128, 129]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
every_dtype = pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(interpreted(), reason="needs a GPU"))],
    ids=["fp32", "bf16"],
)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    print(f"seed {seed}")
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert torch.isfinite(got).all()
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9)
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


@every_dtype
@pytest.mark.parametrize("size", [24, 512, 2048])
def test_add_norm(size: int, dtype: torch.dtype) -> None:
    x, delta = randn(5, size, seed=1), randn(5, size, seed=2, dtype=dtype)
    weight = randn(size, seed=3)
    want_x = x + delta.float()
    want = want_x * torch.rsqrt(want_x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    out, exact = torch.empty(5, size, device=DEVICE, dtype=dtype), torch.empty_like(x)
    add_norm(x, delta, weight, 1e-6, out, exact)
    torch.testing.assert_close(x, want_x)
    torch.testing.assert_close(exact, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, want.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    wide = randn(5, size + 8, seed=4, dtype=dtype)
    add_norm(wide[:, :size], None, weight, 1e-6, out, None)
    narrow = wide[:, :size].float()
    close(out, narrow * torch.rsqrt(narrow.pow(2).mean(-1, keepdim=True) + 1e-6) * weight, dtype)


@every_dtype
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "rope", "latent"), [(1, 8, 24), (16, 64, 512), (20, 16, 32)])
def test_rotate_and_store(heads: int, rope: int, latent: int, interleaved: bool, dtype: torch.dtype) -> None:
    rows, nope = 5, 8
    q = randn(rows, heads, nope + rope, seed=5, dtype=dtype)
    down = randn(rows, 4 + latent + rope, seed=6, dtype=dtype)
    weight, angles = randn(latent, seed=7), randn(rows, 1, rope // 2, seed=8)
    turn = torch.complex(angles.cos(), angles.sin())
    rotation = Rotation(turn, interleaved)
    cache = torch.full((9, latent + rope), 7.0, device=DEVICE, dtype=dtype)
    slots = torch.tensor([3, 0, 8, 5, 6], device=DEVICE)
    kv, full = down[:, 4:], torch.full((rows, heads, latent + rope), 9.0, device=DEVICE, dtype=dtype)
    want_q = rotate(q[..., nope:], rotation)
    kv32 = kv[:, :latent].float()
    want = torch.cat(
        (
            (kv32 * torch.rsqrt(kv32.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(dtype),
            rotate(kv[:, None, latent:], rotation).squeeze(1),
        ),
        dim=-1,
    )
    rotate_and_store(q[..., nope:], full[..., latent:], kv, weight, 1e-6, turn, interleaved, cache, slots)
    close(full[..., latent:], want_q, dtype)
    close(cache[slots], want, dtype)
    assert (full[..., :latent] == 9).all() and (cache[[1, 2, 4, 7]] == 7).all()
    rotate_and_store(q[..., nope:], q[..., nope:], kv, weight, 1e-6, turn, interleaved, cache, slots)
    close(q[..., nope:], want_q, dtype)
    cache.fill_(7)
    rotate_and_store(None, None, kv, weight, 1e-6, turn, interleaved, cache, slots)
    close(cache[slots], want, dtype)


@every_dtype
def test_silu_mul(dtype: torch.dtype) -> None:
    x = randn(3, 2 * 1100, seed=9, dtype=dtype)
    gate, up = x.float().chunk(2, dim=-1)
    close(silu_mul(x), torch.nn.functional.silu(gate) * up, dtype)


ROUTERS = {
    "softmax": RouterConfig(num_experts=64, top_k=6, scoring="softmax", method="greedy"),
    "softmax in groups": RouterConfig(
        num_experts=20,
        top_k=3,
        scoring="softmax",
        method="group_limited_greedy",
        num_groups=5,
        top_groups=2,
        scale=16.0,
    ),
    "sigmoid": RouterConfig(num_experts=24, top_k=8, scoring="sigmoid", method="noaux_tc", normalise=True, scale=2.5),
    "sigmoid in groups": RouterConfig(
        num_experts=64, top_k=8, scoring="sigmoid", method="noaux_tc", num_groups=8, top_groups=4, normalise=True
    ),
    "groups of one": RouterConfig(
        num_experts=4, top_k=2, scoring="sigmoid", method="noaux_tc", num_groups=4, top_groups=2
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_route(name: str) -> None:
    config = ROUTERS[name]
    logits = randn(9, config.num_experts, seed=10)
    bias = randn(config.num_experts, seed=11) * 0.3 if config.method == "noaux_tc" else None
    ids, weights = route(logits, config, bias)
    want = torch_route(logits, config, bias)
    order, want_order = ids.argsort(-1), want.expert_ids.argsort(-1)
    assert torch.equal(ids.gather(-1, order), want.expert_ids.gather(-1, want_order))
    torch.testing.assert_close(weights.gather(-1, order), want.expert_weights.gather(-1, want_order))


class Paged:
    """Sequences of random entries in shuffled pages; unused positions hold NaN, which must not be seen."""

    def __init__(self, lengths: list[int], width: int, seed: int, dtype: torch.dtype) -> None:
        columns = max(1, -(-max(lengths) // PAGE)) + 1
        total = len(lengths) * columns
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        self.table = order.view(len(lengths), columns).int().to(DEVICE)
        self.cache = torch.full((total, PAGE, width), float("nan"), device=DEVICE, dtype=dtype)
        for i, length in enumerate(lengths):
            self.cache.view(-1, width)[self.slots(i, length)] = randn(length, width, seed=seed + i, dtype=dtype)

    def slots(self, sequence: int, length: int) -> torch.Tensor:
        positions = torch.arange(length, device=DEVICE)
        return self.table[sequence, positions // PAGE].long() * PAGE + positions % PAGE


def split_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor | None,
    table: torch.Tensor,
    n: int,
    splits: int,
    value: int,
) -> torch.Tensor:
    """One launch, with the counters checked after it."""
    groups = q.shape[0] // n
    m = block_m(n * q.shape[1])
    blocks = -(-n * q.shape[1] // m)
    workspace = torch.full((groups * blocks * splits * m * (max(16, value) * 2 + 2),), float("nan"), device=DEVICE)
    counters = torch.zeros(groups * blocks, dtype=torch.int32, device=DEVICE)
    out = torch.full((*q.shape[:2], value), float("nan"), device=DEVICE, dtype=q.dtype)
    mla_decode(q, cache, lengths, table, n, splits, 0.11, value, out, workspace, counters)
    assert not counters.any()
    return out


@every_dtype
@pytest.mark.parametrize(("heads", "n"), [(1, 1), (4, 4), (8, 2), (16, 1), (20, 3), (64, 2), (128, 1)])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_dense_attention(splits: int, heads: int, n: int, dtype: torch.dtype) -> None:
    latent, rope = (24, 8) if interpreted() else (512, 64)
    paged = Paged(EDGES, latent + rope, 12, dtype)
    q = randn(len(EDGES) * n, heads, latent + rope, seed=13, dtype=dtype)
    ends = torch.tensor(EDGES, dtype=torch.int32, device=DEVICE)[:, None]
    lengths = (ends - n + 1 + torch.arange(n, device=DEVICE)).clamp(min=0).int().flatten()
    got = split_attention(q, paged.cache, lengths, paged.table, n, splits, latent)
    rows = PagedRows(paged.table, lengths, n, max(EDGES))
    want = TorchAttention().decode(q.double(), paged.cache.nan_to_num().double(), rows, scale=0.11, value_dim=latent)
    close(got, want, dtype)
    assert (got[lengths == 0] == 0).all()


@every_dtype
@pytest.mark.parametrize("heads", [4, 16, 128])
@pytest.mark.parametrize("splits", [1, 3])
def test_sparse_attention(splits: int, heads: int, dtype: torch.dtype) -> None:
    latent, rope, k = (24, 8, 100) if interpreted() else (512, 64, 300)
    paged = Paged([256, 256], latent + rope, 14, dtype)
    slots = torch.stack([paged.slots(i % 2, 256)[torch.randperm(256)[:k].to(DEVICE) % 256] for i in range(4)]).int()
    slots = torch.nn.functional.pad(slots, (0, k - slots.shape[1]), value=-1)
    slots[1, 40:] = -1
    slots[1, 45] = slots[0, 0]
    slots[2] = -1
    q = randn(4, heads, latent + rope, seed=15, dtype=dtype)
    got = split_attention(q, paged.cache, None, slots, 1, splits, latent)
    rows = PagedRows(paged.table, torch.full((4,), 256, device=DEVICE).int(), 2, 256)
    cache = paged.cache.nan_to_num().double()
    want = TorchAttention().sparse(q.double(), cache, slots, rows, scale=0.11, value_dim=latent)
    close(got, want, dtype)
    assert (got[2] == 0).all()


@every_dtype
@pytest.mark.parametrize(
    ("rows", "experts", "k"), [(1, 8, 2), (3, 8, 3), (40, 6, 2), (64, 8, 6), (300, 12, 4), (400, 20, 4)]
)
@pytest.mark.parametrize("shared", [False, True])
def test_experts(rows: int, experts: int, k: int, shared: bool, dtype: torch.dtype) -> None:
    hidden, width = (40, 24) if interpreted() else (320, 200)
    if interpreted() and rows == 300:
        pytest.skip("slow in the interpreter")
    x = randn(rows, hidden, seed=16, dtype=dtype)
    ids = randn(rows, experts, seed=17).topk(k).indices
    ids[ids == 1] = -1  # of another rank
    ids[:, 0] = torch.where(ids[:, 0] == 2, 3, ids[:, 0])
    weights = randn(rows, k, seed=18).abs()
    gate_up = randn(experts, 2 * width, hidden, seed=19, dtype=dtype) * hidden**-0.5
    down = randn(experts, hidden, width, seed=20, dtype=dtype) * width**-0.5
    extra = randn(rows, hidden, seed=21, dtype=dtype) if shared else None
    got = grouped_experts(x, ids, weights, gate_up, down, extra)
    want = TorchMoE().experts(x.float(), ids, weights, gate_up.float(), down.float()).double()
    close(got, want + (extra.double() if extra is not None else 0), dtype)


def test_experts_of_no_row_and_none_held() -> None:
    gate_up, down = randn(4, 16, 8, seed=22), randn(4, 8, 8, seed=23)
    none = torch.full((3, 2), -1, device=DEVICE)
    extra = randn(3, 8, seed=24)
    assert torch.equal(grouped_experts(extra, none, none.float(), gate_up, down, extra), extra)
    assert grouped_experts(extra[:0], none[:0], none[:0].float(), gate_up, down, None).shape == (0, 8)


@every_dtype
@pytest.mark.parametrize("fp8", [False, True])
def test_index_scores(fp8: bool, dtype: torch.dtype) -> None:
    heads, dim, n = (4, 32, 2) if interpreted() else (64, 128, 2)
    lengths = [1, 64, 130, 200]
    table = torch.randperm(16, generator=torch.Generator().manual_seed(25)).view(4, 4).int().to(DEVICE)
    keys = Fp8IndexKeys(dim, dtype) if fp8 else PlainIndexKeys(dim, dtype)
    cache = torch.zeros(16, *keys.page_shape, dtype=keys.dtype, device=DEVICE)
    keys.store(cache, torch.arange(16 * PAGE, device=DEVICE), randn(16 * PAGE, dim, seed=26))
    q, gates = randn(4 * n, heads, dim, seed=27, dtype=dtype), randn(4 * n, heads, seed=28)
    rows = torch.tensor([max(length - 1 + i, 0) for length in lengths for i in range(n)], dtype=torch.int32)
    want = torch.empty(4 * n, 4 * PAGE, device=DEVICE)
    index_scores(q.float(), gates, keys.load(cache, table.flatten()).float(), want, 4)
    for programs in (1, 24, 1000):
        out = torch.full((4 * n, 4 * PAGE + 8), 5.0, device=DEVICE)[:, : 4 * PAGE]
        paged_index_scores(q, gates, cache, table, rows.to(DEVICE), n, out, programs)
        for row, length in enumerate(rows.tolist()):
            if length:
                close(out[row, :length], want[row, :length], dtype)


@every_dtype
@pytest.mark.parametrize(("dim", "value_dim", "heads"), [(192, 128, 2), (256, 256, 1), (24, 16, 3), (20, 24, 1)])
def test_prefill(dim: int, value_dim: int, heads: int, dtype: torch.dtype) -> None:
    """Packed chunks at a start and further on, of one row and of more than a tile; keys and values are views."""
    if dtype == torch.float32 and not interpreted():
        pytest.skip("float32 goes through torch on a GPU: the tiles do not fit")
    chunks = [(0, 5), (64, 1), (0, 1), (7, 9), (70, 130), (0, 129), (200, 3)]  # (positions before, queries)
    q_offsets = [0, *torch.tensor([n for _, n in chunks]).cumsum(0).tolist()]
    k_offsets = [0, *torch.tensor([before + n for before, n in chunks]).cumsum(0).tolist()]
    rows = PrefillRows(q_offsets, k_offsets, torch.zeros(k_offsets[-1], dtype=torch.int64, device=DEVICE))
    q = randn(q_offsets[-1], heads, dim, seed=40, dtype=dtype)
    kv = randn(k_offsets[-1], heads, dim + value_dim, seed=41, dtype=dtype)
    k, v = kv[..., :dim], kv[..., dim:]
    got = prefill_attention(q, k, v, rows.tiles, QUERY_TILE, 0.11)
    want = TorchAttention().prefill(q.double(), k.double(), v.double(), rows, scale=0.11)
    close(got, want, dtype)
    for i in range(len(chunks)):
        span = slice(q_offsets[i], q_offsets[i + 1])
        close(got[span], want[span], dtype)
