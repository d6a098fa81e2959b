"""Metadata of the selection: what it refuses, when it plans, and that its addresses survive a step."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from layers.attention.topk import TopKMetadata


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make(sizes: tuple[int, ...] = (5, 3), **changes: Any) -> TopKMetadata:
    fields = {"page_table": torch.arange(8, dtype=torch.int32).view(2, 4), "lengths": ints(*sizes)}
    return TopKMetadata(**fields | {"page_size": 64, "k": 4, "planned": False} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size must be 1 or a power of two, got 0"),
        ({"page_size": 48}, "page_size must be 1 or a power of two, got 48"),
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"lengths": torch.tensor([5, 3])}, r"lengths must be int32 \[2\], got torch.int64"),
        ({"page_table": torch.zeros(2, 4)}, "page_table must be int32"),
        ({"page_table": torch.zeros(3, 4, dtype=torch.int32)}, "3 tables for 2 rows: give row_to_table"),
        ({"row_to_table": ints(0)}, r"row_to_table must be int32 \[2\], got torch.int32 \[1\]"),
        ({"row_starts": ints(0, 1)}, "row_starts with a page_size above 1 need table_starts"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize("page_size", [1, 2, 64, 1 << 20])
def test_the_greatest_length_follows_from_the_table(page_size: int) -> None:
    assert make(page_size=page_size).max_length == 4 * page_size


def test_whether_to_plan_must_be_said() -> None:
    with pytest.raises(TypeError, match="planned"):
        TopKMetadata(ints(0).view(1, 1), ints(1), 1, 1)  # type: ignore[call-arg]


def test_not_planning_leaves_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOAL_TOPK_PLAN", "TOPK_PLAN", "SGLANG_OPT_USE_TOPK_V2"):
        monkeypatch.setenv(name, "1")
    assert make().plan is None


def test_a_plan_lists_the_rows_to_score_longest_first() -> None:
    table = torch.zeros(5, 4, dtype=torch.int32)
    plan = make((5, 3, 200, 4, 200), page_table=table, planned=True).plan
    assert plan is not None
    assert plan.tolist() == [[3, 200], [2, 200], [4, 200], [0, 5], [-1, -1], [-1, -1]]


def test_copying_keeps_addresses_and_takes_values() -> None:
    optional = {"row_to_table": ints(0, 1), "row_starts": ints(0, 0), "table_starts": ints(0, 0)}
    kept = make(planned=True, **optional)
    new = make(
        (1, 250),
        page_table=torch.arange(8, 16, dtype=torch.int32).view(2, 4),
        planned=True,
        row_to_table=ints(1, 0),
        row_starts=ints(2, 64),
        table_starts=ints(0, 1),
    )
    names = ["page_table", "lengths", "row_to_table", "row_starts", "table_starts", "plan"]
    addresses = [getattr(kept, name).data_ptr() for name in names]
    kept.copy_from(new)
    assert [getattr(kept, name).data_ptr() for name in names] == addresses
    assert all(torch.equal(getattr(kept, name), getattr(new, name)) for name in names)
    assert kept.plan is not None and kept.plan.tolist() == [[1, 250], [1, 250], [-1, -1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 32}, "page_size is 64 and cannot become 32"),
        ({"k": 5}, "k is 4 and cannot become 5"),
        ({"planned": True}, "planned is False and cannot become True"),
        (
            {"page_table": torch.zeros(2, 5, dtype=torch.int32)},
            r"page_table has shape \[2, 4\] and cannot take \[2, 5\]",
        ),
        ({"row_to_table": ints(0, 1)}, r"row_to_table has shape None and cannot take \[2\]"),
    ],
)
def test_static_fields_do_not_change(changes: dict[str, Any], message: str) -> None:
    kept = make()
    before = replace(kept, page_table=kept.page_table.clone(), lengths=kept.lengths.clone())
    with pytest.raises(ValueError, match=message):
        kept.copy_from(make((1, 1), **changes))
    assert torch.equal(kept.page_table, before.page_table) and torch.equal(kept.lengths, before.lengths)


def test_another_number_of_rows_is_refused() -> None:
    wide = TopKMetadata(torch.zeros(3, 4, dtype=torch.int32), ints(1, 1, 1), 64, 4, False)
    with pytest.raises(ValueError, match=r"page_table has shape \[2, 4\] and cannot take \[3, 4\]"):
        make().copy_from(wide)
