"""The work lists written for FlashInfer's MLA kernel, carried out by torch the way the kernel does."""

import pytest
import torch

from tests.kernels import DEVICE

pytest.importorskip("triton")

from layers.kernels.mla_plan import TILE, PlanLayout, write_plan

WORKS = 512
LATENT, ROPE, SCALE = 16, 8, 0.2
MERGE = 64


def layout() -> PlanLayout:
    """Lists of WORKS entries, those of merges of MERGE."""
    offsets, at = [], 0
    for i in range(len(PlanLayout._fields)):
        offsets.append(at)
        at += MERGE if 3 <= i <= 7 else WORKS
    return PlanLayout(*offsets)


def carry_out(
    plan: dict[str, list[int]], q: torch.Tensor, flat: torch.Tensor, pages: torch.Tensor, page_size: int, clusters: int
) -> torch.Tensor:
    """Every piece of work, then the merges; NaN where nothing was written."""
    rows, heads, _ = q.shape
    out = torch.full((rows * heads, LATENT), float("nan"), dtype=torch.float64)
    partial_out = torch.full((4096, LATENT), float("nan"), dtype=torch.float64)
    partial_sum = torch.full((4096,), float("nan"), dtype=torch.float64)
    starts = plan["cluster_start"][: clusters + 1]
    assert starts[0] == 0 and starts == sorted(starts)
    loads = []
    for cluster in range(clusters):
        loads.append(0)
        for work in range(starts[cluster], starts[cluster + 1]):
            row, lo, hi = (plan[name][work] for name in ("query_start", "kv_start", "kv_end"))
            assert plan["query_length"][work] == 1 and plan["query_offset"][work] == 0
            assert lo % TILE == 0 and lo <= hi <= plan["kv_length"][work]
            loads[-1] += max(1, -(-(hi - lo) // TILE))
            positions = torch.arange(lo, hi)
            page = pages[plan["kv_start_page"][work] + positions // page_size].long()
            entries = flat[page * page_size + positions % page_size].double()
            scores = q[row].double() @ entries.T * SCALE
            result = scores.softmax(-1) @ entries[:, :LATENT] if hi > lo else torch.zeros(heads, LATENT).double()
            at = plan["partial"][work]
            if at < 0:
                out[row * heads : (row + 1) * heads] = result
            else:
                partial_out[at : at + heads] = result
                partial_sum[at : at + heads] = scores.logsumexp(-1)
    assert max(loads) <= -(-sum(loads) // clusters)
    for merge in range(MERGE):
        start, end = plan["merge_start"][merge], plan["merge_end"][merge]
        for i in range(end - start):
            span = slice(plan["merge_partial_start"][merge] + i, plan["merge_partial_end"][merge], heads)
            assert out[start + i].isnan().all()  # written once
            weights = partial_sum[span].softmax(-1)
            out[start + i] = weights @ partial_out[span]
    return out.view(rows, heads, LATENT)


@pytest.mark.parametrize("cluster_size", [1, 2])
@pytest.mark.parametrize("clusters", [1, 3, 20])
@pytest.mark.parametrize(
    ("lengths", "per_table", "page_size"),
    [
        ([1], 1, 64),
        ([1500], 1, 64),
        ([0, 1, 63, 64, 65, 127, 128, 129, 0], 1, 64),
        ([700, 3, 900, 64, 640], 1, 64),
        ([299, 300, 301, 1, 2, 3], 3, 64),
        ([130, 40, 0, 200, 500], 1, 1),
    ],
)
def test_carried_out_it_is_attention(
    lengths: list[int], per_table: int, page_size: int, clusters: int, cluster_size: int
) -> None:
    rows, heads, limit = len(lengths), 5, 300 if page_size == 1 else 4096
    print(f"seed {rows}")
    gen = torch.Generator().manual_seed(rows)
    width = -(-max(lengths) // page_size) + 2
    pages = torch.randperm(rows // per_table * width, generator=gen).view(rows // per_table, width).int()
    flat = torch.randn(pages.numel() * page_size, LATENT + ROPE, generator=gen)
    q = torch.randn(rows, heads, LATENT + ROPE, generator=gen)
    workspace = torch.full((layout().cluster_start + WORKS,), -9, dtype=torch.int32, device=DEVICE)
    given = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    write_plan(workspace, layout(), given, limit, per_table, width, heads, cluster_size, clusters)
    written = workspace.tolist()
    # Merges past the blocks of the grid are not looked at.
    used = clusters * cluster_size
    plan = {
        name: [*written[at : at + used], *[0] * (MERGE - used)] if "merge" in name else written[at : at + WORKS]
        for name, at in layout()._asdict().items()
    }
    got = carry_out(plan, q, flat, pages.flatten(), page_size, clusters)
    for row, length in enumerate(lengths):
        positions = torch.arange(min(length, limit))
        page = pages[row // per_table][positions // page_size].long()
        entries = flat[page * page_size + positions % page_size].double()
        want = torch.zeros(heads, LATENT).double()
        if length:
            want = (q[row].double() @ entries.T * SCALE).softmax(-1) @ entries[:, :LATENT]
        torch.testing.assert_close(got[row], want)
