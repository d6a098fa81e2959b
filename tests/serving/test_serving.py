"""The shipped model through a real Ray Serve: HTTP with the openai client, and the handle client."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import openai
import pytest
import ray
from ray import serve as ray_serve

from examples.composition import Verses
from serve.api.caller import LEASE_S
from serve.api.errors import ApiError
from serve.client import Client
from tests import REPOSITORY
from tests.serving.conftest import APPLICATION, MODEL, Server

GREEDY = {"temperature": 0, "max_tokens": 24}
PROMPTS = [f"{start} {book}" for start in ("And the LORD", "Now", "In the days of", "Then said") for book in
           ("Moses", "David", "Saul", "Abraham", "Jesus", "Pharaoh", "Solomon", "Isaac", "Jacob", "Joshua", "Samuel",
            "Elijah", "Noah", "Adam", "Peter", "Paul")]  # fmt: skip


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.1)


def test_chat_streamed_equals_whole(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Genesis 1:1"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, **GREEDY)
    assert whole.choices[0].message.content
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage is not None
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_handle_client_gives_the_same_answers(client: openai.OpenAI) -> None:
    over_http = client.completions.create(model=MODEL, prompt=PROMPTS[0], **GREEDY)
    handle = Client(APPLICATION)
    whole = handle.complete(PROMPTS[0], **GREEDY)
    assert whole["choices"][0]["text"] == over_http.choices[0].text
    chunks = list(handle.stream_complete(PROMPTS[0], **GREEDY))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == over_http.choices[0].text
    messages = [{"role": "user", "content": "Tell me about Moses"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, **GREEDY)
    assert handle.chat(messages, **GREEDY)["choices"][0]["message"]["content"] == chat.choices[0].message.content
    assert handle.models()["data"][0]["id"] == MODEL
    with pytest.raises(ApiError) as caught:
        handle.complete("", **GREEDY)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_64_concurrent_requests_get_their_own_text(client: openai.OpenAI, server: Server) -> None:
    some = PROMPTS[::4]  # alone each takes half a second
    alone = [client.completions.create(model=MODEL, prompt=prompt, **GREEDY).choices[0].text for prompt in some]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as many:
            return await asyncio.gather(*(_either_way(many, i, prompt) for i, prompt in enumerate(PROMPTS)))

    answers = asyncio.run(together())
    assert answers[::4] == alone
    assert len(set(answers)) > 48  # not all alike


async def _either_way(client: openai.AsyncOpenAI, index: int, prompt: str) -> str:
    """Every other request streams."""
    if index % 2:
        return (await client.completions.create(model=MODEL, prompt=prompt, **GREEDY)).choices[0].text
    stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True, **GREEDY)
    return "".join([chunk.choices[0].text async for chunk in stream])


def test_speculation_shows_in_usage_and_metrics(client: openai.OpenAI, server: Server) -> None:
    before = server.metric("shoal_spec_decode_num_accepted_tokens_total")
    prompt = "And it came to pass, when Moses"
    answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=60)
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    accepted = answer.usage.completion_tokens_details.accepted_prediction_tokens
    assert accepted is not None and 0 < accepted < answer.usage.completion_tokens
    assert server.metric("shoal_spec_decode_num_accepted_tokens_total") >= before + accepted
    assert 1 < server.metric("shoal_spec_decode_accept_length") <= 3


def test_cancelled_streams_give_back_slots_and_pages(client: openai.OpenAI, server: Server) -> None:
    handle = Client(APPLICATION)
    for _ in range(3):
        stream = client.completions.create(
            model=MODEL, prompt="And", stream=True, max_tokens=120, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        chunks = handle.stream_complete("And", max_tokens=120, ignore_eos=True)
        next(chunks)
        chunks.close()
    wait_until(lambda: server.metric("shoal_num_requests_running") == 0, 5)
    assert server.metric("shoal_kv_cache_usage_perc") == 0
    assert server.metric("shoal_num_requests_waiting") == 0


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "a " * 1600}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [4096]}, 400, "prompt"),
        ({"prompt": [[1, 2], [-1]]}, 400, "prompt"),
        ({"prompt": "a", "model": "nope"}, 404, "model"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": "a", "n": 0}, 400, "n"),
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": {"text": "a"}}, 400, "prompt"),
    ],
)
def test_bad_input_is_refused_and_the_next_request_served(server: Server, body: dict, status: int, param: str) -> None:
    generated = server.metric("shoal_generation_tokens_total")
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert server.metric("shoal_generation_tokens_total") == generated
    after = httpx.post(f"{server.url}/v1/completions", json={"prompt": "And", **GREEDY})
    assert after.json()["choices"][0]["text"]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


def test_structured_output_and_tools_with_drafts(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    common: dict = {"model": MODEL, "messages": [{"role": "user", "content": "David"}], "max_tokens": 200, "seed": 3}
    for temperature in (0, 1):
        answer = client.chat.completions.create(response_format=wanted, temperature=temperature, **common)
        assert answer.choices[0].finish_reason == "stop"
        person = json.loads(answer.choices[0].message.content or "")
        assert set(person) == {"name", "age"} and len(person["name"]) <= 8 and 1 <= person["age"] <= 99
    called = client.chat.completions.create(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **common)
    assert called.choices[0].finish_reason == "tool_calls"
    calls = called.choices[0].message.tool_calls
    assert calls and all(set(json.loads(call.function.arguments)) == {"name", "age"} for call in calls)
    cut = client.chat.completions.create(response_format=wanted, **common | {"max_tokens": 3})
    assert cut.choices[0].finish_reason == "length"


def test_another_deployment_uses_the_client(server: Server) -> None:
    ray_serve.run(
        Verses.options(ray_actor_options={"num_cpus": 0.1}).bind(APPLICATION), name="verses", route_prefix="/verses"
    )
    try:
        answer = httpx.get(f"{server.url}/verses", params={"reference": "Genesis 1:1"}, timeout=60).json()
        direct = Client(APPLICATION).chat([{"role": "user", "content": "Genesis 1:1"}], temperature=0, max_tokens=64)
        assert answer == {"Genesis 1:1": direct["choices"][0]["message"]["content"]}
    finally:
        ray_serve.delete("verses")


_ABANDONED = """
import ray, sys
from serve.client import Client
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
for chunk in Client(sys.argv[2]).stream_complete("And", max_tokens=200, ignore_eos=True, n=16):
    print(chunk["id"], flush=True)
