"""Index keys in their pages, and scores of them, against the definition."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from layers.attention import index_scores as scores_module
from layers.attention.index_cache import Fp8IndexKeys, PlainIndexKeys, make_index_key_format, quantise_e4m3
from layers.attention.index_scores import index_scores
from layers.parallel import TensorParallel
from tests.layers.ranks import Rank
from tests.oracles import load_reference, oracle_folders

PAGE = 64


def random_keys(rows: int, dim: int, seed: int) -> torch.Tensor:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, dim, generator=generator) * torch.logspace(-3, 3, rows)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_keys_come_back(dtype: torch.dtype) -> None:
    form = PlainIndexKeys(16, dtype)
    cache = torch.zeros(5, *form.page_shape, dtype=form.dtype)
    slots = torch.tensor([3 * PAGE, 3 * PAGE + 63, 64, 0])
    keys = random_keys(4, 16, 1)
    form.store(cache, slots, keys)
    got = form.load(cache, torch.tensor([3, 0, 1], dtype=torch.int32)).flatten(0, 1)[[0, 63, 128, 64]]
    assert torch.equal(got, keys.to(dtype))
    assert cache.flatten(0, 1).any(-1).sum() == 4


def test_a_page_of_fp8_keys_byte_by_byte() -> None:
    """All keys' bytes, then all scales: 132 bytes for each key of 128."""
    form = Fp8IndexKeys(128, torch.float32)
    assert form.page_shape == (PAGE * 132,) and form.dtype == torch.uint8
    cache = torch.zeros(3, *form.page_shape, dtype=torch.uint8)
    keys = random_keys(PAGE, 128, 2)
    order = torch.randperm(PAGE, generator=torch.Generator().manual_seed(3))
    form.store(cache, 2 * PAGE + order, keys[order])
    page = cache[2].numpy().tobytes()
    scales = torch.frombuffer(bytearray(page[PAGE * 128 :]), dtype=torch.float32)
    for row in range(PAGE):
        peak = keys[row].abs().max().item()
        want = 2.0 ** math.ceil(math.log2(peak / 448))
        assert scales[row].item() == want
        stored = torch.frombuffer(bytearray(page[row * 128 : (row + 1) * 128]), dtype=torch.float8_e4m3fn)
        assert torch.equal(stored.float(), (keys[row] / want).to(torch.float8_e4m3fn).float())
    assert not cache[:2].any()
    loaded = form.load(cache, torch.tensor([2], dtype=torch.int32))[0]
    assert ((loaded - keys).abs() <= keys.abs() * 2**-4 + scales[:, None] * 2**-10).all()


def test_scales_are_powers_of_two_that_keep_values_in_range() -> None:
    keys = torch.cat(
        (random_keys(100, 32, 4), torch.zeros(1, 32), torch.full((1, 32), 448.0), torch.full((1, 32), 449.0))
    )
    values, scales = quantise_e4m3(keys)
    assert torch.equal(scales.log2(), scales.log2().round())
    assert values.float().abs().max() <= 448 and values.float().isfinite().all()
    assert (keys.abs().amax(-1) / scales)[:100].min() > 224  # no smaller scale would do
    assert scales[-2:].tolist() == [1.0, 2.0] and not values[100].float().any()


def test_formats_by_name() -> None:
    assert make_index_key_format("auto", 32, torch.bfloat16) == PlainIndexKeys(32, torch.bfloat16)
    assert make_index_key_format("fp8", 32, torch.bfloat16) == Fp8IndexKeys(32, torch.bfloat16)


@pytest.mark.parametrize("limit", [1 << 25, 3 * 128 * 4, 1])
@pytest.mark.parametrize(("sequences", "per_sequence"), [(1, 9), (4, 1), (3, 2)])
def test_scores(monkeypatch: pytest.MonkeyPatch, sequences: int, per_sequence: int, limit: int) -> None:
    """sum_h gate_h relu(q_h . k) in float64, all at once, in blocks of rows, or one row at a time."""
    monkeypatch.setattr(scores_module, "_SCORES_LIMIT", limit)
    rows, heads, dim, pages = sequences * per_sequence, 3, 8, 2
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(rows, heads, dim, generator=generator)
    gates = torch.randn(rows, heads, generator=generator)
    keys = torch.randn(sequences * pages, PAGE, dim, generator=generator)
    out = torch.full((rows, pages * PAGE + 7), 9.0)[:, : pages * PAGE]
    index_scores(q, gates, keys, out, sequences)
    for row in range(rows):
        seen = keys.view(sequences, pages * PAGE, dim)[row // per_sequence].double()
        want = (gates[row].double()[:, None] * (q[row].double() @ seen.T).relu()).sum(0)
        torch.testing.assert_close(out[row].double(), want, rtol=0, atol=1e-5)


SPARSE = oracle_folders("deepseek_v32", "glm_moe_dsa")


@pytest.mark.slow
@pytest.mark.parametrize("folder", SPARSE, ids=lambda folder: folder.name)
def test_fp8_index_keys_change_little(folder: Path) -> None:
    """e4m3 has 4 bits: the first layer, whose input is exact, selects nearly the same positions. What follows is
    compared on average only: random weights amplify every position that flips."""
    rank = Rank(folder, TensorParallel(), "float32", index_cache_dtype="fp8")
    first, agreed = [], []
    for prompt in load_reference(folder).prompts:
        chosen, want = rank.selections(prompt.ids)[0], prompt.indexers[0].positions
        for mine, theirs in zip(chosen.tolist(), want.tolist(), strict=True):
            first.append(len(set(mine) & set(theirs)) / len(set(theirs)))
        got = torch.from_numpy(rank.logits(prompt.ids, 7))
        agreed += (got.argmax(-1) == prompt.logits.argmax(-1)).tolist()
    assert np.mean(first) > 0.95
    assert np.mean(agreed) > 0.4
