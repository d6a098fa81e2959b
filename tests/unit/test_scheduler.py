"""Rules of planning: order, budget, overlap, ends and pages. One test a rule."""

import pytest

from configs.engine import PAGE_SIZE
from serve.driver.messages import AddRequest
from tests.fake_workers import expected_output
from tests.scheduler_engine import MAX_MODEL_LEN, Engine, prompt_of
from workers.step import PrefillChunk, SamplingParams, StepOutput, StepPlan

# ------------------------------------------------------------------------------------------------ budget and order


def test_nothing_to_do_is_no_plan() -> None:
    assert Engine().plan() is None


def test_a_step_mixes_decodes_then_running_prefills_then_admissions_within_the_budget() -> None:
    engine = Engine(max_rows=20)
    engine.add("a", prompt_of(5))
    engine.step()
    engine.add("b", prompt_of(30, 1))
    engine.add("c", prompt_of(10, 2))
    plan, deltas = engine.step()
    assert plan.decode == [0]
    assert plan.chunks == [PrefillChunk(1, 0, prompt_of(30, 1)[:19], False)]
    assert [delta.request_id for delta in deltas] == ["a"]
    plan, deltas = engine.step()
    assert plan.decode == [0]
    assert [admission.slot for admission in plan.admitted] == [2]
    assert plan.chunks == [
        PrefillChunk(1, 19, prompt_of(30, 1)[19:], True),
        PrefillChunk(2, 0, prompt_of(10, 2)[:8], False),
    ]
    assert [delta.request_id for delta in deltas] == ["a", "b"]
    assert engine.scheduler.stats().step_tokens == 20


def test_a_plan_carries_only_what_changed() -> None:
    engine = Engine()
    engine.add("a", prompt_of(PAGE_SIZE - 1))
    plan, _ = engine.step()
    assert len(plan.admitted[0].pages) == 1
    plan, _ = engine.step()  # fills the last position of the page
    assert plan == StepPlan(1, [], [], [], [0], [])
    plan, _ = engine.step()
    assert plan == StepPlan(2, [], [], [(0, [1])], [0], [])


def test_admission_by_priority_then_arrival() -> None:
    engine = Engine(max_num_seqs=1)
    for request_id, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -5)):
        engine.add(request_id, prompt_of(3), priority=priority, max_tokens=2)
    assert [delta.request_id for delta in engine.drain()] == ["urgent", "first", "second", "late"]
    engine.check_rest()


def test_no_more_sequences_than_slots() -> None:
    engine = Engine(max_num_seqs=2)
    for index in range(5):
        engine.add(str(index), prompt_of(3))
    plan, _ = engine.step()
    assert [admission.slot for admission in plan.admitted] == [0, 1]
    stats = engine.scheduler.stats()
    assert (stats.running, stats.waiting) == (2, 3)


def test_when_rows_are_fewer_than_sequences_the_first_come_first() -> None:
    engine = Engine(max_rows=2, max_num_seqs=3)
    requests = [engine.add(str(index), prompt_of(1, index), max_tokens=4) for index in range(3)]
    engine.drain()
    assert engine.tokens == {r.request_id: expected_output(r, MAX_MODEL_LEN)[0] for r in requests}
    engine.check_rest()


# ------------------------------------------------------------------------------------------------ overlap and ends


def test_the_next_step_is_planned_before_the_token_is_known() -> None:
    engine = Engine()
    request = engine.add("a", prompt_of(5), max_tokens=3)
    assert engine.plan().chunks[0].sample
    assert engine.plan().decode == [0]
    engine.receive()
    assert engine.plan().decode == [0]
    assert engine.plan() is None, "max_tokens are on their way"
    engine.receive()
    (delta,) = engine.receive()
    assert (delta.finish_reason, delta.stop_token_id) == ("length", None)
    assert engine.tokens["a"] == expected_output(request, MAX_MODEL_LEN)[0]
    assert engine.plan() is None
    engine.check_rest()


def test_max_model_len_ends_with_length_and_wastes_no_row() -> None:
    engine = Engine(max_model_len=8)
    request = engine.add("a", prompt_of(5))
    plans = []
    while (plan := engine.plan()) is not None:
        plans.append(plan)
    assert len(plans) == 3
    assert [engine.receive()[0].finish_reason for _ in plans] == [None, None, "length"]
    assert engine.tokens["a"] == expected_output(request, 8)[0]


