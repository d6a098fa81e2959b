"""Drafts change nothing but speed: the sampler's verdicts against the naive sampler, and against the distribution."""

import math

import pytest
import torch

from tests.sampling_reference import Request, probabilities
from workers.sampler import Needs, Sampler, score_tokens
from workers.step import SamplingParams

CPU = torch.device("cpu")
VOCAB = 12
MAX_DRAFTS = 3


def context_logits(seed: int, history: list[int]) -> torch.Tensor:
    """The scripted model: logits that depend on the two last tokens only."""
    key = hash((seed, *history[-2:])) % 2**31
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(key))


def sampler_of(requests: list[Request], *, repeatable: bool = False) -> Sampler:
    sampler = Sampler(len(requests), VOCAB, CPU, max_drafts=MAX_DRAFTS, repeatable=repeatable)
    for slot, request in enumerate(requests):
        sampler.admit(request.admission(slot))
    return sampler


def step(sampler: Sampler, requests: list[Request], drafts: list[list[int]], model: int) -> list[list[int]]:
    """Verifies each request's drafts under the scripted model; outputs grow by what was accepted."""
    width = max(map(len, drafts))
    padded = [row + [0] * (width - len(row)) for row in drafts]
    logits = torch.stack(
        [
            torch.stack([context_logits(model, r.prompt + r.output + row[:j]) for j in range(width + 1)])
            for r, row in zip(requests, padded, strict=True)
        ]
    )
    tokens, counts = sampler.verify(
        logits,
        torch.arange(len(requests)),
        torch.tensor([r.position for r in requests]),
        torch.tensor(padded, dtype=torch.int64).view(len(requests), width),
        torch.tensor([len(row) for row in drafts]),
        sampler.needs(list(range(len(requests)))),
    )
    new = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
    for request, row in zip(requests, new, strict=True):
        request.output += row
    return new


def draft(sampler: Sampler, requests: list[Request], count: int, model: int) -> list[list[int]]:
    """Drafts of another scripted model, which often errs."""
    drafts: list[list[int]] = [[] for _ in requests]
    for index in range(count):
        pairs = zip(requests, drafts, strict=True)
        logits = torch.stack([context_logits(model, r.prompt + r.output + row) for r, row in pairs])
        positions = torch.tensor([r.position + index for r in requests])
        needs = sampler.needs(list(range(len(requests))))
        tokens = sampler.draft(logits, torch.arange(len(requests)), positions, index, needs)
        for row, token in zip(drafts, tokens.tolist(), strict=True):
            row.append(token)
    return drafts


