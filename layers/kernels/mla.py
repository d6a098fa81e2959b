"""Split-KV attention of paged rows over latents, for queries that are absorbed: one kernel, with its reduction.

A program attends with up to 64 (row, head) pairs of a group to one part of the group's positions. When a group has
several parts each leaves its partial result in a workspace; the last program to arrive (a counter tells) combines them
in order, so that the result does not depend on who is last, and sets the counter back to zero.
"""

import torch
import triton
import triton.language as tl

from configs.engine import PAGE_SIZE

MAX_SPLITS = 32
_LOG2_E = 1.4426950408889634


def mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor | None,
    table: torch.Tensor,
    rows_per_group: int,
    num_splits: int,
    scale: float,
    value_dim: int,
    out: torch.Tensor,
    workspace: torch.Tensor,
    counters: torch.Tensor,
) -> None:
    """Every row over its positions, at most `num_splits` parts of them at a time.

    q [rows, heads, d], contiguous; cache [pages, page_size, d]; out [rows, heads, value_dim].
    Dense: table [groups, pages] int32 is a block table and lengths [rows] int32 says how much a row sees;
    rows_per_group neighbouring rows share a group. Sparse (lengths is None): table [rows, k] int32 holds cache slots,
    -1 = none, and rows_per_group is 1. A row without positions gives zeros.
    workspace: float32, `workspace_size` of groups * blocks * num_splits where num_splits > 1; counters: int32, zero,
    one for each (group, block), zero again afterwards.
    """
    rows, heads, dim = q.shape
    if not rows:
        return
    groups = rows // rows_per_group
    per_group = rows_per_group * heads
    m = block_m(per_group)
    blocks = triton.cdiv(per_group, m)
    float32 = q.dtype == torch.float32
    _mla_decode[(num_splits, blocks, groups)](
        q,
        cache,
        lengths,
        table,
        out,
        workspace,
        counters,
        scale * _LOG2_E,
        heads,
        rows_per_group,
        table.shape[1],
        table.stride(0),
        cache.stride(1),
        SPARSE=lengths is None,
        LATENT=value_dim,
        ROPE=dim - value_dim,
        LATENT_BLOCK=max(16, triton.next_power_of_2(value_dim)),
        ROPE_BLOCK=max(16, triton.next_power_of_2(dim - value_dim)),
        PAGE=PAGE_SIZE,
        BLOCK_M=m,
        SPLITS_BLOCK=triton.next_power_of_2(num_splits),
        REDUCE_UNROLL=4,
        BLOCK_N=16 if float32 else 64,
        num_warps=4 if m <= 16 else 8,
        num_stages=1 if float32 else 2,
    )


def workspace_size(num_programs: int, value_dim: int) -> int:
    """float32 elements that up to `num_programs` partial results take."""
    return num_programs * 64 * (max(16, triton.next_power_of_2(value_dim)) + 2)


def block_m(per_group: int) -> int:
    """(row, head) pairs that a program takes."""
    return min(64, max(16, triton.next_power_of_2(per_group)))


