"""Top-k selection with page-table transform: from an indexer's scores to the cache slots that a row attends to.

Of each row the k best of its visible positions are selected, and written twice: as positions (raw, counted from the
row's start) and as physical cache slots. Deterministic backends list positions in ascending order, so that ranks and
routes agree.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

TieBreak = Literal["none", "small", "large"]


@dataclass
class TopKMetadata:
    """Where each row's positions are in the cache.

    Raises ValueError for a page size that is not a power of two, and for tensors that do not fit together.
    """

    page_table: torch.Tensor  # [tables, entries] int32, physical page of each `page_size` positions
    lengths: torch.Tensor  # [rows] int32, visible positions of each row, >= 0
    page_size: int  # 1 or a power of two
    k: int
    planned: bool  # whether a plan is made: the builder decides, by the backend's needs_plan
    row_to_table: torch.Tensor | None = None  # [rows] int32; None = row i uses table i
    row_starts: torch.Tensor | None = None  # [rows] int32, first score column of each row (packed prefill)
    table_starts: torch.Tensor | None = None  # [rows] int32, first page-table entry of each row
    # Rows longer than k, the longest first: [1 + rows, 2] int32. Row 0 is (their number, the greatest length), the
    # next ones (row, length), the rest -1.
    plan: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be 1 or a power of two, got {self.page_size}")
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")
        rows = self.lengths.shape[0]
        for name in ("lengths", "row_to_table", "row_starts", "table_starts"):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.dtype != torch.int32 or tensor.shape != (rows,)):
                raise ValueError(f"{name} must be int32 [{rows}], got {tensor.dtype} {list(tensor.shape)}")
        if self.page_table.dtype != torch.int32 or self.page_table.dim() != 2:
            raise ValueError(f"page_table must be int32 [tables, entries], got {self.page_table.dtype}")
        if self.row_to_table is None and self.page_table.shape[0] != rows:
            raise ValueError(f"page_table has {self.page_table.shape[0]} tables for {rows} rows: give row_to_table")
        if self.row_starts is not None and self.table_starts is None and self.page_size > 1:
            raise ValueError("row_starts with a page_size above 1 need table_starts")
        if self.planned:
            self.plan = torch.empty(1 + rows, 2, dtype=torch.int32, device=self.lengths.device)
            self._fill_plan(self.plan)

    @property
    def max_length(self) -> int:
        """Positions that a table can name."""
        return self.page_table.shape[1] * self.page_size

    def copy_from(self, new: "TopKMetadata") -> None:
        """Takes over the values of another step's metadata; every tensor keeps its address (for CUDA graphs).

        Raises ValueError if anything static differs: page size, k, planned, or the shape or presence of a tensor.
        """
        for name in ("page_size", "k", "planned"):
            if getattr(self, name) != getattr(new, name):
                raise ValueError(f"{name} is {getattr(self, name)} and cannot become {getattr(new, name)}")
        names = ("page_table", "lengths", "row_to_table", "row_starts", "table_starts", "plan")
        pairs = [(name, getattr(self, name), getattr(new, name)) for name in names]
        for name, mine, theirs in pairs:
            if _shape(mine) != _shape(theirs):
                raise ValueError(f"{name} has shape {_shape(mine)} and cannot take {_shape(theirs)}")
        for _, mine, theirs in pairs:
            if mine is not None:
                mine.copy_(theirs)

    def _fill_plan(self, plan: torch.Tensor) -> None:
        lengths, rows = self.lengths.sort(descending=True, stable=True)
        long = lengths > self.k
        plan[0, 0] = long.sum()
        plan[0, 1] = lengths[0] if lengths.numel() else 0
        plan[1:, 0] = torch.where(long, rows.int(), -1)
        plan[1:, 1] = torch.where(long, lengths, -1)


class TopKBackend(Protocol):
    """Kernels of the selection. Chosen by name when the engine is built; a call makes no decision."""

    name: str
    needs_plan: bool  # what the builder of its metadata gives as `planned`

    def select(self, scores: torch.Tensor, metadata: TopKMetadata, physical: torch.Tensor, raw: torch.Tensor) -> None:
        """Writes whole rows of physical and raw [rows, k] int32, contiguous, the caller's: the min(length, k) selected
        (deterministic backends: in ascending order of position), then -1.

        scores [rows, width] float32; rows may be padded (a view), and are not copied. What stands at positions that a
        row does not see, or in a row of no more than k positions, does not matter. Free of NaN otherwise.
        """


class TorchTopK:
    """The reference, always deterministic. Of equal scores the last (large) or the first positions are kept."""

    name = "torch"
    needs_plan = False

    def __init__(self, tie_break: TieBreak) -> None:
        self._keeps_last = tie_break == "large"

    def select(self, scores: torch.Tensor, metadata: TopKMetadata, physical: torch.Tensor, raw: torch.Tensor) -> None:
        k = metadata.k
        columns = torch.arange(scores.shape[1], device=scores.device, dtype=torch.int32)
        lengths = metadata.lengths[:, None]
        if metadata.row_starts is not None:
            starts = metadata.row_starts[:, None]
            visible = (columns >= starts) & (columns < starts + lengths)
        else:
            visible = columns < lengths
        if scores.shape[1] > k:
            visible = torch.where(lengths > k, self._best(scores, visible, k), visible)
        # Each chosen column goes to its rank among them, all others to one place past the end: no size depends on
        # values, so that a CUDA graph can hold this.
        rank = torch.where(visible, visible.cumsum(-1) - 1, k)
        ranked = raw.new_full((raw.shape[0], k + 1), -1).scatter_(1, rank, columns.expand_as(rank))
        if metadata.row_starts is not None:
            ranked = torch.where(ranked < 0, ranked, ranked - metadata.row_starts[:, None])
        raw.copy_(ranked[:, :k])
        translate(raw, metadata, physical)

    def _best(self, scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
        """Mask of the k best visible columns of every row that has more than k."""
        seen = scores.masked_fill(~visible, -torch.inf)
        least = seen.topk(k, dim=-1, sorted=True).values[:, -1:]
        above = seen > least
        equal = (seen == least) & visible
        needed = k - above.sum(-1, keepdim=True)
        if self._keeps_last:
            order = equal.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
        else:
            order = equal.cumsum(-1, dtype=torch.int32)
        return above | (equal & (order <= needed))


def translate(raw: torch.Tensor, metadata: TopKMetadata, physical: torch.Tensor) -> None:
    """physical = page_table[row, start + raw // page_size] * page_size + raw % page_size; -1 stays -1.

    raw, physical [rows, k] int32. `start` is the row's table_starts, or its row_starts, or 0.
    """
    shift = metadata.page_size.bit_length() - 1
    position = raw.clamp(min=0)
    entries = position >> shift
    starts = metadata.table_starts if metadata.table_starts is not None else metadata.row_starts
    if starts is not None:
        entries = entries + starts[:, None]
    if metadata.row_to_table is None:
        pages = metadata.page_table.gather(1, entries.long())
    else:
        pages = metadata.page_table[metadata.row_to_table[:, None].long(), entries.long()]
    slots = (pages << shift) | (position & (metadata.page_size - 1))
    torch.where(raw < 0, raw, slots, out=physical)


def _shape(tensor: torch.Tensor | None) -> list[int] | None:
    return None if tensor is None else list(tensor.shape)
