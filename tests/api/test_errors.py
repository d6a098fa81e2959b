"""Bad requests: OpenAI's envelope with the field's name, nothing sent to the engine, and the next request is served."""

import asyncio
import json
import math

import msgspec
import pytest

from serve.api import transport
from serve.api.errors import ApiError
from serve.driver.messages import RequestDelta
from serve.errors import EngineDeadError
from tests.api.conftest import BASE, CMPL
from tests.api.fake_engine import Script

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def api(make_api, bytes_of):
    return make_api(Script([*bytes_of("ok"), 1]))


def refused(api, answer, status, param, code=None):
    """Checks the envelope, and that the engine saw nothing and still serves."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["code"] == code
    assert api.engine.calls == []
    assert api.chat().json()["choices"][0]["message"]["content"] == "ok"
    return error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", -1),
        ("temperature", 101),
        ("top_p", 0),
        ("top_p", "0.5"),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("n", 0),
        ("n", -1),
        ("n", 1000),
        ("n", "2"),
        ("n", True),
        ("seed", 1.5),
        ("seed", 2**63),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop", 5),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [4096]),
        ("stop_token_ids", [-1]),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"5000": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 200}),
        ("logit_bias", [1]),
        ("min_tokens", -1),
        ("stream", "yes"),
        ("stream", 1),
        ("ignore_eos", 1),
        ("user", 5),
        ("priority", "high"),
        ("cache_salt", 7),
        ("skip_special_tokens", "no"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_wrong_values_name_their_field(api, path, field, value):
    body = (BASE if path == CHAT else CMPL) | {field: value}
    answer = api.post(path, body)
    param = answer.json()["error"]["param"]
    assert param.startswith(field)  # e.g. stop_token_ids[0]
    assert field in refused(api, answer, 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, None),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": "yes"}, "stream": True}, "stream_options.include_usage"),
    ],
)
def test_wrong_chat_values(api, fields, param):
    answer = api.request("POST", CHAT, content=json.dumps(BASE | fields))
    code = {None: "invalid_json", "messages": answer.json()["error"]["code"]}.get(param)
    refused(api, answer, 400, param, code)


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], ["a", ""], [["a"]], [1, "a"], [1.5], [True], [-1], [4096], [[1], [4096]], {"a": 1}, 5, [[1], "a"]],
)
def test_wrong_prompts(api, prompt):
    refused(api, api.complete(prompt=prompt), 400, "prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"), ({"max_tokens": 0}, "max_tokens"),
     ({"echo": "yes"}, "echo")],
)  # fmt: skip
def test_wrong_completion_values(api, fields, param):
    refused(api, api.complete(**fields), 400, param)


def test_missing_fields(api):
    refused(api, api.post(CHAT, {"model": "tiny"}), 400, "messages")
    api.engine.calls.clear()
    refused(api, api.post(TEXT, {"model": "tiny"}), 400, "prompt")


def test_all_prompts_are_checked_before_the_first_is_sent(api):
    message = refused(api, api.complete(prompt=[[5, 6], [7, 9999]]), 400, "prompt")
    assert "9999" in message


@pytest.mark.parametrize(
    ("name", "value", "path"),
    [
        ("functions", [{"name": "f"}], CHAT),
        ("tools", [{"type": "function", "function": {"name": "f"}}], TEXT),
        ("tool_choice", "required", TEXT),
        ("reasoning_effort", "high", TEXT),
        ("audio", {"voice": "x"}, CHAT),
        ("modalities", ["text", "audio"], CHAT),
        ("prediction", {"type": "content", "content": "x"}, CHAT),
        ("suffix", "end", TEXT),
        ("best_of", 3, TEXT),
        ("use_beam_search", True, TEXT),
        ("prompt_logprobs", 0, TEXT),
        ("echo", True, CHAT),
        ("chat_template", "{{ 1 }}", CHAT),
    ],
)
def test_known_parameters_are_refused_by_name(api, name, value, path):
    answer = api.post(path, (BASE if path == CHAT else CMPL) | {name: value})
    assert name in refused(api, answer, 400, name, "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"store": False},
        {"best_of": 1},
        {"parallel_tool_calls": True, "metadata": {"a": "b"}, "made_up": {"x": 1}},
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_values_that_ask_for_nothing_pass(api, fields, path):
    answer = api.post(path, (BASE if path == CHAT else CMPL) | fields)
    assert answer.status_code == 200, answer.text
    assert len(api.engine.calls) == 1


def test_best_of_equal_to_n_passes(api):
    answer = api.complete(n=2, best_of=2)
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]


@pytest.mark.parametrize(
    "body",
    [
        ("POST", CHAT, BASE | {"messages": [{"role": "user", "content": "long " * 300}]}, "messages"),
        ("POST", TEXT, CMPL | {"prompt": "long " * 300}, "prompt"),
        ("POST", TEXT, CMPL | {"prompt": [5] * 300}, "prompt"),
        ("POST", TEXT, CMPL | {"prompt": [5] * 128}, "prompt"),
        ("POST", TEXT, CMPL | {"prompt": "x" * 10_000_000}, "prompt"),
        ("POST", TEXT, CMPL | {"prompt": [5] * 100, "max_tokens": 29}, "max_tokens"),
        ("POST", CHAT, BASE | {"max_completion_tokens": 128}, "max_completion_tokens"),
    ],
)
def test_too_long(api, body):
    method, path, content, param = body
    message = refused(api, api.request(method, path, json=content), 400, param, "context_length_exceeded")
    assert "This model's maximum context length is 128 tokens" in message
    assert "context_length_exceeded" in message


def test_the_context_may_be_filled_exactly(api):
    assert api.complete(prompt=[5] * 100, max_tokens=28).status_code == 200
    assert api.engine.calls[0].params.max_tokens == 28


def test_models(api):
    message = refused(api, api.chat(model="nope"), 404, "model", "model_not_found")
    assert "nope" in message
    assert api.post(TEXT, {"prompt": "hi"}).json()["model"] == "tiny"
    listing = api.request("GET", "/v1/models").json()
    assert listing["object"] == "list"
    assert [(m["id"], m["object"], m["owned_by"], m["max_model_len"]) for m in listing["data"]] == [
        ("tiny", "model", "shoal", 128)
    ]
    assert api.request("GET", "/v1/models/tiny").json() == listing["data"][0]
    assert api.request("GET", "/v1/models/some/other").json()["error"]["code"] == "model_not_found"
    assert api.request("GET", "/v1/models/some/other").status_code == 404


@pytest.mark.parametrize("content", [b"", b"{", b"nonsense", b"\xff\xfe", b'{"temperature": NaN}', b"[" * 100_000])
def test_bodies_that_are_not_json(api, content):
    refused(api, api.request("POST", CHAT, content=content), 400, None, "invalid_json")


@pytest.mark.parametrize("content", [b"[]", b"null", b'"text"', b"3"])
def test_bodies_that_are_no_object(api, content):
    refused(api, api.request("POST", CHAT, content=content), 400, None)


def test_too_large_a_body(api, monkeypatch):
    monkeypatch.setattr(transport, "MAX_BODY_BYTES", 1000)
    refused(api, api.complete(prompt="x" * 1000), 413, None, "request_too_large")

    async def pieces():
        for _ in range(11):
            yield b"x" * 100

    api.engine.calls.clear()
    refused(api, api.request("POST", TEXT, content=pieces()), 413, None, "request_too_large")


def test_unknown_routes_and_methods(api):
    refused(api, api.request("GET", "/v1/nothing"), 404, None, "unknown_url")
    api.engine.calls.clear()
    answer = api.request("GET", CHAT)
    refused(api, answer, 405, None, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("kind", ["chat", "complete"])
def test_an_internal_error_shows_no_internals(make_api, bytes_of, kind):
    answer = getattr(make_api(Script(bytes_of("hello"), fail_after=2)), kind)()
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "internal_error"
    assert "secret" not in answer.text


def test_a_failure_of_one_request_carries_its_reason(make_api, bytes_of):
    api = make_api(lambda call: Script(bytes_of("hello")))

    async def generate(token_ids, params, **kwargs):
        yield RequestDelta(kwargs["request_id"], [], finish_reason="error", error="needs 9 pages, 4 exist")

    api.engine.generate = generate
    answer = api.chat()
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "needs 9 pages, 4 exist")
    assert answer.json()["error"]["code"] == "engine_error"


def test_a_stream_of_the_engine_that_just_ends_is_an_error(make_api):
    api = make_api(Script([]))
    assert api.chat().status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_refuses_at_once(api, stream):
    api.engine.dead = "worker 1 was lost"
    for answer in (api.chat(stream=stream), api.complete(stream=stream)):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert answer.json()["error"]["code"] == "engine_dead"
    assert api.engine.calls == []


def test_an_engine_that_dies_during_a_request(make_api, bytes_of):
    api = make_api(Script(bytes_of("hello"), fail_after=2, error=EngineDeadError("gone")))
    answer = api.chat()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


def test_health(api):
    assert api.request("GET", "/health").status_code == 200
    api.engine.dead = "worker 1 was lost"
    answer = api.request("GET", "/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"


def test_health_of_an_engine_that_makes_no_progress(make_api, bytes_of):
    api = make_api(Script([*bytes_of("ok"), 1]), stall_s=30)
    for stalled, status in ((0, 200), (29, 200), (31, 503), (2, 200)):
        api.engine.stalled_s = stalled
        answer = api.request("GET", "/health")
        assert answer.status_code == status
        assert status == 200 or (answer.json()["error"]["code"], answer.headers["retry-after"]) == (
            "engine_stalled",
            "5",
        )
    api.engine.stalled_s = 31
    assert api.chat().status_code == 200  # only health checks mind


def test_version(api):
    assert list(api.request("GET", "/version").json()) == ["version"]


def test_line_separators_are_escaped_in_events():
    event = transport._event({"text": "a\u2028b\u2029c\u0085d"})
    assert len(event.decode().splitlines()) == 2
    assert msgspec.json.decode(event[6:]) == {"text": "a\u2028b\u2029c\u0085d"}


def test_infinities_in_handle_bodies_are_refused(api):
    with pytest.raises(ApiError) as raised:
        asyncio.run(api.serving.chat(BASE | {"temperature": math.inf}))
    assert (raised.value.status, raised.value.param) == (400, "temperature")
    with pytest.raises(ApiError) as raised:
        asyncio.run(api.serving.completions(CMPL | {"prompt": "\ud800"}))
    assert (raised.value.status, raised.value.param) == (400, "prompt")
