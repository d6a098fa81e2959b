"""Every checkpoint of the family against transformers' reference: logits, greedy paths, routing, and bf16's error."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from layers.parallel import TensorParallel
from tests.layers.ranks import Rank, TwoRanks
from tests.oracles import PromptReference, load_reference, oracle_folders

pytestmark = pytest.mark.slow

FOLDERS, QUANTISED = oracle_folders(), oracle_folders(quantised=True)
TOLERANCE = 1e-4  # of float32 logits, whose scale is about 8
TIE = 1e-3  # a greedy margin below which another token is no error

every_oracle = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
either_ep = pytest.mark.parametrize("ep_size", [1, 2])


@lru_cache(maxsize=1)
def one_rank(folder: Path, dtype: str = "float32") -> Rank:
    return Rank(folder, TensorParallel(), dtype)


def prompts(folder: Path) -> list[PromptReference]:
    return load_reference(folder).prompts


@pytest.mark.parametrize("folder", QUANTISED, ids=lambda folder: folder.name)
def test_quantised_checkpoints(folder: Path, two_ranks: TwoRanks) -> None:
    for prompt in prompts(folder):
        assert np.abs(one_rank(folder).logits(prompt.ids, 7) - prompt.logits.numpy()).max() <= TOLERANCE
        split = two_ranks.call(folder, 2, "float32", "logits", prompt.ids, 1000)
        assert np.abs(split - prompt.logits.numpy()).max() <= TOLERANCE
        decided = prompt.num_decided(TIE)
        got = one_rank(folder).greedy(prompt.prompt, len(prompt.greedy))
        assert got[:decided] == prompt.greedy[:decided]


@every_oracle
@pytest.mark.parametrize("chunk", [1000, 7, 1])
def test_logits_do_not_depend_on_how_the_prompt_is_cut(folder: Path, chunk: int) -> None:
    for prompt in prompts(folder):
        got = one_rank(folder).logits(prompt.ids, chunk)
        assert np.abs(got - prompt.logits.numpy()).max() <= TOLERANCE


@every_oracle
def test_decode_rows_give_the_same_logits(folder: Path) -> None:
    for prompt in prompts(folder):
        got = one_rank(folder).decoded_logits(prompt.ids)
        assert np.abs(got - prompt.logits.numpy()).max() <= TOLERANCE


@every_oracle
def test_greedy_continuation(folder: Path) -> None:
    for prompt in prompts(folder):
        decided = prompt.num_decided(TIE)
        got = one_rank(folder).greedy(prompt.prompt, len(prompt.greedy))
        assert got[:decided] == prompt.greedy[:decided]


@every_oracle
def test_routers_choose_the_same_experts(folder: Path) -> None:
    for prompt in prompts(folder):
        got = one_rank(folder).routings(prompt.ids)
        assert sorted(got) == sorted(prompt.routers)
        for layer, want in prompt.routers.items():
            experts, order = got[layer].expert_ids.sort(-1)
            assert torch.equal(experts, want.experts.long())
            weights = got[layer].expert_weights.gather(-1, order)
            torch.testing.assert_close(weights, want.weights, rtol=1e-4, atol=1e-5)


@every_oracle
@either_ep
def test_two_ranks(folder: Path, ep_size: int, two_ranks: TwoRanks) -> None:
    for prompt in prompts(folder)[:2]:
        for chunk in (1000, 7):
            got = two_ranks.call(folder, ep_size, "float32", "logits", prompt.ids, chunk)
            assert np.abs(got - prompt.logits.numpy()).max() <= TOLERANCE
        decided = prompt.num_decided(TIE)
        greedy = two_ranks.call(folder, ep_size, "float32", "greedy", prompt.prompt, len(prompt.greedy))
        assert greedy[:decided] == prompt.greedy[:decided]


@every_oracle
def test_two_ranks_token_by_token(folder: Path, two_ranks: TwoRanks) -> None:
    prompt = prompts(folder)[0]
    got = two_ranks.call(folder, 2, "float32", "decoded_logits", prompt.ids)
    assert np.abs(got - prompt.logits.numpy()).max() <= TOLERANCE


@every_oracle
def test_bfloat16_errs_no_more_than_transformers(folder: Path) -> None:
    """Experts flip in bf16, so single logits are no oracle: the mean error of the tokens' log-probabilities is."""
    given = [prompt for prompt in prompts(folder) if prompt.logits_bf16 is not None]
    if not given:
        pytest.skip("the oracle has no bfloat16 logits")
    rank = one_rank(folder, "bfloat16")
    ours = [_logprob_errors(torch.from_numpy(rank.logits(prompt.ids, 1000)), prompt) for prompt in given]
    theirs = [_logprob_errors(prompt.logits_bf16, prompt) for prompt in given]
    assert torch.cat(ours).mean() <= 1.2 * torch.cat(theirs).mean()


def _logprob_errors(logits: torch.Tensor, prompt: PromptReference) -> torch.Tensor:
    targets = torch.tensor(prompt.ids[1:])[:, None]
    got, want = (rows[:-1].log_softmax(-1).gather(-1, targets) for rows in (logits, prompt.logits))
    return (got - want).abs().flatten()
