"""Attention of prefill chunks, packed: every chunk's queries over its sequence's keys, causal, in one launch of any
lengths (FlashAttention-2, arXiv 2307.08691)."""

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634


def prefill_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: torch.Tensor, block_m: int, scale: float
) -> torch.Tensor:
    """q [rows, heads, d], k [context, heads, d], v [context, heads, dv], any strides but the last
    -> [rows, heads, dv].

    tiles [tiles, 4] int32: of every tile of up to block_m rows of a chunk its first row, the end of its chunk's rows,
    its chunk's first key, and the difference between the number of a row and that of the last key that it sees.
    """
    rows, heads, dim = q.shape
    value_dim = v.shape[-1]
    out = q.new_empty(rows, heads, value_dim)
    if not rows:
        return out
    main = 1 << (dim.bit_length() - 1)  # tensor cores take powers of two: 192 = 128 + 64
    float32 = q.dtype == torch.float32
    _prefill[(tiles.shape[0], heads)](
        q,
        k,
        v,
        out,
        tiles,
        scale * _LOG2_E,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        DIM=dim,
        VALUE_DIM=value_dim,
        MAIN=main,
        REST=max(16, triton.next_power_of_2(dim - main)) if dim > main else 0,
        VALUE_BLOCK=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_M=block_m,
        BLOCK_N=16 if float32 else 64,
        num_warps=8 if block_m > 64 else 4,
        num_stages=1 if float32 else (3 if dim <= 192 else 2),
    )
    return out


@triton.jit
def _prefill(
    q, k, v, out, tiles, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Tiles in falling order: a chunk's last one has the most keys.
    tile = tiles + (tl.num_programs(0) - 1 - tl.program_id(0)) * 4
    head = tl.program_id(1)
    first, end, start, ahead = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    row = first + tl.arange(0, BLOCK_M)
    real = row < end
    main = tl.arange(0, MAIN)
    query = q + row.to(tl.int64)[:, None] * q_row + head * q_head
    q_main = tl.load(query + main[None, :], real[:, None], other=0.0)
    q_rest = q_main
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        q_rest = tl.load(query + rest[None, :], real[:, None] & (rest < DIM)[None, :], other=0.0)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    stop = tl.minimum(first + BLOCK_M, end) + ahead  # the end of what the tile's last row sees
    seen_by_all = start + (first + ahead + 1 - start) // BLOCK_N * BLOCK_N
    k += head * k_head
    v += head * v_head
    for lo in range(start, seen_by_all, BLOCK_N):
        acc, total, peak = _attend(
            q_main, q_rest, k, v, k_row, v_row, lo, stop, row + ahead, scale, acc, total, peak,
            False, DIM, VALUE_DIM, MAIN, REST, VALUE_BLOCK, BLOCK_N,
        )  # fmt: skip
    for lo in range(seen_by_all, stop, BLOCK_N):
        acc, total, peak = _attend(
            q_main, q_rest, k, v, k_row, v_row, lo, stop, row + ahead, scale, acc, total, peak,
            True, DIM, VALUE_DIM, MAIN, REST, VALUE_BLOCK, BLOCK_N,
        )  # fmt: skip
    channel = tl.arange(0, VALUE_BLOCK)
    target = out + row.to(tl.int64)[:, None] * out_row + head * out_head + channel[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), real[:, None] & (channel < VALUE_DIM)[None, :])


@triton.jit
def _attend(
    q_main, q_rest, k, v, k_row, v_row, lo, stop, last_key, scale, acc, total, peak,
    MASKED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Takes in keys lo to lo + BLOCK_N; MASKED: some of them are past what some rows see, or past `stop`."""
    key = lo + tl.arange(0, BLOCK_N)
    there = key < stop
    main, channel = tl.arange(0, MAIN), tl.arange(0, VALUE_BLOCK)
    at = k + key.to(tl.int64)[None, :] * k_row
    if MASKED:
        k_main = tl.load(at + main[:, None], there[None, :], other=0.0)
    else:
        k_main = tl.load(at + main[:, None])
    score = tl.dot(q_main, k_main, input_precision="ieee")
    if REST > 0:
        rest = MAIN + tl.arange(0, REST)
        k_rest = tl.load(at + rest[:, None], there[None, :] & (rest < DIM)[:, None], other=0.0)
        score = tl.dot(q_rest, k_rest, score, input_precision="ieee")
    score *= scale
    if MASKED:
        score = tl.where(key[None, :] <= last_key[:, None], score, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1))  # finite: every row sees its chunk's first key
    weight = tl.exp2(score - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weight, 1)
    values = tl.load(
        v + key.to(tl.int64)[:, None] * v_row + channel[None, :],
        there[:, None] & (channel < VALUE_DIM)[None, :],
        other=0.0,
    )
    acc = tl.dot(weight.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_peak
