"""One test a rule. `step` runs a plan on the fake worker; `plan` alone leaves it in flight."""

from typing import Any

import msgspec
import pytest

from configs.engine import PAGE_SIZE
from serve.driver.messages import AddRequest, RequestDelta
from serve.driver.outputs import to_signed64
from serve.driver.pages import PageManager
from serve.driver.scheduler import Scheduler
from tests.fake_workers import VOCAB, FakeWorker, expected_output, row_logits
from workers.step import PrefillChunk, PromptScores, SamplingParams, StepOutput, StepPlan

MAX_MODEL_LEN = 1000


class Engine:
    def __init__(self, num_pages: int = 64, max_num_seqs: int = 4, max_rows: int = 256, **settings: Any) -> None:
        self.pages = PageManager(num_pages)
        self.max_model_len = settings.setdefault("max_model_len", MAX_MODEL_LEN)
        self.scheduler = Scheduler(self.pages, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_rows, **settings)
        self.worker = FakeWorker(num_pages, max_num_seqs, max_rows)
        self.outputs: list[StepOutput] = []
        self.tokens: dict[str, list[int]] = {}

    def add(
        self, request_id: str, prompt: list[int], *, priority: int = 0, salt: str = "", stop=(), **params
    ) -> AddRequest:
        params = {"temperature": 0, "max_tokens": 500} | params
        request = AddRequest(request_id, prompt, SamplingParams(**params), priority, salt, tuple(stop))
        self.scheduler.add(request)
        return request

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.outputs.append(self.worker.execute(plan))
        return plan

    def receive(self) -> list[RequestDelta]:
        deltas = self.scheduler.update(self.outputs.pop(0))
        for delta in deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        return deltas

    def step(self) -> tuple[StepPlan, list[RequestDelta]]:
        plan = self.plan()
        assert plan is not None
        return plan, self.receive()

    def drain(self) -> list[RequestDelta]:
        """Runs to the end, one plan in flight; returns the last deltas of all requests."""
        last = []
        while self.plan() is not None:
            last += [delta for delta in self.receive() if delta.finish_reason]
        return last

    def check_rest(self) -> None:
        self.scheduler.check_integrity()
        self.pages.check_integrity()


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % VOCAB for i in range(length)]


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


# ------------------------------------------------------------------------------------------------ prefix cache


def cached_tokens(engine: Engine, request_id: str, prompt: list[int], **options: Any) -> int:
    """num_cached_tokens of a request's first delta; checked against its admission."""
    engine.add(request_id, prompt, **({"max_tokens": 2} | options))
    plan, (delta,) = engine.step()
    assert delta.num_cached_tokens == plan.admitted[0].num_computed
    assert sum(len(chunk.token_ids) for chunk in plan.chunks) == len(prompt) - delta.num_cached_tokens
    _, (second,) = engine.step()
    assert (second.num_cached_tokens, second.finish_reason) == (0, "length")
    return delta.num_cached_tokens


def test_full_pages_of_a_known_prefix_are_reused_but_never_the_whole_prompt() -> None:
    engine = Engine()
    prompt = prompt_of(2 * PAGE_SIZE)
    assert cached_tokens(engine, "cold", prompt) == 0
    assert cached_tokens(engine, "same", prompt) == PAGE_SIZE
    assert cached_tokens(engine, "longer", [*prompt, 1]) == 2 * PAGE_SIZE
    assert cached_tokens(engine, "other end", [*prompt[:-1], 49, 1]) == PAGE_SIZE
    assert cached_tokens(engine, "other start", [49, *prompt[1:], 1]) == 0
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (10 * PAGE_SIZE + 3, 4 * PAGE_SIZE)
    assert stats.prompt_tokens == stats.prefix_queries
    assert stats.generated_tokens == 10
    engine.check_rest()


def test_generated_tokens_are_cached_too() -> None:
    engine = Engine()
    engine.add("a", prompt_of(PAGE_SIZE - 4), max_tokens=9)
    engine.drain()
    assert cached_tokens(engine, "b", prompt_of(PAGE_SIZE - 4) + engine.tokens["a"]) == PAGE_SIZE


def test_a_page_is_not_cached_before_its_last_position_is_computed() -> None:
    engine = Engine()
    engine.add("a", prompt_of(PAGE_SIZE - 1), max_tokens=1)
    engine.drain()  # 64 tokens are known, the last was never run
    assert cached_tokens(engine, "b", prompt_of(PAGE_SIZE - 1) + engine.tokens["a"] + [1]) == 0


