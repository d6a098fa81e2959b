"""The sampler against a naive one in float64, and against itself in other company."""

import math
from collections.abc import Iterable

import pytest
import torch

from tests.sampling_reference import Request, probabilities
from workers.sampler import Sampler, limit_top, score_tokens
from workers.step import SamplingParams, TokenLogprobs

VOCAB = 40
STEPS = 24
CPU = torch.device("cpu")

STAGES = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=5),
    "top_k of one": SamplingParams(top_k=1),
    "top_k of all": SamplingParams(top_k=VOCAB),
    "top_k past all": SamplingParams(top_k=10 * VOCAB),
    "top_k of -1": SamplingParams(top_k=-1),
    "top_p": SamplingParams(top_p=0.6),
    "tiny top_p": SamplingParams(top_p=1e-6),
    "top_k and top_p": SamplingParams(temperature=1.5, top_k=6, top_p=0.8),
    "min_p": SamplingParams(min_p=0.2),
    "min_p of one": SamplingParams(min_p=1.0),
    "all limits": SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.1),
    "bias": SamplingParams(logit_bias={3: 4.0, 7: -100.0, 0: 100.0, VOCAB - 1: 99.0}),
    "greedy bias": SamplingParams(temperature=0, logit_bias={5: 100.0}),
    "min_tokens": SamplingParams(temperature=0.5, min_tokens=12),
    "greedy min_tokens": SamplingParams(temperature=0, min_tokens=12),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "repetition below 1": SamplingParams(temperature=0.5, repetition_penalty=0.8),
    "frequency": SamplingParams(temperature=0.5, frequency_penalty=1.5),
    "negative frequency": SamplingParams(frequency_penalty=-1.0),
    "presence": SamplingParams(temperature=0.5, presence_penalty=2.0),
    "greedy penalties": SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.7),
    "everything": SamplingParams(
        temperature=0.9,
        top_k=20,
        top_p=0.95,
        min_p=0.02,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={1: 3.0, 2: 3.0},
        min_tokens=6,
        logprobs=4,
    ),
}


def random_logits(rows: int, vocab: int = VOCAB, *, seed: int) -> torch.Tensor:
    print(f"logits of seed {seed}")
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def requests(params: Iterable[SamplingParams]) -> list[Request]:
    """One request each, with prompts that repeat tokens and stop ids that are likely tokens."""
    return [Request(p, 1000 + i, [i % VOCAB, 2, 2, 30], [1, 2, 3]) for i, p in enumerate(params)]


def sampler_with(admitted: list[Request], vocab: int = VOCAB) -> Sampler:
    """A sampler that holds request i in slot i."""
    sampler = Sampler(len(admitted), vocab, CPU)
    for slot, request in enumerate(admitted):
        sampler.admit(request.admission(slot))
    return sampler


def choose(
    sampler: Sampler, logits: torch.Tensor, slots: list[int], positions: torch.Tensor
) -> tuple[torch.Tensor, list[list[TokenLogprobs]]]:
    """The sampler's tokens for logits [rows, vocab] without drafts, and their log-probabilities."""
    none = torch.empty(len(slots), 0, dtype=torch.int64)
    zeros = torch.zeros(len(slots), dtype=torch.int64)
    verdict = sampler.verify(logits[:, None], torch.tensor(slots), positions, none, zeros, sampler.needs(slots))
    assert verdict.counts.tolist() == [1] * len(slots)
    return verdict.tokens[:, 0], sampler.reports(score_tokens(logits[:, None], verdict.tokens), slots, [1] * len(slots))


def sample(
    sampler: Sampler, logits: torch.Tensor, slots: list[int], batch: list[Request]
) -> tuple[list[int], list[list[TokenLogprobs]]]:
    """One step of the requests of these slots, whose outputs grow."""
    before = logits.clone()
    tokens, logprobs = choose(sampler, logits, slots, torch.tensor([request.position for request in batch]))
    assert torch.equal(logits, before)  # the caller's
    for request, token in zip(batch, tokens.tolist(), strict=True):
        request.output.append(token)
    return tokens.tolist(), logprobs