def test_a_stop_leaves_a_ghost_whose_output_is_discarded() -> None:
    engine = Engine(max_num_seqs=1)
    probe = AddRequest("a", prompt_of(5), SamplingParams(temperature=0))
    stop = expected_output(probe, MAX_MODEL_LEN)[0][0]
    engine.add("a", prompt_of(5), stop=[stop])
    engine.add("b", prompt_of(5, 3), max_tokens=2)
    engine.plan()
    engine.plan()  # the ghost
    (delta,) = engine.receive()
    assert (delta.token_ids, delta.finish_reason, delta.stop_token_id) == ([stop], "stop", stop)
    plan = engine.plan()  # slot and page are given away while the ghost is in flight
    assert (plan.freed, plan.admitted[0].slot) == ([0], 0)
    assert engine.receive() == []
    assert [delta.request_id for delta in engine.receive()] == ["b"]
    engine.drain()
    engine.check_rest()


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 1), (1, 2), (3, 4)])
def test_stop_ids_count_only_after_min_tokens(min_tokens: int, length: int) -> None:
    engine = Engine()
    engine.add("a", prompt_of(5), min_tokens=min_tokens, max_tokens=9, stop=[7])
    for num_outputs in range(1, length + 1):
        plan = engine.scheduler.schedule()
        assert plan is not None
        (delta,) = engine.scheduler.update(StepOutput(plan.step, [[7]], [[]], [], 0.0))
        assert delta.finish_reason == ("stop" if num_outputs == length else None)
    engine.check_rest()


def test_a_stop_id_as_the_last_allowed_token_is_a_stop() -> None:
    tokens = expected_output(AddRequest("", prompt_of(5), SamplingParams(temperature=0)), MAX_MODEL_LEN)[0]
    engine = Engine()
    engine.add("a", prompt_of(5), max_tokens=1, stop=[tokens[0]])
    assert [delta.finish_reason for delta in engine.drain()] == ["stop"]


def test_freed_slots_wait_for_the_next_plan() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add("a", prompt_of(3), max_tokens=1)
    engine.step()
    assert engine.plan() is None
    engine.add("b", prompt_of(3))
    plan, _ = engine.step()
    assert (plan.freed, [admission.slot for admission in plan.admitted]) == ([0], [0])


# ------------------------------------------------------------------------------------------------ pages


def test_running_out_of_pages_preempts_the_latest_of_the_lowest_priority() -> None:
    engine = Engine(num_pages=3, max_num_seqs=3, max_model_len=190)
    requests = {
        name: engine.add(name, prompt_of(PAGE_SIZE - 2, start), priority=priority, max_tokens=20)
        for name, start, priority in (("low", 0, 1), ("high", 1, 0), ("high2", 2, 0))
    }
    for _ in range(4):
        engine.step()
    stats = engine.scheduler.stats()
    assert stats.preemptions == 2, "low gave its page to high, then high2 its own to high"
    assert (stats.running, stats.waiting) == (1, 2)
    assert [delta.request_id for delta in engine.drain()] == ["high", "high2", "low"]
    assert engine.tokens == {name: expected_output(r, 190)[0] for name, r in requests.items()}
    engine.check_rest()


def test_a_preempted_sequence_waits_for_its_tokens_in_flight_and_keeps_them() -> None:
    engine = Engine(num_pages=2, max_num_seqs=2, max_model_len=128)
    requests = [engine.add(name, prompt_of(PAGE_SIZE - 1, start), max_tokens=9) for name, start in (("a", 0), ("b", 1))]
    engine.plan()
    engine.plan()
    engine.receive()
    plan = engine.plan()  # a takes b's page while b's second token is in flight
    assert (plan.freed, plan.decode, plan.admitted) == ([1], [0], [])
    assert engine.scheduler.stats().preemptions == 1
    assert [delta.request_id for delta in engine.receive()] == ["a", "b"]
    while engine.outputs:
        engine.receive()
        engine.plan()
    assert engine.tokens == {r.request_id: expected_output(r, 128)[0] for r in requests}
    engine.check_rest()


