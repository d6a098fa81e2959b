"""Ranges of the sampling parameters, and the wire format that carries them."""

import math
from typing import Any

import msgspec
import pytest

from workers.step import (
    Admission,
    FromWorker,
    PrefillChunk,
    PromptScores,
    SamplingParams,
    StepOutput,
    StepPlan,
    TokenLogprobs,
    ToWorker,
)

ACCEPTED = [
    ("temperature", 0.0, 100.0),
    ("top_p", 1e-9, 1.0),
    ("top_k", -1, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 1e-9, 100.0),
    ("seed", -(2**63), 2**63 - 1),
    ("logprobs", 0, 20),
    ("prompt_logprobs", 0, 20),
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 16),
]
REFUSED = [
    ("temperature", -0.1, 100.1),
    ("top_p", 0.0, 1.1),
    ("top_k", -2, 2**31),
    ("min_p", -0.1, 1.1),
    ("presence_penalty", -2.1, 2.1),
    ("frequency_penalty", -2.1, 2.1),
    ("repetition_penalty", 0.0, 100.1),
    ("seed", -(2**63) - 1, 2**63),
    ("logprobs", -1, 21),
    ("prompt_logprobs", -1, 21),
    ("max_tokens", 0, 2**31),
    ("min_tokens", -1, 17),
]
FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


def build(name: str, value: Any) -> SamplingParams:
    fields: dict[str, Any] = {name: value}
    return SamplingParams(**fields)


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, *values in ACCEPTED for v in values])
def test_ends_of_a_range_are_in_it(name: str, value: float) -> None:
    assert getattr(build(name, value), name) == value


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, *values in REFUSED for v in values])
def test_values_past_the_ends_are_refused_by_the_fields_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} .*{value}"):
        build(name, value)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be in .*, got {value}$"):
        build(name, value)


@pytest.mark.parametrize("bias", [-100.5, 101, math.nan])
def test_a_bias_out_of_range_is_refused_by_its_token(bias: float) -> None:
    with pytest.raises(ValueError, match=r"^logit_bias\[7\] must be in \[-100.0, 100.0\]"):
        SamplingParams(logit_bias={3: 1.0, 7: bias})


def test_min_tokens_past_max_tokens_says_both() -> None:
    with pytest.raises(ValueError, match=r"^min_tokens \(9\) must not exceed max_tokens \(8\)"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^stop must not contain an empty string"):
        SamplingParams(stop=("a", ""))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, False),
        ({"temperature": 0.0, "logit_bias": {1: 1.0}}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_only_penalties_need_the_history(params: dict[str, Any], expected: bool) -> None:
    assert SamplingParams(**params).has_penalties is expected


EVERYTHING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    seed=-(2**63),
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.2,
    logit_bias={0: -100.0, 4095: 2.5},
    logprobs=20,
    prompt_logprobs=3,
    prompt_logits=True,
    max_tokens=77,
    min_tokens=5,
    ignore_eos=True,
    stop_token_ids=(1, 2),
    stop=("END", "\n"),
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    grammar="{}",
)


def test_a_plan_with_everything_survives_the_wire() -> None:
    defaults = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        assert getattr(EVERYTHING, name) != getattr(defaults, name), f"{name} is not covered"
    plan = StepPlan(
        step=2**40,
        freed=[3, 1],
        admitted=[
            Admission(1, 2**63 - 1, EVERYTHING, 3, 64, [7, 5], [1, 2], [9, 9, 8, 4095]),
            Admission(0, -(2**63), defaults, 1, 0, [], [], []),
        ],
        new_pages=[(1, [8]), (2, [9, 10])],
        decode=[2, 5],
        chunks=[PrefillChunk(1, 64, [9, 8, 4095], True), PrefillChunk(0, 0, [1], False)],
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=ToWorker) == plan


def test_an_output_with_everything_survives_the_wire() -> None:
    scored = TokenLogprobs(-0.5, [4, 2], [-0.5, -1.5])
    prompt_scores = [PromptScores(1, 64, [scored], b"\x00\x01"), PromptScores(0, 0, [], b"")]
    output = StepOutput(7, [[5], [6, 4]], [[], [scored, scored]], prompt_scores, 0.25)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=FromWorker) == output


def test_a_plan_out_of_range_is_refused_on_arrival() -> None:
    raw = msgspec.msgpack.encode({"temperature": -1.0})
    with pytest.raises(msgspec.ValidationError, match="temperature must be in"):
        msgspec.msgpack.decode(raw, type=SamplingParams)