KINDS = {
    "greedy": SamplingParams(temperature=0),
    "greedy penalties": SamplingParams(temperature=0, frequency_penalty=1.5, repetition_penalty=1.3),
    "greedy bias and min_tokens": SamplingParams(temperature=0, logit_bias={3: 2.0}, min_tokens=5),
    "seeded": SamplingParams(seed=4),
    "seeded top_p": SamplingParams(seed=4, top_p=0.7, temperature=1.5),
    "seeded penalties": SamplingParams(seed=4, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
    "seeded everything": SamplingParams(
        seed=4, top_k=8, top_p=0.9, min_p=0.05, presence_penalty=0.5, logit_bias={1: 1.5}, min_tokens=7
    ),
}


@pytest.mark.parametrize("model", [0, 1], ids=["good drafts", "bad drafts"])
def test_tokens_are_those_without_drafts(model: int) -> None:
    """All kinds of requests together, with 0 to 3 drafts of the target model itself (good) or of another."""
    requests = [Request(p, 1000 + i, [i, 2, 3], [1, 2]) for i, p in enumerate(KINDS.values())]
    plain = [Request(r.params, r.seed, r.prompt, r.stop_ids) for r in requests]
    sampler = sampler_of(requests)
    accepted = 0
    for index in range(20):
        drafts = draft(sampler, requests, index % (MAX_DRAFTS + 1), model)
        accepted += sum(len(new) - 1 for new in step(sampler, requests, drafts, 0))
    for name, request, alone in zip(KINDS, requests, plain, strict=True):
        while len(alone.output) < len(request.output):
            alone.output.append(alone.choose(context_logits(0, alone.prompt + alone.output).tolist()))
        assert request.output == alone.output, name
    most = 20 * 1.5 * len(requests)
    assert accepted > 0.8 * most if model == 0 else 0 < accepted < 0.6 * most


def test_the_target_accepts_its_own_seeded_draws() -> None:
    """Drafts and target share their random numbers: where the distributions are equal, so are the tokens."""
    request = Request(SamplingParams(seed=1, temperature=2.0), 9, [1])
    sampler = sampler_of([request])
    for _ in range(50):
        assert len(step(sampler, [request], draft(sampler, [request], 3, 0), 0)[0]) == 4


def test_only_drafts_that_a_slot_holds_are_accepted() -> None:
    """Row 1 holds one draft of the two that the step has room for, row 2 none."""
    requests = [Request(SamplingParams(temperature=0), 0, [i]) for i in range(3)]
    sampler = sampler_of(requests)
    first = [int(context_logits(0, [i]).argmax()) for i in range(3)]
    second = [int(context_logits(0, [i, first[i]]).argmax()) for i in range(3)]
    logits = torch.stack(
        [torch.stack([context_logits(0, [i, first[i], second[i]][: j + 1]) for j in range(3)]) for i in range(3)]
    )
    drafts = torch.tensor([first, second]).T
    verdict = sampler.verify(
        logits, torch.arange(3), torch.ones(3, dtype=torch.int64), drafts, torch.tensor([2, 1, 0]), Needs(0)
    )
    assert verdict.counts.tolist() == [3, 2, 1]
    assert verdict.tokens[1, :2].tolist() == [first[1], second[1]]
    assert verdict.tokens[2, 0] == first[2]


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    kept = expected >= 5
    assert observed[expected == 0].sum() == 0
    cells = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum().item()
    return cells, int(kept.sum()) - 1


SAMPLED = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8),
    "penalties": SamplingParams(presence_penalty=0.9, frequency_penalty=0.4, repetition_penalty=1.3),
    "everything": SamplingParams(temperature=1.2, top_k=9, top_p=0.95, min_p=0.03, frequency_penalty=0.5),
}


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("vocab", [2, VOCAB])
def test_rejection_sampling_has_the_targets_distribution(name: str, vocab: int) -> None:
    """24,000 requests with the same history and the drafts of a wrong model: the pairs of their two next tokens."""
    count, params, seed = 24_000, SAMPLED[name], 77
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    target = 1.5 * torch.randn(1 + vocab, vocab, generator=generator)  # after the prompt, and after each first token
    wrong = target + 0.8 * torch.randn(1 + vocab, vocab, generator=generator)
    sampler = Sampler(count, vocab, CPU, max_drafts=1)
    requests = [Request(params, i, [0, 1, 1]) for i in range(count)]
    for slot, request in enumerate(requests):
        sampler.admit(request.admission(slot))
    slots, needs = torch.arange(count), sampler.needs([0])
    positions = torch.full((count,), 3)
    drafts = sampler.draft(wrong[0].expand(count, -1), slots, positions, 0, needs)
    logits = torch.stack((target[0].expand(count, -1), target[1 + drafts]), dim=1)
    tokens, counts = sampler.verify(logits, slots, positions, drafts[:, None], torch.ones_like(slots), needs)
    rest = torch.nonzero(counts == 1).squeeze(1)  # their drafts were rejected: another step gives the second token
    none = torch.empty(len(rest), 0, dtype=torch.int64)
    tokens[rest, 1] = sampler.verify(
        target[1 + tokens[rest, 0]][:, None], rest, positions[rest] + 1, none, torch.zeros_like(rest), needs
    ).tokens[:, 0]

    alone = Request(params, 0, [0, 1, 1])
    first = probabilities(alone.processed(target[0].tolist()), params)
    expected = torch.zeros(vocab, vocab, dtype=torch.float64)
    for token, p in enumerate(first):
        after = Request(params, 0, [0, 1, 1], output=[token])
        expected[token] = p * torch.tensor(probabilities(after.processed(target[1 + token].tolist()), params))
    observed = torch.bincount(tokens[:, 0] * vocab + tokens[:, 1], minlength=vocab * vocab).double()
    distance, freedom = chi_square(observed, count * expected.flatten())
    assert freedom >= 2
    assert distance < freedom + 4 * math.sqrt(2 * freedom)
    # Leviathan et al.: a first draft is accepted with the probability 1 - TV of target and draft.
    draft_probs = torch.tensor(probabilities(alone.processed(wrong[0].tolist()), params))
    rate = 1 - (torch.tensor(first) - draft_probs).abs().sum().item() / 2
    assert abs((counts == 2).double().mean().item() - rate) < 5 * 0.5 / math.sqrt(count)


def test_a_repeatable_engine_takes_drafts_by_agreement() -> None:
    """With a seed for the engine, requests without one repeat too, whatever was drafted."""
    outputs = []
    for model in (0, 1):
        request = Request(SamplingParams(), 5, [1])
        sampler = sampler_of([request], repeatable=True)
        while len(request.output) < 40:
            step(sampler, [request], draft(sampler, [request], 3, model), 0)
        outputs.append(request.output[:40])
    assert outputs[0] == outputs[1]


def test_logprobs_of_every_accepted_token() -> None:
    requests = [Request(SamplingParams(temperature=0, logprobs=2, logit_bias={1: 3.0}), 0, [i]) for i in range(2)]
    sampler = sampler_of(requests)
    first = [requests[i].choose(context_logits(0, [i]).tolist()) for i in range(2)]
    logits = torch.stack([torch.stack([context_logits(0, [i, first[i]][: j + 1]) for j in range(2)]) for i in range(2)])
    drafts = torch.tensor([[first[0]], [(first[1] + 1) % VOCAB]])  # one right, one wrong
    ones = torch.ones(2, dtype=torch.int64)
    verdict = sampler.verify(logits, torch.arange(2), ones, drafts, ones, sampler.needs([0, 1]))
    assert verdict.counts.tolist() == [2, 1]
    scores = sampler.reports(score_tokens(logits, verdict.tokens), [0, 1], [2, 1])
    assert [len(entries) for entries in scores] == [2, 1]
    raw = logits.log_softmax(-1)
    for i, entries in enumerate(scores):
        for j, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(raw[i, j, verdict.tokens[i, j]].item(), abs=1e-6)
            assert entry.top_ids == raw[i, j].topk(2).indices.tolist()
