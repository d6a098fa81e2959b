"""Every parameter reaches the engine or changes the text as its definition says."""

import itertools

import pytest

from serve.api.sampling import checkpoint_defaults
from tests.api.conftest import FOLDER
from tests.api.fake_engine import Script
from workers.step import SamplingParams

NULLS = [
    *("temperature", "top_p", "n", "stop", "max_tokens", "seed", "logit_bias", "tools", "tool_choice", "user"),
    *("response_format", "stream_options", "logprobs", "top_logprobs", "echo", "suffix", "best_of", "stream"),
    *("top_k", "min_p", "stop_token_ids", "presence_penalty", "priority"),
]


@pytest.fixture
def api(make_api, bytes_of):
    return make_api(Script([*bytes_of("some text"), 1]))


@pytest.mark.parametrize("kind", ["chat", "complete"])
def test_null_is_absent(api, kind):
    without = getattr(api, kind)()
    with_nulls = getattr(api, kind)(**dict.fromkeys(NULLS))
    assert with_nulls.status_code == 200, with_nulls.text
    assert api.engine.calls[0].params == api.engine.calls[1].params
    assert with_nulls.json()["choices"] == without.json()["choices"]


@pytest.mark.parametrize("kind", ["chat", "complete"])
def test_everything_reaches_the_engine(api, kind):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 2, "6": -1.5},
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [40, 41],
        "stop": ["x", "yy"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    assert getattr(api, kind)(**fields, priority=-3, cache_salt="tenant").status_code == 200
    call = api.engine.calls[0]
    changed = {"logit_bias": {5: 2.0, 6: -1.5}, "stop_token_ids": (40, 41), "stop": ("x", "yy")}
    assert call.params == SamplingParams(**(fields | changed))
    assert (call.priority, call.cache_salt) == (-3, "tenant")


def test_default_lengths(api):
    api.chat()
    api.complete()
    api.complete(prompt=[5] * 120)
    api.chat(max_tokens=5)
    api.chat(max_tokens=5, max_completion_tokens=6)
    lengths = [call.params.max_tokens for call in api.engine.calls]
    assert lengths == [128 - len(api.engine.calls[0].token_ids), 16, 8, 5, 6]


def test_defaults_come_from_the_checkpoint(make_api, bytes_of):
    defaults = checkpoint_defaults(FOLDER)
    assert defaults == {"temperature": 0.6, "top_p": 0.95}
    api = make_api(Script(bytes_of("a")), sampling_defaults=defaults)
    api.chat()
    api.chat(temperature=0, top_p=1.0)
    params = [call.params for call in api.engine.calls]
    assert [(p.temperature, p.top_p) for p in params] == [(0.6, 0.95), (0.0, 1.0)]


def test_seeds_of_several_choices(api):
    api.complete(n=3, seed=7)
    assert [call.params.seed for call in api.engine.calls] == [7, 8, 9]
    api.engine.calls.clear()
    api.complete(n=2)
    assert [call.params.seed for call in api.engine.calls] == [None, None]


def test_request_ids_are_unique(api):
    api.complete(prompt=["a", "b"], n=2)
    api.complete()
    assert len({call.request_id for call in api.engine.calls}) == 5


def test_min_tokens_masks_eos(make_api, bytes_of):
    api = make_api(Script([1, *bytes_of("ab"), 1, *bytes_of("cdef"), 1, *bytes_of("gh")]))
    assert api.complete().json()["choices"][0]["text"] == ""
    answer = api.complete(min_tokens=5).json()
    assert answer["choices"][0] == {"index": 0, "text": "abcdef", "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] == 7  # eos counts


def test_min_tokens_also_spares_stop_strings(make_api, bytes_of):
    api = make_api(Script(bytes_of("a.b.c.d.e")))
    texts = [api.complete(stop=".", min_tokens=n).json()["choices"][0]["text"] for n in (0, 1, 2, 3, 6)]
    assert texts == ["a", "a", "a.b", "a.b", "a.b.c.d"]


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 0])
def test_ignore_eos_and_special_tokens(make_api, bytes_of, cut):
    api = make_api(Script([*bytes_of("ab"), 1, *bytes_of("cd")], cut=cut))
    assert api.complete().json()["choices"][0]["text"] == "ab"
    answer = api.complete(ignore_eos=True).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("abcd", "length")
    shown = api.complete(ignore_eos=True, skip_special_tokens=False).json()["choices"][0]["text"]
    assert shown == "ab<｜end▁of▁sentence｜>cd"


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 0])
def test_stop_token_ids(make_api, bytes_of, cut):
    api = make_api(Script(bytes_of("ab;cd"), cut=cut))
    stop = bytes_of(";")
    answer = api.complete(stop_token_ids=stop).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("ab", "stop")
    assert answer["usage"]["completion_tokens"] == 3
    kept = api.complete(stop_token_ids=stop, include_stop_str_in_output=True).json()
    assert kept["choices"][0]["text"] == "ab;"


@pytest.mark.parametrize(("cut", "stream"), list(itertools.product([1, 2, 3, 7, 0], [False, True])))
def test_include_stop_string(make_api, bytes_of, cut, stream):
    api = make_api(Script(bytes_of("one two three"), cut=cut))
    fields = {"stop": ["three", "two"], "include_stop_str_in_output": True}
    if stream:
        *chunks, _ = api.stream("complete", **fields)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    else:
        text = api.complete(**fields).json()["choices"][0]["text"]
    assert text == "one two"


def test_an_empty_stop_list_is_no_stop(api):
    assert api.chat(stop=[]).json()["choices"][0]["message"]["content"] == "some text"


def test_prompts_of_every_kind(api, tokenizer):
    ids = tokenizer.encode("hi there", add_special_tokens=True)
    for prompt, sent in [
        ("hi there", [ids]),
        (["hi there", "hi there"], [ids, ids]),
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ]:
        api.engine.calls.clear()
        answer = api.complete(prompt=prompt).json()
        assert [call.token_ids for call in api.engine.calls] == sent
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(sent)))
        assert answer["object"] == "text_completion"
        assert answer["id"].startswith("cmpl-")
        assert answer["usage"]["prompt_tokens"] == sum(map(len, sent))


def test_prompts_and_choices_are_ordered(make_api, bytes_of):
    """Choices of prompt p are p * n to p * n + n - 1, whatever finishes first."""
    api = make_api(lambda call: Script(bytes_of("x" * (9 - int(call.request_id.rsplit("-")[-1])))))
    answer = api.complete(prompt=[[5], [6, 7]], n=2).json()
    assert [len(choice["text"]) for choice in answer["choices"]] == [9, 8, 7, 6]
    assert [call.token_ids for call in api.engine.calls] == [[5], [5], [6, 7], [6, 7]]
    assert answer["usage"]["prompt_tokens"] == 3
