"""Random traffic through the scheduler and a fake worker: every request gets its own right tokens, nothing leaks."""

import random
from array import array
from collections import deque
from dataclasses import dataclass, field

import pytest

from configs.engine import PAGE_SIZE
from serve.driver.drafts import DraftPolicy
from serve.driver.messages import AddRequest, RequestDelta
from serve.driver.pages import PageManager, pages_for
from serve.driver.scheduler import Scheduler
from tests.fake_workers import VOCAB, FakeWorker, expected_output
from workers.step import SamplingParams, StepOutput


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logits: list[float] = field(default_factory=list)
    reason: str | None = None
    stop_token: int | None = None
    cached: list[int] = field(default_factory=list)

    def take(self, delta: RequestDelta) -> None:
        assert self.reason is None, "a delta after the last one"
        self.tokens += delta.token_ids
        self.logprobs += [entry.logprob for entry in delta.logprobs]
        for scores in delta.prompt_scores:
            assert scores.start == len(self.prompt_logits)
            self.prompt_logits += array("f", scores.logits)
        self.reason, self.stop_token = delta.finish_reason, delta.stop_token_id
        self.cached.append(delta.num_cached_tokens)


class Traffic:
    """A scheduler with its worker, requests that arrive and leave at random, and what was answered."""

    def __init__(self, seed: int, depth: int) -> None:
        rng = self.rng = random.Random(seed)
        self.depth = depth
        self.max_model_len = rng.choice([150, 300])
        num_pages = pages_for(self.max_model_len) + rng.choice([0, 0, 1, 4, 50])
        max_num_seqs = rng.choice([3, 8])
        max_rows = rng.choice([1, 5, 40, 300, 300])
        max_drafts = rng.choice([0, 1, 2, 4]) if max_rows > 4 else 0
        self.pages = PageManager(num_pages)
        self.scheduler = Scheduler(
            self.pages,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_rows,
            max_model_len=self.max_model_len,
            enable_prefix_caching=rng.random() < 0.8,
            drafts=DraftPolicy(max_drafts, adaptive=rng.random() < 0.5),
            seed=seed,
        )
        self.worker = FakeWorker(num_pages, max_num_seqs, max_rows, self.max_model_len)
        self.outputs: deque[StepOutput] = deque()
        self.prefixes = [[rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 64, 130]))] for _ in range(3)]
        self.requests: dict[str, AddRequest] = {}
        self.answers: dict[str, Answer] = {}
        self.aborted: set[str] = set()
        self.steps = 0

    def make_request(self) -> AddRequest:
        rng = self.rng
        prompt = list(rng.choice(self.prefixes))[: self.max_model_len - 20]
        if self.requests and rng.random() < 0.3:  # the next turn of a conversation
            earlier = rng.choice(list(self.requests.values()))
            prompt = (earlier.token_ids + self.answers[earlier.request_id].tokens)[: self.max_model_len - 20]
        prompt += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        params = SamplingParams(
            temperature=0,
            max_tokens=rng.choice([1, 2, 7, 90, 200, 200]),
            min_tokens=rng.choice([0, 0, 1]),
            logprobs=rng.choice([None, 0]),
            prompt_logits=rng.random() < 0.2,
            repetition_penalty=rng.choice([1.0, 1.1]),
        )
        stop_ids = tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1, 3])))
        return AddRequest(f"r{len(self.requests)}", prompt, params, rng.choice([0, 0, 1, -1]), "", stop_ids)

    def add(self) -> None:
        request = self.make_request()
        self.requests[request.request_id] = request
        self.answers[request.request_id] = Answer()
        self.scheduler.add(request)

    def abort(self) -> None:
        request_id = self.rng.choice(list(self.requests))
        if self.answers[request_id].reason is None:
            self.aborted.add(request_id)
        self.scheduler.abort([request_id, "unknown"])

    def step(self) -> bool:
        """Plans and runs ahead as the driver does, then takes in one output; False when nothing was in flight."""
        while self.scheduler.num_in_flight < self.depth and (plan := self.scheduler.schedule()) is not None:
            self.check_histories(plan.admitted)
            self.outputs.append(self.worker.execute(plan))
        self.pages.check_integrity()
        assert self.scheduler.take_failures() == []
        if not self.outputs:
            return False
        self.steps += 1
        for delta in self.scheduler.update(self.outputs.popleft()):
            assert delta.request_id not in self.aborted
            self.answers[delta.request_id].take(delta)
        return True

    def check_histories(self, admitted: list) -> None:
        for admission in admitted:
            if admission.params.has_penalties:
                known = (tuple(r.token_ids + self.answers[r.request_id].tokens) for r in self.requests.values())
                assert tuple(admission.history) in set(known)
            else:
                assert admission.history == []

    def check_answers(self) -> None:
        for request_id, request in self.requests.items():
            answer = self.answers[request_id]
            tokens, reason = expected_output(request, self.max_model_len)
            if request_id in self.aborted:
                assert answer.tokens == tokens[: len(answer.tokens)]
                assert answer.reason is None
                continue
            assert (answer.tokens, answer.reason) == (tokens, reason)
            assert answer.stop_token == (tokens[-1] if reason == "stop" else None)
            assert answer.logprobs == ([-float(t) for t in tokens] if request.params.logprobs is not None else [])
            assert answer.prompt_logits == (
                [float(t) for t in request.token_ids] if request.params.prompt_logits else []
            )
            assert all(cached == 0 for cached in answer.cached[1:])


def run_traffic(seed: int, depth: int) -> Traffic:
    print(f"seed {seed}, depth {depth}")
    traffic = Traffic(seed, depth)
    for _ in range(40):
        for _ in range(traffic.rng.choice([0, 0, 1, 4])):
            traffic.add()
        if traffic.requests and traffic.rng.random() < 0.15:
            traffic.abort()
        for _ in range(traffic.rng.choice([1, 3, 20])):
            traffic.step()
    while traffic.step():
        assert traffic.steps < 50_000, "no end: livelock"
    traffic.check_answers()
    traffic.scheduler.check_integrity()
    traffic.pages.check_integrity()
    return traffic


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_every_request_gets_its_tokens(seed: int, depth: int) -> None:
    run_traffic(seed, depth)


def test_the_random_traffic_meets_what_it_is_for() -> None:
    """Preemptions, prefix hits, drafts, aborts and stops all happen, else the test above proves little."""
    runs = [run_traffic(seed, 2) for seed in range(16)]
    stats = [run.scheduler.stats() for run in runs]
    assert sum(s.preemptions for s in stats) > 20
    assert sum(s.prefix_hits for s in stats) > 20 * PAGE_SIZE
    assert sum(s.draft_tokens for s in stats) > sum(sum(s.accepted_per_position) for s in stats) > 500
    assert sum(len(run.aborted) for run in runs) > 10
    reasons = [answer.reason for run in runs for answer in run.answers.values()]
    assert min(reasons.count("stop"), reasons.count("length")) > 50