@pytest.mark.parametrize("name", STAGES)
def test_each_stage_against_the_naive_sampler(name: str) -> None:
    """Eight seeds, each a sequence of steps whose penalties and min_tokens follow its own output."""
    batch = requests([STAGES[name]] * 8)
    sampler = sampler_with(batch)
    for step in range(STEPS):
        logits = random_logits(len(batch), seed=step)
        want = [request.choose(row) for request, row in zip(batch, logits.tolist(), strict=True)]
        assert sample(sampler, logits, list(range(8)), batch)[0] == want, f"step {step}"


def test_all_kinds_of_rows_in_one_batch_against_the_naive_sampler() -> None:
    batch = requests(STAGES.values())
    sampler = sampler_with(batch)
    for step in range(STEPS):
        logits = random_logits(len(batch), seed=100 + step)
        want = [request.choose(row) for request, row in zip(batch, logits.tolist(), strict=True)]
        assert sample(sampler, logits, list(range(len(batch))), batch)[0] == want, f"step {step}"


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    size = len(STAGES)
    together, alone, shuffled = (requests(STAGES.values()) for _ in range(3))
    samplers = [sampler_with(together), sampler_with(alone), sampler_with(shuffled)]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1)).tolist()
    for step in range(STEPS):
        logits = random_logits(size, seed=200 + step)
        got = sample(samplers[0], logits, list(range(size)), together)
        for slot in range(size):
            tokens, logprobs = sample(samplers[1], logits[slot : slot + 1], [slot], [alone[slot]])
            assert (tokens[0], logprobs[0]) == (got[0][slot], got[1][slot])
        tokens, logprobs = sample(samplers[2], logits[order], order, [shuffled[slot] for slot in order])
        assert (tokens, logprobs) == ([got[0][slot] for slot in order], [got[1][slot] for slot in order])


def test_a_preempted_request_goes_on_in_another_slot_where_it_was() -> None:
    penalised = SamplingParams(temperature=0.7, repetition_penalty=1.4, frequency_penalty=0.8, presence_penalty=0.3)
    kept, moved = requests([penalised])[0], requests([penalised])[0]
    others = requests([SamplingParams(frequency_penalty=2.0)] * 2)
    sampler = sampler_with([kept, moved, others[0], others[1]])
    for step in range(STEPS):
        if step == STEPS // 2:
            sampler.admit(moved.admission(2))
        slot = 1 if step < STEPS // 2 else 2
        logits = random_logits(1, seed=300 + step).expand(3, -1).contiguous()
        tokens, _ = sample(sampler, logits, [0, slot, 3], [kept, moved, others[1]])
        assert tokens[0] == tokens[1]
    assert kept.output == moved.output


def test_a_slots_next_owner_without_penalties_feels_none() -> None:
    first = Request(SamplingParams(temperature=0, frequency_penalty=2.0, presence_penalty=2.0), prompt=[4])
    neighbour = Request(SamplingParams(temperature=0, frequency_penalty=2.0), prompt=[4])
    sampler = sampler_with([first, neighbour])
    logits = random_logits(2, seed=400)
    for _ in range(5):
        sample(sampler, logits, [0, 1], [first, neighbour])
    assert len(set(first.output)) > 1
    second = Request(SamplingParams(temperature=0), prompt=[5])
    sampler.admit(second.admission(0))
    for _ in range(5):
        sample(sampler, logits, [0, 1], [second, neighbour])
    assert second.output == [int(logits[0].argmax())] * 5


def test_a_slots_next_owner_with_penalties_starts_afresh() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=1.0)
    sampler = sampler_with([Request(params, prompt=list(range(VOCAB)))])
    logits = random_logits(1, seed=500)
    choose(sampler, logits, [0], torch.tensor([VOCAB]))
    fresh = Request(params, prompt=[6])
    sampler.admit(fresh.admission(0))
    for _ in range(8):
        want = fresh.choose(logits[0].tolist())
        assert sample(sampler, logits, [0], [fresh])[0] == [want]


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-40, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    batch = requests([SamplingParams(temperature=temperature, min_p=0.1), SamplingParams(temperature=temperature)])
    logits = 10 * random_logits(2, seed=600)
    assert sample(sampler_with(batch), logits, [0, 1], batch)[0] == logits.argmax(-1).tolist()