"""


@pytest.mark.slow
def test_what_a_killed_client_waited_for_is_aborted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is held still, so that the request cannot end of itself before the lease does."""
    address = ray.get_runtime_context().gcs_address
    with subprocess.Popen(
        [sys.executable, "-c", _ABANDONED, address, APPLICATION], stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as client:
        assert client.stdout is not None and client.stdout.readline().startswith(b"cmpl-")
        workers = [int(pid) for pid in subprocess.check_output(["pgrep", "-f", r"^ray::Worker"], text=True).split()]
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        client.kill()
    try:
        time.sleep(LEASE_S + 3)
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: server.metric("shoal_num_requests_running") == 0, 2)


@pytest.mark.slow
def test_a_killed_worker_fails_its_requests_and_the_replica_is_replaced(client: openai.OpenAI, server: Server) -> None:
    before = client.completions.create(model=MODEL, prompt=PROMPTS[0], **GREEDY).choices[0].text
    stream = client.completions.create(
        model=MODEL, prompt="And", stream=True, max_tokens=120, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    os.kill(_pid_of_a_worker(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(openai.APIError):
        list(stream)
    assert time.monotonic() - begin < 10

    def answers() -> bool:
        with contextlib.suppress(openai.APIError):
            return client.completions.create(model=MODEL, prompt=PROMPTS[0], **GREEDY).choices[0].text == before
        return False

    wait_until(answers, 90)


def _pid_of_a_worker() -> int:
    """Ray names an actor's process after its class and running method."""
    return int(subprocess.check_output(["pgrep", "-f", r"^ray::Worker"], text=True).split()[0])
