"""Sparse attention against the references: which positions indexers select, and that all ranks agree on them."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from layers.parallel import TensorParallel
from tests.layers.ranks import Rank, TwoRanks
from tests.oracles import PromptReference, load_reference, oracle_folders

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4  # of float32 logits
TIE = 1e-5  # gaps of index scores below which another position is no error
EXCHANGES = ["replicated", "leader", "sharded"]

TYPES = ("deepseek_v32", "glm_moe_dsa")
FOLDERS = oracle_folders(*TYPES) + oracle_folders(*TYPES, quantised=True)
every_oracle = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@lru_cache(maxsize=1)
def one_rank(folder: Path) -> Rank:
    return Rank(folder, TensorParallel(), "float32")


def check(got: dict[int, torch.Tensor], prompt: PromptReference) -> None:
    assert sorted(got) == sorted(prompt.indexers)
    for layer, want in prompt.indexers.items():
        decided = want.gaps > TIE
        assert decided.float().mean() > 0.9
        # The reference lists positions ascending with -1 last.
        assert torch.equal(got[layer][decided], want.positions[decided].long()), f"layer {layer}"


@every_oracle
def test_indexers_select_the_same_positions(folder: Path) -> None:
    for prompt in load_reference(folder).prompts:
        check(one_rank(folder).selections(prompt.ids), prompt)


@pytest.mark.parametrize("folder", oracle_folders(*TYPES) or FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_two_ranks_agree(folder: Path, exchange: str, two_ranks: TwoRanks) -> None:
    short, prompt = load_reference(folder).prompts[:2]
    zero, one = two_ranks.call_all(folder, 1, "float32", "selections", prompt.ids, topk_exchange=exchange)
    check(zero, prompt)
    assert all(torch.equal(zero[layer], one[layer]) for layer in zero)
    for chunk in (1000, 7):
        got = two_ranks.call(folder, 1, "float32", "logits", prompt.ids, chunk, topk_exchange=exchange)
        assert np.abs(got - prompt.logits.numpy()).max() <= TOLERANCE
    decoded = two_ranks.call(folder, 1, "float32", "decoded_logits", short.ids, topk_exchange=exchange)
    assert np.abs(decoded - short.logits.numpy()).max() <= TOLERANCE
