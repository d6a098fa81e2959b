"""Bounds on what may wait and how long: who is refused, with what, and that nobody is forgotten."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from configs.base import ConfigError
from configs.engine import ServeConfig
from serve.api.admission import Admission
from serve.api.errors import ApiError
from tests import REPOSITORY
from tests.api.conftest import BASE, CMPL, Api
from tests.api.fake_engine import Script


def test_sequences() -> None:
    admission = Admission(max_sequences=3)
    first = admission.enter([5, 5])
    second = admission.enter([5])
    for lens in ([1], [1, 1]):
        with pytest.raises(ApiError, match="The server is full: 3 sequences are before this request") as refused:
            admission.enter(lens)
        assert (refused.value.status, refused.value.headers()) == (429, {"Retry-After": "1"})
    first.leave()
    first.leave()
    assert admission.num_sequences == 1
    third = admission.enter([1, 1])
    second.leave()
    third.leave()
    assert (admission.num_sequences, admission.num_waiting_tokens) == (0, 0)
    assert admission.enter([1] * 9) is not None  # nobody is there


def test_tokens_wait_until_their_sequence_begins() -> None:
    admission = Admission(max_waiting_tokens=100)
    first = admission.enter([60, 30])
    with pytest.raises(ApiError, match="prompts of 90 tokens are before this request"):
        admission.enter([11])
    first.begun(0)
    first.begun(0)
    assert admission.num_waiting_tokens == 30
    second = admission.enter([70])
    first.leave()
    second.begun(0)
    second.leave()
    assert (admission.num_sequences, admission.num_waiting_tokens) == (0, 0)


def test_without_bounds() -> None:
    admission = Admission()
    tickets = [admission.enter([10**6] * 100) for _ in range(100)]
    assert admission.num_sequences == 10_000
    del tickets
    assert (admission.num_sequences, admission.num_waiting_tokens) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_server(make_api: Callable[..., Api], bytes_of: Any, stream: bool) -> None:
    """Refused at once, with OpenAI's envelope, and the engine hears nothing of it."""
    api = make_api(Script([*bytes_of("ok"), 1], pause_after=1), admission=Admission(max_sequences=2))

    async def run() -> tuple[list[httpx.Response], httpx.Response]:
        transport = httpx.ASGITransport(app=api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            held = [asyncio.create_task(client.post("/v1/completions", json=CMPL | {"stream": stream})) for _ in "ab"]
            while len(api.engine.running) < 2:
                await asyncio.sleep(0.005)
            refused = await asyncio.wait_for(client.post("/v1/chat/completions", json=BASE | {"stream": stream}), 1)
            api.engine.resume.set()
            return [await task for task in held], refused

    held, refused = asyncio.run(run())
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "server_full", None)
    assert [answer.status_code for answer in held] == [200, 200] and len(api.engine.calls) == 2
    assert api.complete().status_code == 200
    metrics = api.request("GET", "/metrics").text
    assert re.search(r'^shoal_request_refused_total{model_name="tiny"} 1.0$', metrics, re.MULTILINE)


def test_streams_that_fail_or_are_never_read_leave(make_api: Callable[..., Api], bytes_of: Any) -> None:
    admission = Admission(max_sequences=1)
    api = make_api(Script([*bytes_of("hello"), 1], fail_after=2), admission=admission)
    for _ in range(3):
        assert api.stream()[-1] == "[DONE]"
        assert api.chat().status_code == 500

    async def open_and_drop() -> None:
        for _ in range(3):
            events = await api.serving.open_chat(BASE | {"stream": True})
            assert admission.num_sequences == 1
            del events

    asyncio.run(open_and_drop())
    assert (admission.num_sequences, admission.num_waiting_tokens) == (0, 0)


@pytest.mark.parametrize(("pause_after", "shown"), [(0, 0), (3, 2)])
def test_a_request_that_takes_too_long(
    make_api: Callable[..., Api], bytes_of: Any, pause_after: int, shown: int
) -> None:
    """Stopped before its first token or after some, streamed or not, and told not to come again."""
    admission = Admission()
    script = Script([*bytes_of("hello"), 1], pause_after=pause_after)
    api = make_api(script, admission=admission, timeout_s=0.1)
    answer = api.chat(n=2)
    assert answer.status_code == 504 and answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "request_timeout") and "0.1 s" in error["message"]
    api.engine.resume = asyncio.Event()  # of the next request's event loop
    events = api.stream()
    assert events[-2]["error"]["code"] == "request_timeout" and events[-1] == "[DONE]"
    assert len([event for event in events[:-2] if event["choices"][0]["delta"].get("content")]) == shown
    assert len(api.engine.aborted) == 3 and not api.engine.running and admission.num_sequences == 0


def test_within_the_limit_nothing_changes(make_api: Callable[..., Api], bytes_of: Any) -> None:
    api = make_api(Script([*bytes_of("ok"), 1]), timeout_s=5)
    assert api.chat().json()["choices"][0]["message"]["content"] == "ok"


def test_settings() -> None:
    engine = {"model": str(REPOSITORY / "examples" / "tiny-model"), "max_num_seqs": 16}
    assert ServeConfig.from_args({"engine": engine}).max_sequences is None
    config = ServeConfig.from_args({"engine": engine, "admission": {"max_waiting_sequences": 4}})
    assert config.max_sequences == 20
    with pytest.raises(ConfigError, match=r"allows 1016 sequences, and Serve holds back all beyond 1000 requests"):
        ServeConfig.from_args(
            {
                "engine": engine,
                "admission": {"max_waiting_sequences": 1000},
                "deployment": {"max_ongoing_requests": 1000},
            }
        )
