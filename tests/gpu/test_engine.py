"""The same engine on GPUs: oracles in float32, bf16's error, two ranks over NCCL, and the shipped model's text.

Skipped where torch finds no GPU.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serve.llm import LLM, Completion
from tests.engine import test_grammar as grammar
from tests.oracles import PromptReference, load_reference, oracle_folders
from workers.step import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FOLDERS = oracle_folders() + oracle_folders(quantised=True)
TOLERANCE = 1e-4
PROMPTS = ["In the beginning God", "And the LORD said unto Moses,", "Blessed are the", "And David"]
CACHE = 256 << 20

every_oracle = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


def check_logits(llm: LLM, prompts: list[PromptReference]) -> None:
    for got, prompt in zip(llm.logits([prompt.ids for prompt in prompts]), prompts, strict=True):
        assert np.abs(got - prompt.logits.numpy()).max() <= TOLERANCE


def check_greedy(llm: LLM, prompts: list[PromptReference]) -> None:
    params = SamplingParams(temperature=0, max_tokens=len(prompts[0].greedy), ignore_eos=True)
    done = llm.generate([prompt.prompt for prompt in prompts], params)
    for completion, prompt in zip(done, prompts, strict=True):
        decided = prompt.num_decided(1e-3)
        assert completion.token_ids[:decided] == prompt.greedy[:decided]


@every_oracle
def test_float32(folder: Path) -> None:
    """Logits in pieces of seven, and greedy continuations through captured steps."""
    prompts = load_reference(folder).prompts
    settings = {"device": "cuda", "dtype": "float32", "kv_cache_bytes": CACHE, "max_num_seqs": 4}
    with LLM(folder, max_num_batched_tokens=7, **settings) as llm:
        check_logits(llm, prompts)
        check_greedy(llm, prompts)


def test_float32_logits_in_one_piece() -> None:
    folder = oracle_folders("deepseek_v2")[0]
    with LLM(folder, device="cuda", dtype="float32", kv_cache_bytes=CACHE, max_num_seqs=4) as llm:
        check_logits(llm, load_reference(folder).prompts)


@every_oracle
@pytest.mark.parametrize("ep", [1, 2])
def test_two_ranks(folder: Path, ep: int) -> None:
    gpus(2)
    prompts = load_reference(folder).prompts
    with LLM(folder, tp=2, ep=ep, device="cuda", dtype="float32", kv_cache_bytes=CACHE) as llm:
        check_logits(llm, prompts)
        check_greedy(llm, prompts)


def test_bfloat16_errs_no_more_than_transformers_on_a_cpu() -> None:
    """Mean error of the reference tokens' log-probabilities, over all oracles together: in one alone, a single token
    whose expert flips decides, and which tokens flip depends on the card's rounding."""
    ours, theirs = [], []
    for folder in FOLDERS:
        with LLM(folder, device="cuda", dtype="bfloat16", kv_cache_bytes=CACHE) as llm:
            for prompt in load_reference(folder).prompts:
                if prompt.logits_bf16 is not None:
                    (got,) = llm.logits([prompt.ids])
                    ours.append(_logprob_error(torch.from_numpy(got), prompt))
                    theirs.append(_logprob_error(prompt.logits_bf16, prompt))
    assert torch.cat(ours).mean() <= 1.2 * torch.cat(theirs).mean()


def _logprob_error(logits: torch.Tensor, prompt: PromptReference) -> torch.Tensor:
    targets = torch.tensor(prompt.ids[1:])[:, None]
    got, want = (rows[:-1].log_softmax(-1).gather(-1, targets) for rows in (logits, prompt.logits))
    return (got - want).abs().flatten()


def test_shipped_model_writes_the_same_text_as_on_a_cpu(tiny_model: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    seeded = SamplingParams(temperature=1, top_p=0.9, seed=5, max_tokens=60, ignore_eos=True)
    texts = []
    for tp, device in [(1, "cpu"), (1, "cuda"), (min(2, torch.cuda.device_count()), "cuda")]:
        with LLM(tiny_model, tp=tp, device=device, dtype="float32", kv_cache_bytes=CACHE) as llm:
            done = llm.generate(PROMPTS * 2, [greedy] * len(PROMPTS) + [seeded] * len(PROMPTS))
        texts.append([completion.token_ids for completion in done])
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]