def test_a_row_with_no_limits_keeps_every_token_beside_a_row_with_some() -> None:
    """float32 sums of many probabilities pass 1, which must not cut off the least likely tokens."""
    vocab = 1 << 15
    logits = random_logits(8, vocab, seed=700) / 3
    top_p = torch.tensor([1.0] * 7 + [0.5])
    limited = limit_top(logits, torch.full((8,), vocab), top_p)
    assert torch.equal(limited[:7], logits[:7])
    assert limited[7].isinf().any()


def test_of_equal_logits_the_lowest_ids_stay() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]).repeat(2, 1)
    limited = limit_top(logits, torch.tensor([2, 5]), torch.tensor([1.0, 0.3]))
    assert limited.isfinite().tolist() == [[False, True, True, False, False], [False, True, True, False, False]]


def test_of_many_equal_logits_the_lowest_ids_stay() -> None:
    logits = random_logits(4, 1000, seed=750).div(3).round()
    limited = limit_top(logits, torch.full((4,), 300), torch.ones(4))
    for row, got in zip(logits.tolist(), limited.isfinite().tolist(), strict=True):
        want = sorted(range(1000), key=lambda token: (-row[token], token))[:300]
        assert [token for token, kept in enumerate(got) if kept] == sorted(want)


@pytest.mark.parametrize("name", ["plain", "hot", "top_k and top_p", "min_p", "all limits"])
@pytest.mark.parametrize("seed", [11, 2**40])
def test_frequencies_follow_the_processed_distribution(name: str, seed: int) -> None:
    """Chi-square over the positions of one seed; cells that expect fewer than 5 are pooled."""
    print(f"seed {seed}")
    count, request = 1 << 14, Request(STAGES[name], seed)
    logits = random_logits(1, seed=800) / 2
    sampler = sampler_with([request])
    tokens, _ = choose(sampler, logits.expand(count, -1), [0] * count, torch.arange(1, count + 1))
    expected = count * torch.tensor(probabilities(logits[0].tolist(), request.params), dtype=torch.float64)
    observed = torch.bincount(tokens, minlength=VOCAB).double()
    assert observed[expected == 0].sum() == 0
    rare = expected < 5
    cells = [(e, o) for e, o in zip(expected[~rare].tolist(), observed[~rare].tolist(), strict=True)]
    if expected[rare].sum() > 1:
        cells.append((expected[rare].sum().item(), observed[rare].sum().item()))
    chi_square, freedom = sum((o - e) ** 2 / e for e, o in cells), len(cells) - 1
    assert freedom >= 2
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_seed_and_position_decide_a_token() -> None:
    flat = torch.zeros(2000, VOCAB)
    sampler = sampler_with([Request(SamplingParams(), 5), Request(SamplingParams(), 5), Request(SamplingParams(), 6)])
    positions = torch.arange(2000)
    by_slot = [choose(sampler, flat, [slot] * 2000, positions)[0] for slot in range(3)]
    assert torch.equal(by_slot[0], by_slot[1])
    for other in (by_slot[2], by_slot[0].roll(1)):  # another seed; the position before
        equal = (by_slot[0] == other).double().mean().item()
        assert abs(equal - 1 / VOCAB) < 5 * math.sqrt(1 / VOCAB / 2000)


def test_logprobs_are_of_the_unprocessed_logits() -> None:
    asked = [None, 0, 3, 20, 1]
    params = [
        SamplingParams(logprobs=n, logit_bias={9: 50.0}, top_k=2, temperature=0.5, presence_penalty=1.0) for n in asked
    ]
    batch = requests(params)
    logits = random_logits(len(batch), seed=900)
    tokens, logprobs = sample(sampler_with(batch), logits, list(range(len(batch))), batch)
    assert tokens == [9] * len(batch)
    scores = logits.double().log_softmax(-1)
    assert logprobs[0] == []
    for row, count in enumerate(asked[1:], start=1):
        (got,) = logprobs[row]
        best = scores[row].sort(descending=True)
        assert got.logprob == pytest.approx(scores[row, tokens[row]].item(), abs=1e-5)
        assert got.top_ids == best.indices[:count].tolist()
        assert got.top_logprobs == pytest.approx(best.values[:count].tolist(), abs=1e-5)
        assert got.top_logprobs == sorted(got.top_logprobs, reverse=True)