def test_nobody_overtakes_a_sequence_in_the_step_that_preempts_it() -> None:
    engine = Engine(num_pages=3, max_num_seqs=3, max_model_len=128)
    for name, length in (("a", PAGE_SIZE - 1), ("b", PAGE_SIZE + 1)):
        engine.add(name, prompt_of(length, ord(name)), max_tokens=9)
    engine.plan()
    engine.plan()
    engine.receive()
    engine.add("c", prompt_of(5))  # would fit into the page that b leaves beside the one that a takes
    plan = engine.plan()
    assert (plan.freed, plan.decode, plan.admitted) == ([1], [0], [])
    while engine.outputs:
        engine.receive()
        engine.plan()
    assert list(engine.tokens) == ["a", "b", "c"]
    engine.check_rest()


def test_re_admission_brings_seed_prompt_length_and_history() -> None:
    engine = Engine(num_pages=2, max_num_seqs=2, max_model_len=128, seed=3)
    for name in "ab":
        engine.add(name, prompt_of(PAGE_SIZE - 1, ord(name)), max_tokens=9, presence_penalty=0.5)
    first, _ = engine.step()
    admissions = []
    while (plan := engine.plan()) is not None:
        engine.receive()
        admissions += [(admission, plan.chunks[-1]) for admission in plan.admitted]
    ((again, chunk),) = admissions
    known = prompt_of(PAGE_SIZE - 1, ord("b")) + engine.tokens["b"][:2]
    assert first.admitted[1].history == known[:-2]
    assert again.history == known
    assert (again.seed, again.num_prompt) == (first.admitted[1].seed, PAGE_SIZE - 1)
    assert chunk.token_ids == known[again.num_computed :]


def test_admission_leaves_pages_for_those_that_run() -> None:
    engine = Engine(num_pages=100, max_rows=7000, max_model_len=7000)
    engine.add("short", prompt_of(5), max_tokens=3)
    engine.add("long", prompt_of(5), max_tokens=9)
    engine.step()
    engine.add("huge", prompt_of(97 * PAGE_SIZE), max_tokens=1)  # 98 pages are free, 2 of them kept back
    assert engine.step()[0].admitted == []
    assert engine.step()[0].admitted == []
    assert len(engine.step()[0].admitted[0].pages) == 97


def test_a_request_that_can_never_fit_fails_when_added() -> None:
    engine = Engine(num_pages=2)
    engine.add("a", prompt_of(2 * PAGE_SIZE))
    engine.add("fits", prompt_of(2 * PAGE_SIZE), max_tokens=1)  # its only output needs no cache
    (failure,) = engine.scheduler.take_failures()
    assert (failure.request_id, failure.finish_reason) == ("a", "error")
    assert "needs 3 KV cache pages of 64 tokens, the cache has 2: raise kv_cache_bytes" in failure.error
    assert engine.scheduler.take_failures() == []
    assert [delta.request_id for delta in engine.drain()] == ["fits"]
    engine.check_rest()


def test_a_lone_sequence_that_outgrows_the_cache_fails_and_the_next_one_runs() -> None:
    engine = Engine(num_pages=1)
    engine.add("a", prompt_of(PAGE_SIZE - 3))
    engine.add("b", prompt_of(3), max_tokens=2)
    assert [delta.request_id for delta in engine.drain()] == ["b"]
    (failure,) = engine.scheduler.take_failures()
    assert (failure.request_id, failure.finish_reason) == ("a", "error")
    assert "kv_cache_bytes" in failure.error
    assert len(engine.tokens["a"]) == 4
    engine.check_rest()


@pytest.mark.parametrize("length", [0, 8, 9])
def test_prompts_of_impossible_length_fail(length: int) -> None:
    engine = Engine(max_model_len=8)
    engine.add("a", prompt_of(length))
    (failure,) = engine.scheduler.take_failures()
    assert failure.error == f"a prompt must have 1 to 7 tokens, this one has {length}"
    engine.check_rest()


def test_a_request_id_in_use_fails_once() -> None:
    engine = Engine()
    engine.add("a", prompt_of(3))
    engine.add("a", prompt_of(4))
    assert [failure.request_id for failure in engine.scheduler.take_failures()] == ["a"]
    engine.check_rest()
