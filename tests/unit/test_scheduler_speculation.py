"""What plans say when sequences draft, and what becomes of several tokens a step."""

import pytest

from configs.engine import PAGE_SIZE
from serve.driver.drafts import DraftPolicy
from serve.driver.messages import AddRequest
from tests.fake_workers import expected_output
from tests.scheduler_engine import MAX_MODEL_LEN, Engine, prompt_of
from workers.step import PrefillChunk, SamplingParams, StepOutput


def engine_with(drafts: int, **settings) -> Engine:
    return Engine(drafts=DraftPolicy(drafts, adaptive=False), **settings)


def test_a_step_verifies_what_the_step_before_drafted() -> None:
    engine = engine_with(3)
    engine.add("a", prompt_of(10), max_tokens=50)
    first, _ = engine.step()
    assert (first.decode, first.verify, first.draft) == ([], 0, 3)
    second, _ = engine.step()
    assert (second.verify, second.draft) == (3, 3) and len(second.decode) == 1


def test_chunks_say_which_tokens_follow() -> None:
    engine = engine_with(2, max_rows=5)
    prompt = prompt_of(12)
    engine.add("a", prompt)
    chunks = [engine.step()[0].chunks[0] for _ in range(3)]
    assert chunks == [
        PrefillChunk(chunks[0].slot, 0, prompt[:5], False, prompt[5:7]),
        PrefillChunk(chunks[0].slot, 5, prompt[5:10], False, prompt[10:12]),
        PrefillChunk(chunks[0].slot, 10, prompt[10:], True, []),
    ]
    alone = engine_with(0, max_rows=5)
    alone.add("a", prompt)
    assert alone.step()[0].chunks[0].next_ids == []


def test_a_new_sequence_joins_without_drafts_it_does_not_hold() -> None:
    engine = engine_with(2)
    engine.add("a", prompt_of(10), max_tokens=50)
    engine.step()
    engine.add("b", prompt_of(10, start=3), max_tokens=50)
    plan, deltas = engine.step()
    assert plan.verify == 2 and len(plan.decode) == len(plan.chunks) == 1
    assert [(delta.request_id, delta.num_drafted) for delta in deltas] == [("a", 2), ("b", 0)]
    plan, deltas = engine.step()
    assert len(plan.decode) == 2 and [delta.num_drafted for delta in deltas] == [2, 2]


def test_answers_end_inside_a_step() -> None:
    """max_tokens, a stop id and min_tokens hold token by token; what was accepted past the end is dropped."""
    engine = engine_with(4, num_pages=64)
    requests = [
        engine.add(f"r{i}", prompt_of(9, start=i), max_tokens=1 + i % 9, min_tokens=i % 2, stop=(i % 5, 7))
        for i in range(40)
    ]
    last = {delta.request_id: delta for delta in engine.drain()}
    for request in requests:
        tokens, reason = expected_output(request, MAX_MODEL_LEN)
        assert engine.tokens[request.request_id] == tokens
        assert last[request.request_id].finish_reason == reason
    engine.check_rest()


def test_figures_count_drafts_that_were_held_and_tokens_that_were_kept() -> None:
    engine = engine_with(3)
    requests = [engine.add(f"r{i}", prompt_of(9, start=i), max_tokens=40) for i in range(3)]
    deltas = []
    while engine.plan() is not None:
        deltas += engine.receive()
    stats = engine.scheduler.stats()
    assert stats.draft_tokens == 3 * stats.verifications == sum(delta.num_drafted for delta in deltas)
    assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
    kept = sum(delta.num_accepted for delta in deltas)
    assert 0 < kept <= sum(stats.accepted_per_position)
    # every other token came with a step of its sequence: its prompt's, or a verification
    assert 3 * 40 - kept <= stats.verifications + len(requests)
    assert (stats.max_drafts, stats.chosen_drafts) == (3, 3)
    assert 1 < stats.accept_length < 4