def test_pages_of_a_prompt_are_cached_as_its_chunks_are_sent() -> None:
    engine = Engine(max_rows=PAGE_SIZE + 10)
    prompt = prompt_of(2 * PAGE_SIZE)
    engine.add("a", prompt)
    engine.step()
    engine.add("b", [*prompt, 1])
    plan, _ = engine.step()
    assert [chunk.start for chunk in plan.chunks] == [PAGE_SIZE + 10, PAGE_SIZE]
    assert plan.admitted[0].num_computed == PAGE_SIZE


def test_salts_do_not_share() -> None:
    engine = Engine()
    prompt = prompt_of(PAGE_SIZE + 1)
    assert cached_tokens(engine, "a", prompt, salt="x") == 0
    assert cached_tokens(engine, "b", prompt, salt="y") == 0
    assert cached_tokens(engine, "c", prompt) == 0
    assert cached_tokens(engine, "d", prompt, salt="x") == PAGE_SIZE


@pytest.mark.parametrize("wish", [{"prompt_logprobs": 0}, {"prompt_logits": True}])
def test_requests_for_prompt_rows_compute_all_of_them_but_share_theirs(wish: dict) -> None:
    engine = Engine()
    prompt = prompt_of(PAGE_SIZE + 1)
    assert cached_tokens(engine, "a", prompt, **wish) == 0
    assert cached_tokens(engine, "b", prompt, **wish) == 0
    assert cached_tokens(engine, "c", prompt) == PAGE_SIZE


def test_the_prefix_cache_can_be_off() -> None:
    engine = Engine(enable_prefix_caching=False)
    assert cached_tokens(engine, "a", prompt_of(PAGE_SIZE + 1)) == 0
    assert cached_tokens(engine, "b", prompt_of(PAGE_SIZE + 1)) == 0
    assert engine.scheduler.stats().prefix_queries == 0


def test_a_prefix_in_flight_is_shared_by_the_next_plan_but_not_within_one() -> None:
    engine = Engine()
    prompt = prompt_of(PAGE_SIZE + 1)
    engine.add("a", prompt)
    engine.add("b", prompt)
    plan = engine.plan()
    assert [admission.num_computed for admission in plan.admitted] == [0, 0]
    engine.add("c", prompt)
    plan = engine.plan()
    assert [admission.num_computed for admission in plan.admitted] == [PAGE_SIZE]
    assert plan.admitted[0].pages[0] == 0, "the first page registered is the one that is shared"


def test_cached_pages_give_way_to_new_requests() -> None:
    engine = Engine(num_pages=2)
    assert cached_tokens(engine, "a", prompt_of(PAGE_SIZE + 1)) == 0
    assert cached_tokens(engine, "b", prompt_of(PAGE_SIZE + 1, 1)) == 0
    assert cached_tokens(engine, "a again", prompt_of(PAGE_SIZE + 1)) == 0


# ------------------------------------------------------------------------------------------------ abort


def test_abort_waiting_running_in_flight_and_unknown() -> None:
    engine = Engine(max_num_seqs=2)
    for name in ("running", "other", "waiting", "waiting too"):
        engine.add(name, prompt_of(3), max_tokens=3)
    engine.plan()
    engine.scheduler.abort(["running", "waiting", "nobody"])
    stats = engine.scheduler.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (1, 1, 1)
    assert [delta.request_id for delta in engine.receive()] == ["other"]
    assert [delta.request_id for delta in engine.drain()] == ["other", "waiting too"]
    assert engine.scheduler.take_failures() == []
    engine.check_rest()


def test_abort_of_a_preempted_sequence_with_a_token_in_flight() -> None:
    engine = Engine(num_pages=2, max_num_seqs=2, max_model_len=128)
    engine.add("a", prompt_of(PAGE_SIZE - 1), max_tokens=4)
    engine.add("b", prompt_of(PAGE_SIZE - 1, 1), max_tokens=4)
    engine.plan()
    engine.plan()
    engine.receive()
    engine.plan()
    assert engine.scheduler.stats().preemptions == 1
    engine.scheduler.abort(["b"])
    assert [delta.request_id for delta in engine.receive()] == ["a"]
    assert [delta.request_id for delta in engine.receive()] == ["a"]
    assert [delta.request_id for delta in engine.drain()] == ["a"]
    engine.check_rest()


def test_aborted_waiting_requests_are_forgotten() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", prompt_of(3))
    engine.step()
    for index in range(100):
        engine.add(str(index), prompt_of(3), max_tokens=1)
    engine.scheduler.abort([str(index) for index in range(99)])
    assert engine.scheduler.stats().waiting == 1
    assert len(engine.scheduler._waiting._heap) < 4
    engine.scheduler.abort(["a"])
    assert [delta.request_id for delta in engine.drain()] == ["99"]


