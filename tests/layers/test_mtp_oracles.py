"""MTP modules against the references: their outputs teacher-forced, and the drafts that a step makes with them."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from layers.parallel import TensorParallel
from tests.layers.ranks import Rank, TwoRanks
from tests.oracles import load_reference, oracle_folders

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4  # of float32 logits and hidden states
TIE = 1e-3
CHAIN = 3

ALL = oracle_folders() + oracle_folders(quantised=True)
FOLDERS = [folder for folder in ALL if load_reference(folder).prompts[0].mtp]
PLAIN = [folder for folder in FOLDERS if folder in oracle_folders()]
every_oracle = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def modules(folder: Path) -> int:
    return len(load_reference(folder).prompts[0].mtp)


@lru_cache(maxsize=1)
def one_rank(folder: Path, drafts: int) -> Rank:
    return Rank(folder, TensorParallel(), "float32", num_draft_tokens=drafts)


@every_oracle
@pytest.mark.parametrize("chunk", [1000, 7])
def test_outputs_teacher_forced(folder: Path, chunk: int) -> None:
    for prompt in load_reference(folder).prompts:
        got = one_rank(folder, modules(folder)).mtp_outputs(prompt.ids, chunk)
        for (hidden, logits), want in zip(got, prompt.mtp, strict=True):
            assert np.abs(logits - want.logits.numpy()).max() <= TOLERANCE
            if want.hidden is not None:
                assert np.abs(hidden - want.hidden.numpy()).max() <= TOLERANCE


@every_oracle
@pytest.mark.parametrize("chunk", [1000, 7])
def test_drafts_of_a_step(folder: Path, chunk: int) -> None:
    drafts = CHAIN if modules(folder) == 1 else 1  # the references' chains use module 0 alone
    for prompt in load_reference(folder).prompts:
        got = one_rank(folder, drafts).chain(prompt.ids, chunk, share_selection=False)
        assert got == prompt.chain[: 1 + drafts]


@pytest.mark.parametrize("folder", PLAIN, ids=lambda folder: folder.name)
def test_accepted_positions_hold_what_teacher_forcing_gives(folder: Path) -> None:
    """After steps that accepted and rejected drafts, the first module's entries come from the model's hidden states and
    the real tokens, none from a draft step."""
    rank, prompt = one_rank(folder, modules(folder)), load_reference(folder).prompts[0]
    ids = prompt.prompt + rank.greedy(prompt.prompt, 40)
    got = rank.mtp_entries(0, len(ids) - 1)
    rank.mtp_outputs(ids, 1000)
    torch.testing.assert_close(got, rank.mtp_entries(0, len(ids) - 1), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("folder", PLAIN, ids=lambda folder: folder.name)
def test_prompt_positions_hold_what_teacher_forcing_gives(folder: Path) -> None:
    """In every module, across the ends of chunks, where the tokens that follow are known."""
    rank, prompt = one_rank(folder, modules(folder)), load_reference(folder).prompts[1]
    rank.logits(prompt.ids, 7)
    count = len(prompt.ids) - modules(folder)
    got = [rank.mtp_entries(module, count) for module in range(modules(folder))]
    rank.mtp_outputs(prompt.ids, 1000)
    for module, entries in enumerate(got):
        torch.testing.assert_close(entries, rank.mtp_entries(module, count), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("folder", [f for f in FOLDERS if "share" in f.name], ids=lambda folder: folder.name)
def test_draft_steps_share_a_selection(folder: Path) -> None:
    """The indexer of the module selects once; later steps attend to that and to their own positions."""
    rank, prompt = one_rank(folder, CHAIN), load_reference(folder).prompts[1]
    used: list[list[int]] = []
    (module,) = rank.runner.model.mtp

    def record(m: object, args: tuple, out: tuple) -> None:
        (slots,) = out[2]
        used.append(slots[0].tolist())

    hook = module.layer.register_forward_hook(record)
    got = rank.chain(prompt.ids, len(prompt.ids), share_selection=True)
    hook.remove()
    assert got[:2] == prompt.chain[:2]
    at = len(prompt.ids) - 1
    own = [rank.pages[position // 64] * 64 + position % 64 for position in (at + 1, at + 2)]
    first = used[0]
    assert len(set(first)) == 16
    assert used[1:] == [[own[0], *first], [own[1], own[0], *first]]


@every_oracle
def test_speculative_greedy_continuation(folder: Path) -> None:
    for prompt in load_reference(folder).prompts:
        decided = prompt.num_decided(TIE)
        got = one_rank(folder, modules(folder)).greedy(prompt.prompt, len(prompt.greedy))
        assert got[:decided] == prompt.greedy[:decided]


@every_oracle
def test_two_ranks(folder: Path, two_ranks: TwoRanks) -> None:
    prompt = load_reference(folder).prompts[1]
    drafts = CHAIN if modules(folder) == 1 else 1
    got = two_ranks.call(folder, 2, "float32", "chain", prompt.ids, 1000, False, num_draft_tokens=drafts)
    assert got == prompt.chain[: 1 + drafts]
    decided = prompt.num_decided(TIE)
    greedy = two_ranks.call(folder, 2, "float32", "greedy", prompt.prompt, len(prompt.greedy), num_draft_tokens=drafts)
    assert greedy[:decided] == prompt.greedy[:decided]
