"""Grouped expert computation: (row, choice) pairs sorted by expert into tiles, two grouped matmuls, a sum by row."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_AT_ONCE = (64, 512, 4096)  # pairs that a program looks at at a time: few sizes, since each is compiled


class Tiles(NamedTuple):
    """Pairs by expert, each expert's padded to whole tiles."""

    pairs: torch.Tensor  # [tiles * block_m] int32, pair = row * k + choice; number of pairs = none
    experts: torch.Tensor  # [tiles] int32
    used: torch.Tensor  # [1] int32, tiles in use


def make_tiles(expert_ids: torch.Tensor, num_experts: int, block_m: int) -> Tiles:
    """expert_ids [rows, k], -1 = left out. Sizes depend on shapes alone."""
    pairs = expert_ids.numel()
    most = pairs // block_m + min(pairs, num_experts)
    new = expert_ids.new_empty
    tiles = Tiles(new(most * block_m, dtype=torch.int32), new(most, dtype=torch.int32), new(1, dtype=torch.int32))
    _make_tiles[(num_experts,)](
        expert_ids,
        *tiles,
        pairs,
        PAIRS=next((size for size in _AT_ONCE if size >= pairs), _AT_ONCE[-1]),
        EXPERTS=triton.next_power_of_2(num_experts + 1),
        BLOCK_M=block_m,
        num_warps=4 if pairs <= 512 else 8,
    )
    return tiles


@triton.jit(do_not_specialize=["pairs"])
def _make_tiles(
    ids, pairs_out, experts_out, count_out, pairs, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """One program an expert: each counts all, and writes the tiles of its own."""
    mine = tl.program_id(0)
    lane = tl.arange(0, PAIRS)
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for lo in range(0, pairs, PAIRS):
        chosen = tl.load(ids + lo + lane, lo + lane < pairs, other=-1).to(tl.int32)
        counts += tl.histogram(tl.where(chosen < 0, EXPERTS - 1, chosen), EXPERTS)  # the last bin is nobody's
    used = tl.where(expert < tl.num_programs(0), (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(expert < mine, used, 0), 0)
    number = tl.sum(tl.where(expert == mine, used, 0), 0)
    if mine == 0:
        tl.store(count_out, tl.sum(used, 0))
    done = 0
    for lo in range(0, pairs, PAIRS):
        is_mine = tl.load(ids + lo + lane, lo + lane < pairs, other=-1) == mine
        place = done + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(pairs_out + first * BLOCK_M + place, lo + lane, is_mine)
        done += tl.sum(is_mine.to(tl.int32), 0)
    cell = tl.arange(0, BLOCK_M)
    for tile in range(number):
        tl.store(experts_out + first + tile, mine)
        rest = tile * BLOCK_M + cell
        tl.store(pairs_out + first * BLOCK_M + rest, tl.zeros([BLOCK_M], tl.int32) + pairs, rest >= done)


def grouped_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """sum over a row's experts of weight * down(silu(gate x) * up x), plus shared; arguments as in MoEBackend.

    Products and sums are float32, the inner activation is x's dtype.
    """
    rows, hidden = x.shape
    k, width = expert_ids.shape[1], down.shape[2]
    out = torch.empty_like(x)
    if not rows:
        return out
    pairs = rows * k
    block_m = _tile_rows(pairs, gate_up.shape[0])
    tiles = make_tiles(expert_ids, gate_up.shape[0], block_m)
    most = tiles.experts.shape[0]
    inner = x.new_empty(pairs, width)
    shape = _shape(x.dtype, block_m)
    _gate_up[(triton.cdiv(width, shape.block_n), most)](
        x, gate_up, inner, *tiles, pairs, hidden, width, k,
        BLOCK_M=block_m, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    parts = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    _down[(triton.cdiv(hidden, shape.block_n), most)](
        inner, down, parts, expert_weights, *tiles, pairs, width, hidden,
        BLOCK_M=block_m, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_parts[(rows, triton.cdiv(hidden, block))](
        parts, expert_ids, shared, out, hidden, k, HAS_SHARED=shared is not None, BLOCK=block
    )
    return out


class _Shape(NamedTuple):
    block_n: int
    block_k: int
    warps: int
    stages: int


def _tile_rows(pairs: int, num_experts: int) -> int:
    """Rows of a tile: about what an expert gets."""
    return min(128, max(16, triton.next_power_of_2(pairs // num_experts)))


def _shape(dtype: torch.dtype, block_m: int) -> _Shape:
    if dtype == torch.float32:
        return _Shape(32, 32, 4, 2)
    if block_m <= 32:
        return _Shape(64, 128, 4, 3)
    return _Shape(128, 64, 8, 3)


@triton.jit(do_not_specialize=["pairs"])
def _gate_up(
    x, w, out, tile_pairs, tile_experts, tile_count, pairs, hidden, width, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    if tile >= tl.load(tile_count):
        return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    pair = tl.load(tile_pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair < pairs
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width
    step = tl.arange(0, BLOCK_K)
    rows = x + (pair // k).to(tl.int64)[:, None] * hidden
    gates = w + expert * (2 * width * hidden) + column[None, :].to(tl.int64) * hidden
    ups = gates + width * hidden
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for lo in range(0, hidden, BLOCK_K):
        at = lo + step
        a = tl.load(rows + at[None, :], real[:, None] & (at < hidden)[None, :], other=0.0)
        wanted = (at < hidden)[:, None] & inside[None, :]
        gate = tl.dot(a, tl.load(gates + at[:, None], wanted, other=0.0), gate, input_precision="ieee")
        up = tl.dot(a, tl.load(ups + at[:, None], wanted, other=0.0), up, input_precision="ieee")
    value = (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty)
    tl.store(out + pair.to(tl.int64)[:, None] * width + column[None, :], value, real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _down(
    x, w, out, weights, tile_pairs, tile_experts, tile_count, pairs, width, hidden,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    if tile >= tl.load(tile_count):
        return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    pair = tl.load(tile_pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair < pairs
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < hidden
    step = tl.arange(0, BLOCK_K)
    rows = x + pair.to(tl.int64)[:, None] * width
    columns = w + expert * (hidden * width) + column[None, :].to(tl.int64) * width
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for lo in range(0, width, BLOCK_K):
        at = lo + step
        a = tl.load(rows + at[None, :], real[:, None] & (at < width)[None, :], other=0.0)
        b = tl.load(columns + at[:, None], (at < width)[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    acc *= tl.load(weights + pair, real, other=0.0)[:, None]
    tl.store(out + pair.to(tl.int64)[:, None] * hidden + column[None, :], acc, real[:, None] & inside[None, :])


@triton.jit
def _sum_parts(parts, ids, shared, out, hidden, k, HAS_SHARED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(k):
        held = tl.load(ids + row * k + i) >= 0
        acc += tl.load(parts + (row * k + i) * hidden + column, inside & held, other=0.0)
    if HAS_SHARED:
        acc += tl.load(shared + row * hidden + column, inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, acc.to(out.dtype.element_ty), inside)