@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize(("num_pages", "prompt", "max_tokens"), [(1, 40, 24), (2, 60, 68), (3, 64, 128), (1, 1, 63)])
def test_a_cache_that_a_sequence_just_fits(num_pages: int, prompt: int, max_tokens: int, drafts: int) -> None:
    """Drafts never cost a page that the answer itself does not need."""
    engine = engine_with(drafts, num_pages=num_pages)
    request = engine.add("a", prompt_of(prompt), max_tokens=max_tokens)
    (last,) = engine.drain()
    assert last.error is None
    assert engine.tokens["a"] == expected_output(request, MAX_MODEL_LEN)[0]
    engine.check_rest()


def test_when_pages_are_short_drafts_go_before_sequences() -> None:
    """Two sequences at a page's end, one page left: both go on without drafts, none is preempted for these."""
    engine = engine_with(4, num_pages=3)
    for name in ("a", "b"):
        engine.add(name, prompt_of(61, start=ord(name)), max_tokens=3, stop=())
    plans = []
    while (plan := engine.plan()) is not None:
        plans.append(plan)
        engine.receive()
    assert [len(tokens) for tokens in engine.tokens.values()] == [3, 3]
    assert engine.scheduler.stats().preemptions == 0
    engine.check_rest()


def test_drafts_never_make_sequences_sit_out() -> None:
    """Rows for four sequences and one draft each: the policy's three drafts do not fit, one does."""
    engine = engine_with(3, max_rows=11)
    for i in range(4):
        engine.add(f"r{i}", prompt_of(2, start=i), max_tokens=30)
    plans = []
    while (plan := engine.plan()) is not None:
        plans.append(plan)
        engine.receive()
    full = [plan for plan in plans if len(plan.decode) == 4]
    assert full and {plan.verify for plan in full[1:]} == {1}
    assert all(len(plan.decode) * (1 + plan.verify) <= 11 for plan in plans)


def test_a_worker_that_accepts_more_than_was_drafted_is_broken() -> None:
    engine = engine_with(2)
    engine.add("a", prompt_of(5))
    engine.step()
    engine.plan()
    engine.outputs[0].tokens[0][:] = [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="4 tokens for a sequence with 2 drafts"):
        engine.receive()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
@pytest.mark.parametrize("num_outputs", [60, 64, 65])
def test_a_lone_sequence_ends_in_the_last_position_of_the_cache(num_outputs: int, drafts: int, depth: int) -> None:
    """By a stop id, though it might have grown further: what is in flight may be that end, or be rejected."""
    prompt, stop = prompt_and_stop(2 * PAGE_SIZE + 1 - num_outputs, num_outputs)
    engine = engine_with(drafts, num_pages=2)
    request = engine.add("a", prompt, stop=[stop])
    assert [delta.finish_reason for delta in engine.drain(depth)] == ["stop"]
    assert engine.tokens["a"] == expected_output(request, MAX_MODEL_LEN)[0]
    assert engine.scheduler.take_failures() == []
    engine.check_rest()


def test_drafts_in_flight_are_waited_for_before_a_sequence_is_preempted() -> None:
    engine = engine_with(1, num_pages=2, max_num_seqs=2, enable_prefix_caching=False)
    for name in "ab":
        engine.add(name, prompt_of(PAGE_SIZE - 2, ord(name)))
    plans = []
    for tokens in ([[1], [1]], [[2], [2]]):
        plans.append(engine.scheduler.schedule())
        if len(plans) == 2:
            assert engine.scheduler.schedule() is None, "if both drafts are accepted the next tokens need pages"
        engine.scheduler.update(StepOutput(plans[-1].step, tokens, [[], []], [], 0.1))
    assert engine.scheduler.schedule().decode == [0, 1]
    assert engine.scheduler.stats().preemptions == 0
    assert engine.scheduler.schedule().freed == [1], "now it is known that both need one"


def prompt_and_stop(length: int, num_outputs: int) -> tuple[list[int], int]:
    """A prompt, and the token that is its `num_outputs`-th output and none before."""
    for start in range(1000):
        prompt = prompt_of(length, start)
        params = SamplingParams(temperature=0, max_tokens=num_outputs)
        *before, last = expected_output(AddRequest("", prompt, params), MAX_MODEL_LEN)[0]
        if last not in before:
            return prompt, last
    raise AssertionError("no such prompt")