def test_the_cache_takes_the_memory_fraction(tiny_model: Path) -> None:
    with LLM(tiny_model, device="cuda", kv_cache_memory_fraction=0.5) as llm:
        ready = llm.engine.started
        total = torch.cuda.get_device_properties(0).total_memory
        used = ready.num_pages * ready.page_bytes
    assert 0.4 * total < used < 0.5 * total


@pytest.fixture(scope="module")
def mixed(tiny_model: Path) -> tuple[list[str], list[SamplingParams]]:
    """Requests of every kind, short and past index_topk, that end one after the other."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.8, "seed": 6, "top_k": 20, "logit_bias": {17: -100.0, 19: 2.0}},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0},
    ]
    prompts = [*PROMPTS, "The sons of", " ".join(PROMPTS * 12)]
    return prompts, [SamplingParams(max_tokens=30 + 12 * i, ignore_eos=True, **kind) for i, kind in enumerate(kinds)]


@pytest.fixture(scope="module")
def plain(tiny_model: Path, mixed: tuple[list[str], list[SamplingParams]]) -> list[Completion]:
    """Their answers without drafts and without graphs."""
    settings = {"device": "cuda", "dtype": "float32", "kv_cache_bytes": CACHE}
    with LLM(tiny_model, cuda_graphs=False, **settings) as llm:
        return llm.generate(*mixed)


@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_graphs_and_drafts_change_nothing(
    tiny_model: Path, mixed: tuple[list[str], list[SamplingParams]], plain: list[Completion], drafts: int
) -> None:
    """Nor does a prefill of more than 8192 rows between replays; as many drafts are accepted as on a CPU."""
    settings = {"device": "cuda", "dtype": "float32", "kv_cache_bytes": CACHE, "max_num_batched_tokens": 9000}
    with LLM(tiny_model, num_draft_tokens=drafts, draft_policy="fixed", **settings) as llm:
        first = llm.submit(*mixed)
        long = [[*range(100 + i, 3100 + i)] for i in range(3)]
        llm.generate(long, SamplingParams(temperature=0, max_tokens=4))
        for answers in ([future.result() for future in first], llm.generate(*mixed)):
            assert [done.token_ids for done in answers] == [done.token_ids for done in plain]
            for got, want in zip(answers[4].logprobs, plain[4].logprobs, strict=True):
                assert got.top_ids == want.top_ids
                np.testing.assert_allclose(got.top_logprobs, want.top_logprobs, atol=1e-4)
        stats = llm.engine.stats
    if drafts:
        assert stats is not None
        assert sum(stats.accepted_per_position) / stats.verifications > (0.6, 1.0, 1.3)[drafts - 1]


def test_drafts_of_unseeded_requests_are_taken_by_rejection_sampling(tiny_model: Path) -> None:
    params = SamplingParams(temperature=1, max_tokens=60, ignore_eos=True)
    settings = {"device": "cuda", "dtype": "float32", "kv_cache_bytes": CACHE, "draft_policy": "fixed"}
    with LLM(tiny_model, num_draft_tokens=2, **settings) as llm:
        done = llm.generate(PROMPTS * 4, params)
        stats = llm.engine.stats
    assert [len(completion.token_ids) for completion in done] == [60] * 16
    assert len({tuple(completion.token_ids) for completion in done}) == 16
    assert stats is not None and sum(stats.accepted_per_position) / stats.verifications > 0.8  # 1.2 on a CPU


def test_grammars_hold_in_captured_steps(tiny_model: Path) -> None:
    settings = {"device": "cuda", "dtype": "float32", "kv_cache_bytes": CACHE, "max_num_seqs": 16}
    with LLM(tiny_model, cuda_graphs=False, **settings) as llm:
        plain = grammar.answers(llm)
    for one, (_, text, reason) in zip(grammar.requests()[1], plain, strict=True):
        if reason == "stop":
            grammar.check(text, one.grammar)
    for drafts in (0, 3):
        with LLM(tiny_model, num_draft_tokens=drafts, draft_policy="fixed", **settings) as llm:
            assert grammar.answers(llm) == plain


@pytest.mark.parametrize("exchange", ["replicated", "leader", "sharded"])
def test_two_ranks_with_every_exchange(exchange: str) -> None:
    gpus(2)
    for folder in oracle_folders("deepseek_v32", "glm_moe_dsa"):
        settings = {"device": "cuda", "dtype": "float32", "kv_cache_bytes": CACHE}
        with LLM(folder, tp=2, topk_exchange=exchange, **settings) as llm:
            check_logits(llm, load_reference(folder).prompts)
