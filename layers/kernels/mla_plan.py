"""Work lists for FlashInfer's persistent MLA kernel, written on the device.

FlashInfer plans on the host, from lengths that are then baked into the plan. Here one launch writes the same lists from
the device's lengths, so that nothing waits for the host and a captured step follows whatever lengths it finds.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_ROWS = (64, 512, 8192)  # of a plan: few sizes, since each is compiled
TILE = 64  # positions and heads that the kernel takes at a time


class PlanLayout(NamedTuple):
    """Where the lists lie in the workspace, in int32 elements; `works` lists have one entry for each piece of work."""

    query_start: int
    kv_start_page: int
    partial: int
    merge_start: int
    merge_end: int
    merge_partial_start: int
    merge_partial_end: int
    merge_stride: int
    query_length: int
    kv_length: int
    query_offset: int
    kv_start: int
    kv_end: int
    cluster_start: int


def write_plan(
    workspace: torch.Tensor,
    layout: PlanLayout,
    lengths: torch.Tensor,
    limit: int,
    rows_per_table: int,
    table_stride: int,
    heads: int,
    cluster_size: int,
    num_clusters: int,
) -> None:
    """Deals the 64-position tiles of all rows out to the clusters evenly and in order; a row that several clusters
    share is merged by those of them that are not its first.

    workspace int32; lengths [rows] int32: a row attends to the first min(length, limit) entries that its table row
    lists, `table_stride` elements after the one before; rows_per_table neighbouring rows share a table row; `heads` fit
    one tile of a cluster.
    """
    rows = lengths.shape[0]
    block = next((size for size in _ROWS if size >= rows), triton.next_power_of_2(rows))
    _write_plan[(num_clusters,)](
        workspace,
        lengths,
        rows,
        limit,
        rows_per_table,
        table_stride,
        heads,
        LAYOUT=tuple(layout),
        CLUSTER=cluster_size,
        TILE_SIZE=TILE,
        ROWS_BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
    )


@triton.jit(do_not_specialize=["lengths", "rows", "limit", "rows_per_table", "table_stride"])
def _write_plan(
    workspace,
    lengths,
    rows,
    limit,
    rows_per_table,
    table_stride,
    heads,
    LAYOUT: tl.constexpr,
    CLUSTER: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
):
    cluster, num_clusters = tl.program_id(0), tl.num_programs(0)
    row = tl.arange(0, ROWS_BLOCK)
    real = row < rows
    length = tl.minimum(tl.load(lengths + row, real, other=0), limit)
    tiles = tl.where(real, tl.maximum(tl.cdiv(length, TILE_SIZE), 1), 0)  # an empty row is work, too: it writes zeros
    end = tl.cumsum(tiles, 0)
    start = end - tiles
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), num_clusters), 1)
    first = start // share
    parts = tl.where(real, (end - 1) // share - first + 1, 0)
    is_split = parts > 1
    works_before = tl.cumsum(parts, 0) - parts
    partials = tl.where(is_split, parts * heads, 0)
    partials_before = tl.cumsum(partials, 0) - partials

    lo, hi = cluster * share, cluster * share + share
    mine = real & (start < hi) & (end > lo)
    work = works_before + cluster - first
    tl.store(workspace + LAYOUT[0] + work, row, mine)
    tl.store(workspace + LAYOUT[1] + work, row // rows_per_table * table_stride, mine)
    tl.store(workspace + LAYOUT[2] + work, tl.where(is_split, partials_before + (cluster - first) * heads, -1), mine)
    tl.store(workspace + LAYOUT[8] + work, tl.full([ROWS_BLOCK], 1, tl.int32), mine)
    tl.store(workspace + LAYOUT[9] + work, length, mine)
    tl.store(workspace + LAYOUT[10] + work, tl.zeros([ROWS_BLOCK], tl.int32), mine)
    tl.store(workspace + LAYOUT[11] + work, tl.maximum(lo - start, 0) * TILE_SIZE, mine)
    tl.store(workspace + LAYOUT[12] + work, tl.minimum((tl.minimum(hi, end) - start) * TILE_SIZE, length), mine)
    earlier = tl.sum(tl.minimum(tl.maximum(cluster - first, 0), parts), 0)
    tl.store(workspace + LAYOUT[13] + cluster, earlier)
    if cluster == num_clusters - 1:
        tl.store(workspace + LAYOUT[13] + num_clusters, tl.sum(parts, 0))

    # A row that begins in an earlier cluster and goes on in this one: each such cluster merges some of its heads.
    cut = real & (start < lo) & (end > lo)
    cut_row = tl.sum(tl.where(cut, row, 0), 0)
    count = tl.sum(tl.where(cut, parts, 0), 0)
    base = tl.sum(tl.where(cut, partials_before, 0), 0)
    place = tl.sum(tl.where(cut, cluster - first - 1, 0), 0)
    each = tl.cdiv(heads, tl.maximum((count - 1) * CLUSTER, 1))
    has_cut = count > 0
    for block in tl.static_range(CLUSTER):
        head = tl.minimum((place * CLUSTER + block) * each, heads)
        last = tl.minimum(head + each, heads)
        merge = cluster * CLUSTER + block
        tl.store(workspace + LAYOUT[3] + merge, tl.where(has_cut, cut_row * heads + head, 0))
        tl.store(workspace + LAYOUT[4] + merge, tl.where(has_cut, cut_row * heads + last, 0))
        tl.store(workspace + LAYOUT[5] + merge, tl.where(has_cut, base + head, 0))
        tl.store(workspace + LAYOUT[6] + merge, tl.where(has_cut, base + count * heads, 0))
        tl.store(workspace + LAYOUT[7] + merge, heads)
