"""A sequence's tokens depend on its own request alone: not on neighbours, preemption, cached prefixes or overlap."""

from pathlib import Path

import pytest

from serve.llm import LLM, Completion
from tests.engine.conftest import PROMPTS
from workers.step import SamplingParams

pytestmark = pytest.mark.slow

# layers x positions x (latent and index key) x float32 of the shipped model
PAGE_BYTES = 4 * 64 * (576 + 128) * 4
GREEDY = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, top_p=0.9, seed=7, max_tokens=60, ignore_eos=True)
PENALISED = SamplingParams(
    temperature=0.8, seed=3, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, max_tokens=60
)
ALL_PARAMS = pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


_alone: dict[str, list[list[int]]] = {}


def alone(llm: LLM, params: SamplingParams) -> list[list[int]]:
    """Each prompt in an engine that is otherwise idle."""
    if repr(params) not in _alone:
        _alone[repr(params)] = [llm.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    return _alone[repr(params)]


@ALL_PARAMS
def test_neighbours(llm: LLM, params: SamplingParams) -> None:
    assert tokens(llm.generate(PROMPTS, params)) == alone(llm, params)


@ALL_PARAMS
def test_neighbours_of_other_kinds(llm: LLM, params: SamplingParams) -> None:
    """Unseeded, biased and penalised requests run in the same steps."""
    noise = SamplingParams(temperature=1.5, presence_penalty=1, logit_bias={5: 3.0}, min_tokens=20, max_tokens=70)
    mixed = llm.generate(PROMPTS * 2, [params] * len(PROMPTS) + [noise] * len(PROMPTS))
    assert tokens(mixed[: len(PROMPTS)]) == alone(llm, params)


@ALL_PARAMS
def test_preemption(llm: LLM, tiny_model: Path, params: SamplingParams) -> None:
    """Seven pages for ten sequences of two pages each."""
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "kv_cache_bytes": 7 * PAGE_BYTES}
    with LLM(tiny_model, **settings) as small:
        got = tokens(small.generate(PROMPTS, params))
        stats = small.engine.stats
    assert stats is not None and stats.preemptions > 0
    assert got == alone(llm, params)


def test_prefix_cache_hit(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(" ".join(PROMPTS * 2), add_special_tokens=True)[:80]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3)
    first, second = llm.generate([ids], params)[0], llm.generate([ids], params)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
    assert second.token_ids == first.token_ids
    for a, b in zip(first.logprobs, second.logprobs, strict=True):
        assert b.top_ids == a.top_ids
        assert b.logprob == pytest.approx(a.logprob, abs=1e-5)


@pytest.mark.parametrize("settings", [{"max_inflight_steps": 1}, {"max_num_batched_tokens": 5, "max_num_seqs": 3}])
def test_scheduling_settings(llm: LLM, tiny_model: Path, settings: dict[str, int]) -> None:
    with LLM(tiny_model, device="cpu", dtype="float32", **settings) as other:
        assert tokens(other.generate(PROMPTS, SEEDED)) == alone(llm, SEEDED)


def test_engine_seed_repeats_unseeded_requests(tiny_model: Path) -> None:
    unseeded = SamplingParams(temperature=1, max_tokens=30)
    runs = []
    for _ in range(2):
        with LLM(tiny_model, device="cpu", seed=11) as engine:
            runs.append(tokens(engine.generate(PROMPTS[:3], unseeded)))
    assert runs[0] == runs[1]
