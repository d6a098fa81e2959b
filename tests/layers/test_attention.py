"""The torch attention backend against one row at a time in float64, and MLA absorbed against expanded."""

import pytest
import torch

from configs.base import ConfigError
from configs.hf import load_model_config
from layers.attention import backend as attention_backend
from layers.attention.backend import (
    AttentionBatch,
    PagedRows,
    PrefillRows,
    TorchAttention,
)
from layers.attention.backends import make_attention_backend
from layers.attention.mla import MLA, LayerCache
from layers.rotary import RotaryEmbedding
from tests.layer_context import CPU, fill, layer_context
from tests.oracles import SHIPPED

PAGE = 64
EDGES = [1, 2, 63, 64, 65, 127, 128, 129]
every_head_count = pytest.mark.parametrize("heads", [1, 4, 16])


def generator(seed: int) -> torch.Generator:
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One head of one row in float64: q [d], k [n, d], v [n, dv] -> [dv]."""
    weights = ((k.double() @ q.double()) * scale).exp()
    return weights @ v.double() / weights.sum()


class PagedCache:
    """Sequences of random entries in shuffled pages; unused positions hold large numbers that must not be seen."""

    def __init__(self, lengths: list[int], width: int, seed: int) -> None:
        gen = generator(seed)
        self.lengths = lengths
        self.longest = max(lengths)
        columns = -(-self.longest // PAGE) + 1  # a column to spare, as the slot tables have
        needed = [-(-length // PAGE) for length in lengths]
        shuffled = (1 + torch.randperm(sum(needed) + 3, generator=gen)).tolist()
        self.cache = torch.full((sum(needed) + 5, PAGE, width), 1e3)
        self.table = torch.zeros(len(lengths), columns, dtype=torch.int32)
        for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            pages = [shuffled.pop() for _ in range(count)]
            self.table[row, :count] = torch.tensor(pages)
            self.flat[self.slots(row)] = torch.randn(length, width, generator=gen)

    @property
    def flat(self) -> torch.Tensor:
        return self.cache.view(-1, self.cache.shape[-1])

    def slots(self, row: int, stop: int | None = None) -> torch.Tensor:
        """Physical slots of a sequence's first positions."""
        positions = torch.arange(self.lengths[row] if stop is None else stop)
        return self.table[row, positions // PAGE].long() * PAGE + positions % PAGE

    def rows(self, per_sequence: int = 1) -> PagedRows:
        """The last rows of every sequence; of one that is shorter, the first see nothing."""
        ends = torch.tensor(self.lengths, dtype=torch.int32)[:, None]
        lengths = (ends - per_sequence + 1 + torch.arange(per_sequence, dtype=torch.int32)).clamp(min=0)
        return PagedRows(self.table, lengths.flatten(), per_sequence, self.longest)


def check_decode(
    lengths: list[int], heads: int, seed: int, *, width: int = 24, value_dim: int = 16, per_sequence: int = 1
) -> None:
    paged = PagedCache(lengths, width, seed)
    rows = paged.rows(per_sequence)
    q = torch.randn(len(rows.lengths), heads, width, generator=generator(seed + 1))
    got = TorchAttention().decode(q, paged.cache, rows, scale=0.3, value_dim=value_dim)
    assert got.shape == (len(rows.lengths), heads, value_dim)
    for row, length in enumerate(rows.lengths.tolist()):
        entries = paged.flat[paged.slots(row // per_sequence, length)]
        for head in range(heads):
            want = attend(q[row, head], entries, entries[:, :value_dim], 0.3) if length else torch.zeros(value_dim)
            torch.testing.assert_close(got[row, head].double(), want.double(), rtol=0, atol=1e-5)


@every_head_count
@pytest.mark.parametrize("length", EDGES)
def test_decode_around_page_borders(length: int, heads: int) -> None:
    check_decode([length], heads, seed=length)


@every_head_count
def test_decode_of_mixed_lengths(heads: int) -> None:
    check_decode([129, 1, 64, 2, 127, 65, 300, 63, 128], heads, seed=500)


@pytest.mark.parametrize("heads", [1, 4, 8, 16, 20, 64, 128])
@pytest.mark.parametrize("per_sequence", [1, 2, 3, 4])
def test_verified_rows_see_one_position_more_each(heads: int, per_sequence: int) -> None:
    check_decode([129, 4, 64, 65], heads, seed=520, per_sequence=per_sequence)


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    check_decode([5, 1, 2], 4, seed=540, per_sequence=3)


@pytest.mark.parametrize("heads", [1, 4, 8, 16, 20, 64, 128])
def test_sparse_is_dense_over_the_same_set(heads: int) -> None:
    """In any order, with -1 anywhere at the end of a row; a row of -1 gives zeros."""
    paged = PagedCache([129, 64, 300, 5], 24, seed=560)
    counts, k = [40, 64, 17, 0], 70
    q = torch.randn(4, heads, 24, generator=generator(561))
    slots = torch.full((4, k), -1, dtype=torch.int32)
    gen = generator(562)
    for row, count in enumerate(counts):
        slots[row, :count] = paged.slots(row)[torch.randperm(paged.lengths[row], generator=gen)[:count]].int()
    rows = PagedRows(paged.table, torch.tensor(counts, dtype=torch.int32), 1, 300)
    got = TorchAttention().sparse(q, paged.cache, slots, rows, scale=0.3, value_dim=16)
    assert torch.equal(got[3], torch.zeros(heads, 16))
    for row, count in enumerate(counts[:3]):
        entries = paged.flat[slots[row, :count].long()]
        for head in range(heads):
            want = attend(q[row, head], entries, entries[:, :16], 0.3)
            torch.testing.assert_close(got[row, head].double(), want, rtol=0, atol=1e-5)


def test_sparse_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = PagedCache([300] * 5, 24, seed=570)
    q = torch.randn(5, 4, 24, generator=generator(571))
    slots = torch.stack([paged.slots(row)[::7] for row in range(5)]).int()
    rows = PagedRows(paged.table, torch.full((5,), slots.shape[1], dtype=torch.int32), 1, 300)
    whole = TorchAttention().sparse(q, paged.cache, slots, rows, scale=0.3, value_dim=16)
    monkeypatch.setattr(attention_backend, "_GATHER_LIMIT", 100)
    pieces = TorchAttention().sparse(q, paged.cache, slots, rows, scale=0.3, value_dim=16)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("sequences", "per_sequence", "start"), [(1, 7, 4), (4, 1, None), (3, 2, None), (2, 1, None)])
def test_shares_of_ranks_are_all_rows_in_order(sequences: int, per_sequence: int, start: int | None, size: int) -> None:
    table = torch.arange(sequences * 2, dtype=torch.int32).view(sequences, 2)
    rows = PagedRows(table, torch.arange(1, 1 + sequences * per_sequence, dtype=torch.int32), per_sequence, 128, start)
    shares = [rows.share(rank, size) for rank in range(size)]
    assert len({full for full, _ in shares}) == 1
    assert all(len(share.lengths) <= full for full, share in shares)
    assert torch.equal(torch.cat([share.lengths for _, share in shares]), rows.lengths)
    sizes = [len(share.lengths) for _, share in shares]
    assert sizes == sorted(sizes, reverse=True)
    tables = [share.block_table[i // share.per_sequence] for _, share in shares for i in range(len(share.lengths))]
    assert torch.equal(torch.stack(tables), table.repeat_interleave(per_sequence, dim=0))
    if start is not None:
        at = 0
        for _, share in shares:
            assert not len(share.lengths) or share.start == start + at
            at += len(share.lengths)


def test_decode_of_values_as_wide_as_entries() -> None:
    check_decode([70, 3], 2, seed=600, width=16, value_dim=16)


@pytest.mark.parametrize("limit", [1, 200, 400, 10**6])
def test_decode_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Three pages a row: rows one at a time, one, two, and all at once."""
    paged = PagedCache([129, 5, 64, 130, 1, 65, 100], 24, seed=700)
    q = torch.randn(7, 4, 24, generator=generator(701))
    whole = TorchAttention().decode(q, paged.cache, paged.rows(), scale=0.3, value_dim=16)
    monkeypatch.setattr(attention_backend, "_GATHER_LIMIT", limit)
    check_decode(paged.lengths, 4, seed=700)
    pieces = TorchAttention().decode(q, paged.cache, paged.rows(), scale=0.3, value_dim=16)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-6)


def check_prefill(chunks: list[tuple[int, int]], heads: int, seed: int, dim: int = 24, value_dim: int = 20) -> None:
    """chunks: (start, rows) of each; a row sees its sequence up to itself, and nothing of its neighbours."""
    gen = generator(seed)
    q_offsets, k_offsets = [0], [0]
    for start, count in chunks:
        q_offsets.append(q_offsets[-1] + count)
        k_offsets.append(k_offsets[-1] + start + count)
    q = torch.randn(q_offsets[-1], heads, dim, generator=gen)
    k = torch.randn(k_offsets[-1], heads, dim, generator=gen)
    v = torch.randn(k_offsets[-1], heads, value_dim, generator=gen)
    rows = PrefillRows(q_offsets, k_offsets, torch.arange(k_offsets[-1]))
    got = TorchAttention().prefill(q, k, v, rows, scale=0.3)
    assert got.shape == (q_offsets[-1], heads, value_dim)
    for (start, count), q_lo, k_lo in zip(chunks, q_offsets, k_offsets, strict=False):
        for i in range(count):
            seen = slice(k_lo, k_lo + start + i + 1)
            for head in range(heads):
                want = attend(q[q_lo + i, head], k[seen, head], v[seen, head], 0.3)
                torch.testing.assert_close(got[q_lo + i, head].double(), want, rtol=0, atol=1e-5)


@every_head_count
@pytest.mark.parametrize("chunk", [(0, 1), (0, 2), (0, 65), (1, 1), (64, 1), (63, 2), (129, 3), (1, 64)])
def test_prefill_of_one_chunk(chunk: tuple[int, int], heads: int) -> None:
    check_prefill([chunk], heads, seed=800 + sum(chunk))


@every_head_count
def test_prefill_of_packed_chunks_with_different_starts(heads: int) -> None:
    check_prefill([(0, 5), (64, 1), (0, 1), (7, 9), (127, 2), (1, 1), (0, 20)], heads, seed=900)


def test_backends_have_names() -> None:
    mla = load_model_config(SHIPPED / "tiny-deepseek_v3-yarn").attention
    for name in ("auto", "torch"):
        assert make_attention_backend(name, mla, 4, 64, torch.float32, CPU).name == "torch"
    with pytest.raises(ConfigError, match="attention_backend 'triton' needs a GPU: use 'auto' or 'torch'"):
        make_attention_backend("triton", mla, 4, 64, torch.float32, CPU)
    with pytest.raises(ConfigError, match="attention_backend 'best' is not known"):
        make_attention_backend("best", mla, 4, 64, torch.float32, CPU)


class TestMLA:
    """Decode rows (absorbed) against prefill rows (expanded) of the same sequence."""

    LENGTH = 130

    def layer(self, folder: str, dtype: torch.dtype) -> tuple[MLA, torch.Tensor, LayerCache, RotaryEmbedding]:
        """A layer with random weights, its input, a cache, and its rotary embedding."""
        config = load_model_config(SHIPPED / folder)
        mla = MLA(layer_context(dtype=dtype), config, "mla")
        fill(mla, seed=1000)
        x = torch.randn(self.LENGTH, config.hidden_size, generator=generator(1001))
        cache = LayerCache(torch.zeros(6, PAGE, config.attention.cache_dim, dtype=dtype))
        return mla, x, cache, RotaryEmbedding(config.attention.rope, config.attention.qk_rope_head_dim, 256, CPU)

    def slots(self) -> torch.Tensor:
        positions = torch.arange(self.LENGTH)
        return torch.tensor([4, 1, 2])[positions // PAGE] * PAGE + positions % PAGE

    def decode_rows(self, first: int, stop: int) -> tuple[PagedRows]:
        lengths = torch.arange(first + 1, stop + 1, dtype=torch.int32)
        return (PagedRows(torch.tensor([[4, 1, 2]], dtype=torch.int32).repeat(stop - first, 1), lengths, 1, stop),)

    @pytest.mark.parametrize("folder", ["tiny-deepseek_v3-yarn", "tiny-glm4_moe_lite-noqlora"])
    def test_absorbed_equals_expanded(self, folder: str) -> None:
        mla, x, cache, rope = self.layer(folder, torch.float32)
        n, rotation = self.LENGTH, rope(torch.arange(self.LENGTH))
        prefill = AttentionBatch(self.slots(), (), PrefillRows([0, n], [0, n], self.slots()))
        expanded, _ = mla(x, rotation, cache, prefill, None)
        written = cache.latents.clone()
        absorbed, _ = mla(x, rotation, cache, AttentionBatch(self.slots(), self.decode_rows(0, n)), None)
        assert expanded.abs().mean() > 0.05
        torch.testing.assert_close(absorbed, expanded, rtol=0, atol=1e-5)
        assert torch.equal(cache.latents, written)
        unused = torch.ones(written.shape[0] * PAGE, dtype=torch.bool)
        unused[self.slots()] = False
        assert torch.equal(written.flatten(0, 1)[unused], torch.zeros(int(unused.sum()), written.shape[-1]))
        cache.latents.zero_()
        mla.store(x, rotation, cache, self.slots())
        torch.testing.assert_close(cache.latents, written, rtol=0, atol=1e-6)

    def test_decode_and_prefill_rows_of_one_step(self) -> None:
        """Rows 100 to 129 run as decode rows, before them in the batch but for the chunk of rows 0 to 99's sake."""
        mla, x, cache, rope = self.layer("tiny-deepseek_v3-yarn", torch.float32)
        n, order = self.LENGTH, torch.cat((torch.arange(100, 130), torch.arange(100)))
        whole = AttentionBatch(self.slots(), (), PrefillRows([0, n], [0, n], self.slots()))
        want, _ = mla(x, rope(torch.arange(n)), cache, whole, None)
        chunk = PrefillRows([0, 100], [0, 100], self.slots()[:100])
        mixed = AttentionBatch(self.slots()[order], self.decode_rows(100, n), chunk)
        cache.latents.zero_()
        got, _ = mla(x[order], rope(order), cache, mixed, None)
        torch.testing.assert_close(got, want[order], rtol=0, atol=1e-5)
