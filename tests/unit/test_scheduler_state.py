"""Rules of what is kept: the prefix cache, aborts, scores, seeds and faults. One test a rule."""

from typing import Any

import msgspec
import pytest

from configs.engine import PAGE_SIZE
from serve.driver.messages import RequestDelta
from serve.driver.outputs import to_signed64
from tests.fake_workers import row_logits
from tests.scheduler_engine import Engine, prompt_of
from workers.step import PromptScores, StepOutput

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
        ({"tokens": [[]]}, "step 0: 0 tokens for a sequence with 0 drafts"),
        ({"tokens": [[1, 2]]}, "step 0: 2 tokens for a sequence with 0 drafts"),
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
