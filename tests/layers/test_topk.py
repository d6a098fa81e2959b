"""Top-k selection with page-table transform against the definition, row by row in plain Python."""

import pytest
import torch

from configs.base import ConfigError
from layers.attention.topk import TopKMetadata, TorchTopK, translate
from layers.attention.topk_backends import make_topk_backend

CPU = torch.device("cpu")
POISON = 987_654

every_page_size = pytest.mark.parametrize("page_size", [1, 2, 64, 256])
either_tie_break = pytest.mark.parametrize("tie_break", ["small", "large"])


def generator(seed: int) -> torch.Generator:
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def metadata(lengths: list[int], k: int, page_size: int, width: int, seed: int, **fields: torch.Tensor) -> TopKMetadata:
    """Every row with shuffled pages of its own."""
    rows, entries = len(lengths), -(-width // page_size)
    pages = torch.randperm(rows * entries, generator=generator(seed)).view(rows, entries).int()
    return TopKMetadata(pages, torch.tensor(lengths, dtype=torch.int32), page_size, k, False, **fields)


def select(scores: torch.Tensor, meta: TopKMetadata, tie_break: str = "small") -> tuple[list, list]:
    """Physical and raw indices as lists; the outputs are poisoned first."""
    physical, raw = torch.full((2, len(meta.lengths), meta.k), POISON, dtype=torch.int32)
    TorchTopK(tie_break).select(scores, meta, physical, raw)
    return physical.tolist(), raw.tolist()


def definition(scores: torch.Tensor, meta: TopKMetadata, tie_break: str = "small") -> tuple[list, list]:
    tables, size = meta.page_table.tolist(), meta.page_size
    all_physical, all_raw = [], []
    for row, length in enumerate(meta.lengths.tolist()):
        start = int(meta.row_starts[row]) if meta.row_starts is not None else 0
        entry = int(meta.table_starts[row]) if meta.table_starts is not None else start
        seen = scores[row, start : start + length].tolist()
        if length <= meta.k:
            chosen = list(range(length))
        else:
            sign = 1 if tie_break == "small" else -1
            chosen = sorted(sorted(range(length), key=lambda i: (-seen[i], sign * i))[: meta.k])
        table = tables[int(meta.row_to_table[row]) if meta.row_to_table is not None else row]
        slots = [table[entry + i // size] * size + i % size for i in chosen]
        rest = [-1] * (meta.k - len(chosen))
        all_raw.append(chosen + rest)
        all_physical.append(slots + rest)
    return all_physical, all_raw


def check(scores: torch.Tensor, meta: TopKMetadata, tie_break: str = "small") -> None:
    before = scores.clone()
    assert select(scores, meta, tie_break) == definition(scores, meta, tie_break)
    assert torch.equal(scores.nan_to_num(7), before.nan_to_num(7))


@every_page_size
@either_tie_break
@pytest.mark.parametrize("lengths", [[0], [1], [15], [16], [17], [300], [300, 0, 16, 1, 17, 15, 299, 128]], ids=str)
def test_lengths_around_k(lengths: list[int], tie_break: str, page_size: int) -> None:
    scores = torch.randn(len(lengths), 300, generator=generator(1))
    check(scores, metadata(lengths, 16, page_size, 300, 2), tie_break)


@either_tie_break
def test_equal_scores(tie_break: str) -> None:
    lengths = [200, 150, 17, 40]
    check(torch.zeros(4, 200), metadata(lengths, 16, 64, 200, 3), tie_break)
    coarse = torch.randn(4, 200, generator=generator(4)).round()
    check(coarse, metadata(lengths, 16, 64, 200, 5), tie_break)


@either_tie_break
def test_minus_infinity_is_a_score_like_any_other(tie_break: str) -> None:
    scores = torch.full((3, 100), -torch.inf)
    scores[0, 40:45] = 1.0
    scores[1, 99] = 0.5
    check(scores, metadata([100, 100, 100], 16, 64, 100, 6), tie_break)


def test_scores_out_of_sight_do_not_matter() -> None:
    """Not of short rows, nor past a row's length: they are not even initialised."""
    scores = torch.randn(4, 128, generator=generator(7))
    lengths = [40, 16, 3, 0]
    want = definition(scores, metadata(lengths, 16, 64, 128, 8))
    for junk in (torch.nan, torch.inf, -torch.inf):
        scores[1:] = junk
        scores[0, 40:] = junk
        assert select(scores, metadata(lengths, 16, 64, 128, 8)) == want


@pytest.mark.parametrize("width", [5, 16])
def test_fewer_columns_than_k(width: int) -> None:
    check(torch.randn(3, width, generator=generator(9)), metadata([width, 2, 0], 16, 1, width, 10))


def test_views_of_wider_tensors() -> None:
    """Padded rows of scores, and strided tables and lengths."""
    wide = torch.randn(5, 400, generator=generator(11))
    plain = metadata([300, 20, 5, 111, 299], 16, 64, 300, 12)
    table = torch.full((10, 9), 10_000, dtype=torch.int32)
    table[::2, 2:7] = plain.page_table
    lengths = torch.stack((plain.lengths, plain.lengths + 7), dim=1)[:, 0]
    strided = TopKMetadata(table[::2, 2:7], lengths, 64, 16, False)
    assert not strided.page_table.is_contiguous() and not strided.lengths.is_contiguous()
    assert select(wide[:, :300], strided) == definition(wide[:, :300], plain)


def test_verified_rows_share_their_sequences_table() -> None:
    """Row i of q rows sees kv - q + 1 + i positions, never fewer than none."""
    kv, q = [200, 2, 64], 4
    ends = torch.tensor(kv)[:, None] - q + 1 + torch.arange(q)
    lengths = ends.clamp(min=0).flatten().int()
    tables = torch.randperm(12, generator=generator(13)).view(3, 4).int()
    row_to_table = torch.arange(3, dtype=torch.int32).repeat_interleave(q)
    meta = TopKMetadata(tables, lengths, 64, 16, False, row_to_table=row_to_table)
    check(torch.randn(12, 256, generator=generator(14)), meta)


@pytest.mark.parametrize("page_size", [1, 64])
def test_packed_prefill_is_one_row_at_a_time(page_size: int) -> None:
    """Rows of three sequences in one score matrix, each with its window of columns and of table entries."""
    spans = [(0, 128), (128, 64), (192, 192)]  # (first column, positions) of each sequence
    starts, lengths, tables = [], [], []
    for sequence, (start, size) in enumerate(spans):
        for length in (1, 16, 17, size):
            starts.append(start)
            lengths.append(length)
            tables.append(sequence)
    meta = TopKMetadata(
        torch.randperm(3 * 384 // page_size, generator=generator(15)).view(3, -1).int(),
        torch.tensor(lengths, dtype=torch.int32),
        page_size,
        16,
        False,
        row_to_table=torch.tensor(tables, dtype=torch.int32),
        row_starts=torch.tensor(starts, dtype=torch.int32),
        table_starts=torch.tensor([start // page_size for start in starts], dtype=torch.int32),
    )
    scores = torch.randn(len(starts), 384, generator=generator(16))
    together = select(scores, meta)
    assert together == definition(scores, meta)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        table = meta.page_table[tables[row] : tables[row] + 1, start // page_size :]
        alone = TopKMetadata(table, torch.tensor([length], dtype=torch.int32), page_size, 16, False)
        physical, raw = select(scores[row : row + 1, start:], alone)
        assert (physical[0], raw[0]) == (together[0][row], together[1][row])


def test_with_a_page_size_of_one_tables_may_start_with_the_row() -> None:
    meta = metadata([30, 5], 16, 1, 60, 17, row_starts=torch.tensor([20, 3], dtype=torch.int32))
    check(torch.randn(2, 60, generator=generator(18)), meta)


def test_the_same_bits_every_time() -> None:
    scores = torch.randn(8, 500, generator=generator(19)).mul(4).round()
    meta = metadata([500] * 8, 64, 64, 512, 20)
    assert all(select(scores, meta) == select(scores, meta) for _ in range(5))


def test_translation_keeps_minus_one() -> None:
    meta = metadata([4, 4], 4, 2, 8, 21)
    raw = torch.tensor([[0, -1, 3, -1], [-1, -1, 1, 2]], dtype=torch.int32)
    out = torch.empty_like(raw)
    translate(raw, meta, out)
    table = meta.page_table.tolist()
    want = [[table[r][p // 2] * 2 + p % 2 if p >= 0 else -1 for p in row] for r, row in enumerate(raw.tolist())]
    assert out.tolist() == want


def test_backends_by_name() -> None:
    names = [make_topk_backend(name, 2048, "small", True, CPU).name for name in ("auto", "torch")]
    assert names == ["torch", "torch"]
    with pytest.raises(ConfigError, match="topk_backend 'fast' is not known"):
        make_topk_backend("fast", 2048, "small", True, CPU)