@triton.jit(do_not_specialize=["lengths", "rows_per_group", "table_width", "table_stride"])
def _mla_decode(
    q,
    cache,
    lengths,
    table,
    out,
    workspace,
    counters,
    scale,
    heads,
    rows_per_group,
    table_width,
    table_stride,
    entry_stride,
    SPARSE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    REDUCE_UNROLL: tl.constexpr,
):
    split, block, group = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_splits = tl.num_programs(0)
    member = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = member < rows_per_group * heads
    row = group * rows_per_group + member // heads
    if SPARSE:
        visible = tl.where(real, table_width, 0)
    else:
        visible = tl.load(lengths + row, real, other=0)
    tiles = tl.cdiv(tl.max(visible, 0), BLOCK_N)
    per_split = tl.maximum(tl.cdiv(tiles, num_splits), 2)  # a part costs more than a tile
    active = tl.cdiv(tiles, per_split)
    if split >= tl.maximum(active, 1):
        return
    latent = tl.arange(0, LATENT_BLOCK)
    rope = tl.arange(0, ROPE_BLOCK)
    in_latent, in_rope = latent < LATENT, rope < ROPE
    query = q + (group * rows_per_group * heads + member)[:, None] * (LATENT + ROPE)
    q_latent = tl.load(query + latent[None, :], real[:, None] & in_latent[None, :], other=0.0)
    q_rope = tl.load(query + LATENT + rope[None, :], real[:, None] & in_rope[None, :], other=0.0)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, LATENT_BLOCK], tl.float32)
    column = tl.arange(0, BLOCK_N)
    for tile in range(split * per_split, tl.minimum((split + 1) * per_split, tiles)):
        position = tile * BLOCK_N + column
        if SPARSE:
            slot = tl.load(table + group * table_stride + position, position < table_width, other=-1).to(tl.int64)
            there = slot >= 0
            seen = there[None, :] & real[:, None]
        else:
            page = tl.load(table + group * table_stride + tile * BLOCK_N // PAGE).to(tl.int64)
            slot = page * PAGE + tile * BLOCK_N % PAGE + column
            there = position < table_width * PAGE
            seen = position[None, :] < visible[:, None]
            there = tl.max(seen.to(tl.int32), 0) > 0
        entry = cache + slot[:, None] * entry_stride
        keys = tl.load(entry + latent[None, :], there[:, None] & in_latent[None, :], other=0.0)
        key_ropes = tl.load(entry + LATENT + rope[None, :], there[:, None] & in_rope[None, :], other=0.0)
        score = tl.dot(q_latent, tl.trans(keys), input_precision="ieee")
        score = tl.dot(q_rope, tl.trans(key_ropes), score, input_precision="ieee") * scale
        score = tl.where(seen, score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # nothing seen yet: keeps exp2(-inf - x) at 0
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(keys.dtype), keys, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    target = out + (group * rows_per_group * heads + member)[:, None] * LATENT + latent[None, :]
    wanted = real[:, None] & in_latent[None, :]
    if active <= 1:
        tl.store(target, (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty), wanted)
        return
    first = (group * tl.num_programs(1) + block) * num_splits
    member = tl.arange(0, BLOCK_M)
    area: tl.constexpr = BLOCK_M * (LATENT_BLOCK + 2)
    mine = workspace + (first + split) * area
    cell = member[:, None] * LATENT_BLOCK + latent[None, :]
    tl.store(mine + cell, acc)
    tl.store(mine + BLOCK_M * LATENT_BLOCK + member, peak)
    tl.store(mine + BLOCK_M * (LATENT_BLOCK + 1) + member, total)
    tl.debug_barrier()  # all of the program's stores come before its arrival
    counter = counters + group * tl.num_programs(1) + block
    if tl.atomic_add(counter, 1, sem="acq_rel") == active - 1:
        part = tl.arange(0, SPLITS_BLOCK)
        cells = workspace + (first + part)[:, None] * area + BLOCK_M * LATENT_BLOCK + member[None, :]
        there = (part < active)[:, None]
        peaks = tl.load(cells, there, other=-float("inf"), cache_modifier=".cg")
        totals = tl.load(cells + BLOCK_M, there, other=0.0, cache_modifier=".cg")
        peak = tl.max(peaks, 0)
        base = tl.where(peak == -float("inf"), 0.0, peak)
        total = tl.sum(totals * tl.exp2(peaks - base[None, :]), 0)
        scale_back = 1 / tl.where(total > 0, total, 1.0)
        acc = tl.zeros([BLOCK_M, LATENT_BLOCK], tl.float32)
        for other in tl.range(active, loop_unroll_factor=REDUCE_UNROLL):
            theirs = workspace + (first + other) * area
            their_peak = tl.load(theirs + BLOCK_M * LATENT_BLOCK + member, cache_modifier=".cg")
            weight = tl.exp2(their_peak - base) * scale_back
            acc += tl.load(theirs + cell, cache_modifier=".cg") * weight[:, None]
        tl.store(target, acc.to(out.dtype.element_ty), wanted)
        tl.store(counter, 0)
