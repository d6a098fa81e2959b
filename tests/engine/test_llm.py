"""`LLM` and its parameters end to end."""

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from configs.base import ConfigError
from serve.errors import EngineDeadError
from serve.llm import LLM
from tests.engine.conftest import PROMPTS
from workers.step import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def changed(**fields: object) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **fields)


def test_max_tokens_and_the_context_end_an_answer(llm: LLM) -> None:
    (short,) = llm.generate(["And"], changed(max_tokens=3, ignore_eos=True))
    assert (len(short.token_ids), short.finish_reason) == (3, "length")
    (full,) = llm.generate(["And"], changed(max_tokens=100_000, ignore_eos=True))
    assert len(full.prompt_token_ids) + len(full.token_ids) == llm.plan.max_model_len
    assert full.finish_reason == "length"


def test_stop_token_and_min_tokens(llm: LLM) -> None:
    (plain,) = llm.generate([PROMPTS[0]], GREEDY)
    stop_id = plain.token_ids[4]
    first = plain.token_ids.index(stop_id)
    (stopped,) = llm.generate([PROMPTS[0]], changed(stop_token_ids=(stop_id,)))
    assert stopped.token_ids == plain.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    (later,) = llm.generate([PROMPTS[0]], changed(stop_token_ids=(stop_id,), min_tokens=12))
    assert len(later.token_ids) >= 12
    assert stop_id not in later.token_ids[:12]


def test_stop_string(llm: LLM) -> None:
    (plain,) = llm.generate([PROMPTS[0]], GREEDY)
    word = plain.text.split()[3]
    (stopped,) = llm.generate([PROMPTS[0]], changed(stop=(word,)))
    assert stopped.text == plain.text[: plain.text.index(word)]
    assert stopped.finish_reason == "stop"
    (included,) = llm.generate([PROMPTS[0]], changed(stop=(word,), include_stop_str_in_output=True))
    assert included.text == stopped.text + word


def test_logit_bias_forces_a_token(llm: LLM) -> None:
    (biased,) = llm.generate([PROMPTS[0]], changed(logit_bias={77: 100.0}, max_tokens=5))
    assert biased.token_ids == [77] * 5


def test_logprobs_are_those_of_the_logits(llm: LLM) -> None:
    (done,) = llm.generate([PROMPTS[1]], changed(logprobs=4, max_tokens=6))
    (logits,) = llm.logits([done.prompt_token_ids + done.token_ids])
    rows = logits[len(done.prompt_token_ids) - 1 : -1].astype(np.float64)
    scores = (
        rows - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True)) - rows.max(-1, keepdims=True)
    )
    for entry, row, token in zip(done.logprobs, scores, done.token_ids, strict=True):
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert entry.top_ids == np.argsort(-row)[:4].tolist()
        assert entry.top_logprobs[0] == entry.logprob  # bit-equal: the same number


def test_unusable_prompts_start_nothing(llm: LLM) -> None:
    for bad in ([], [4096], [-1], list(range(512)), [True]):
        with pytest.raises(ValueError, match="prompt 1"):
            llm.submit([[5, 6], bad], GREEDY)
    (after,) = llm.generate([[5, 6]], GREEDY)
    assert after.token_ids


@pytest.mark.parametrize("fields", [{"logit_bias": {4096: 1.0}}, {"stop_token_ids": (-1,), "min_tokens": 2}])
def test_a_parameter_with_an_unknown_token_is_refused(llm: LLM, fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))} holds the token id"):
        llm.generate([[5, 6]], changed(**fields))
    assert llm.generate([[5, 6]], GREEDY)[0].token_ids


def test_an_engine_that_cannot_hold_one_sequence_says_what_to_raise(tiny_model: Path) -> None:
    with pytest.raises(EngineDeadError, match=r"holds 64 tokens.*kv_cache_bytes"):
        LLM(tiny_model, device="cpu", kv_cache_bytes=4 * 64 * (576 + 128) * 4)


def test_settings_that_cannot_work_fail_before_anything_starts(tiny_model: Path) -> None:
    for settings, message in [
        ({"tp": 3}, r"num_attention_heads \(8\) is not divisible by tp_size 3"),
        ({"tp": 2, "ep": 3}, r"ep_size \(3\) must divide tp_size \(2\)"),
        ({"max_model_len": 4097}, r"max_model_len \(4097\) exceeds 4096, max_position_embeddings"),
        ({"num_draft_tokens": 16}, "num_draft_tokens: .*less than or equal to 15"),
        ({"tensor_parallel": 2}, "tensor_parallel: unknown setting"),
    ]:
        with pytest.raises(ConfigError, match=message):
            LLM(tiny_model, **settings)


def test_a_killed_worker_fails_requests_at_once(tiny_model: Path) -> None:
    with LLM(tiny_model, tp=2, device="cpu") as two:
        (future,) = two.submit(["And"], changed(max_tokens=120, ignore_eos=True))
        two.engine._host._workers[1].kill()
        with pytest.raises(EngineDeadError, match="worker"):
            future.result(timeout=30)
        with pytest.raises(EngineDeadError):
            two.generate(["And"], GREEDY)


def test_a_request_that_cannot_be_sent_leaves_nothing_behind(llm: LLM) -> None:
    async def twice() -> None:
        for _ in range(2):
            with pytest.raises(UnicodeEncodeError):
                await anext(llm.engine.generate([5], GREEDY, request_id="same", cache_salt="\ud800"))

    llm._run(twice()).result(timeout=10)


def test_a_suspended_request_can_be_closed_after_the_engine(tiny_model: Path) -> None:
    with LLM(tiny_model, device="cpu") as other:
        stream = other.engine.generate([5], changed(max_tokens=100, ignore_eos=True), request_id="a")
        other._run(anext(stream)).result(timeout=10)
        other._run(other.engine.stop()).result(timeout=10)
        with pytest.raises(EngineDeadError, match="was stopped"):
            other._run(anext(stream)).result(timeout=10)
        other._run(stream.aclose()).result(timeout=10)


def test_a_long_temporary_folder_is_no_obstacle(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with LLM(tiny_model, device="cpu") as other:
        assert other.generate([[5, 6]], GREEDY)[0].token_ids
    assert list(long.iterdir()) == []


def test_progress_is_told_apart_from_pauses(tiny_model: Path) -> None:
    with LLM(tiny_model, device="cpu") as llm:
        time.sleep(0.2)
        assert llm.engine.stalled_s == 0.0
        (future,) = llm.submit(["And"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        while llm.engine.stalled_s == 0.0 and not future.done():
            time.sleep(0.001)
        assert not future.done()  # a pending request counts from its arrival on
        future.result()
        assert llm.engine.stalled_s == 0.0
