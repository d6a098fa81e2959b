"""Triton kernel of the indexer's scores over paged index keys, in the compute type or in e4m3 with scales."""

import torch
import triton
import triton.language as tl

from configs.engine import PAGE_SIZE


def paged_index_scores(
    q: torch.Tensor,
    gates: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    rows_per_table: int,
    out: torch.Tensor,
    num_programs: int,
) -> None:
    """out[t, s] = sum_h gates[t, h] relu(q[t, h] . key s of t's sequence) for s < lengths[t]; the rest is left alone.

    q [rows, heads, d]; gates [rows, heads] float32; keys [pages, page_size, d], or [pages, page_size * (d + 4)] uint8
    (e4m3 keys, then their float32 scales); table [tables, pages] int32; lengths [rows] int32; out [rows, pages *
    page_size] float32, rows may be padded. About `num_programs` programs share the work.
    """
    rows, heads, dim = q.shape
    if not rows:
        return
    fp8 = keys.dtype == torch.uint8
    each = max(1, min(table.shape[1], num_programs // rows))
    values = keys.view(torch.float8_e4m3fn) if fp8 else keys
    scales = keys.view(torch.float32) if fp8 else gates
    _index_scores[(rows, each)](
        q,
        gates,
        values,
        scales,
        table,
        lengths,
        out,
        rows_per_table,
        heads,
        dim,
        table.stride(0),
        out.stride(0),
        FP8=fp8,
        PAGE=PAGE_SIZE,
        HEADS=max(16, triton.next_power_of_2(heads)),
        DIM=max(16, triton.next_power_of_2(dim)),
        num_warps=4,
        num_stages=2 if q.dtype != torch.float32 else 1,
    )


@triton.jit(do_not_specialize=["lengths", "rows_per_table", "table_stride", "out_stride"])
def _index_scores(
    q,
    gates,
    keys,
    scales,
    table,
    lengths,
    out,
    rows_per_table,
    heads,
    dim,
    table_stride,
    out_stride,
    FP8: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, channel, offset = tl.arange(0, HEADS), tl.arange(0, DIM), tl.arange(0, PAGE)
    inside = (head < heads)[:, None] & (channel < dim)[None, :]
    query = tl.load(q + (row * heads + head)[:, None] * dim + channel[None, :], inside, other=0.0)
    gate = tl.load(gates + row * heads + head, head < heads, other=0.0)
    pages = table + row // rows_per_table * table_stride
    for page in range(tl.program_id(1), tl.cdiv(tl.load(lengths + row), PAGE), tl.num_programs(1)):
        number = tl.load(pages + page).to(tl.int64)
        page_bytes = PAGE * (dim + 4) if FP8 else PAGE * dim
        at = keys + number * page_bytes + offset[:, None] * dim + channel[None, :]
        key = tl.load(at, (channel < dim)[None, :], other=0.0).to(query.dtype)
        product = tl.maximum(tl.dot(query, tl.trans(key), input_precision="ieee"), 0.0)
        score = tl.sum(product * gate[:, None], 0)
        if FP8:
            score *= tl.load(scales + number * (page_bytes // 4) + PAGE * dim // 4 + offset)
        tl.store(out + row * out_stride + page * PAGE + offset, score)