# ------------------------------------------------------------------------------------------------ scores, seeds, faults


def test_prompt_scores_reach_their_request_with_or_without_tokens() -> None:
    engine = Engine(max_rows=4)
    engine.add("a", prompt_of(6), prompt_logits=True, max_tokens=2)
    _, (delta,) = engine.step()
    assert delta == RequestDelta(
        "a", [], prompt_scores=[PromptScores(0, 0, [], b"".join(map(row_logits, prompt_of(6)[:4])))]
    )
    _, (delta,) = engine.step()
    assert len(delta.token_ids) == 1
    assert delta.prompt_scores == [PromptScores(0, 4, [], b"".join(map(row_logits, prompt_of(6)[4:])))]


def test_prompt_scores_are_told_once_despite_a_preemption_amid_the_prompt() -> None:
    engine = Engine(num_pages=4, max_num_seqs=2, max_rows=50, max_model_len=250)
    engine.add("first", prompt_of(PAGE_SIZE - 20), max_tokens=60)
    engine.step()
    prompt = prompt_of(2 * PAGE_SIZE + 5, 1)
    engine.add("scored", prompt, prompt_logits=True, max_tokens=3)
    told: list[PromptScores] = []
    for _ in range(2):
        told += [scores for delta in engine.step()[1] for scores in delta.prompt_scores]
    seq = engine.scheduler._sequences["scored"]
    assert 0 < seq.num_scored < len(prompt)
    engine.scheduler._preempt(seq)
    engine.scheduler.abort(["first"])  # so that the chunks are cut differently the second time
    while engine.plan() is not None:
        told += [scores for delta in engine.receive() for scores in delta.prompt_scores]
    assert b"".join(scores.logits for scores in told) == b"".join(map(row_logits, prompt))
    assert len(engine.tokens["scored"]) == 3
    engine.check_rest()


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
def test_a_request_keeps_its_seed(seed: int) -> None:
    engine = Engine(seed=1)
    engine.add("a", prompt_of(3), seed=seed)
    assert engine.step()[0].admitted[0].seed == seed


@pytest.mark.parametrize(
    ("seed", "wrapped"), [(2**63, -(2**63)), (2**64 + 5, 5), (-(2**64) - 1, -1), (10**30, 5076944270305263616)]
)
def test_any_integer_becomes_a_signed_64_bit_seed(seed: int, wrapped: int) -> None:
    assert to_signed64(seed) == wrapped


def drawn_seeds(engine_seed: int | None) -> list[int]:
    engine = Engine(seed=engine_seed)
    for name in "abc":
        engine.add(name, prompt_of(3))
    return [admission.seed for admission in engine.step()[0].admitted]


def test_seeds_drawn_by_the_driver_repeat_only_under_an_engine_seed() -> None:
    assert drawn_seeds(5) == drawn_seeds(5)
    assert drawn_seeds(5) != drawn_seeds(6)
    assert drawn_seeds(None) != drawn_seeds(None)
    seeds = drawn_seeds(5) + drawn_seeds(None)
    assert len(set(seeds)) == 6
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 1}, "a worker answered step 1, expected 0"),
        ({"tokens": []}, "step 0 sampled 1 sequences, a worker answered 0 token lists"),
        ({"tokens": [[]]}, "step 0: 0 tokens for a sequence that reserved 1"),
        ({"tokens": [[1, 2]]}, "step 0: 2 tokens for a sequence that reserved 1"),
        ({"prompt_scores": [PromptScores(3, 0, [], b"")]}, "prompt scores for slot 3, which had no chunk"),
    ],
)
def test_an_output_of_the_wrong_shape_is_an_error(change: dict, message: str) -> None:
    engine = Engine()
    engine.add("a", prompt_of(3))
    engine.plan()
    with pytest.raises(RuntimeError, match=message):
        engine.scheduler.update(msgspec.structs.replace(engine.outputs[0], **change))


def test_an_output_nobody_asked_for_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="answered step 0, expected none"):
        Engine().scheduler.update(StepOutput(0, [], [], [], 0.0))


def test_integrity_check_sees_unfinished_requests_and_leaks() -> None:
    engine = Engine()
    engine.add("a", prompt_of(3), max_tokens=1)
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        engine.scheduler.check_integrity()
    engine.drain()
    engine.pages.allocate(1)
    with pytest.raises(RuntimeError, match="4 of 4 slots free and 1 pages held"):
        engine.scheduler.check_integrity()
