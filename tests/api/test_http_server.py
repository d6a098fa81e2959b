"""A real server on a loopback port: the openai client, and clients that hang up."""

import asyncio
import json
import socket
import threading
import time

import httpx
import openai
import pytest
import uvicorn

from serve.chat_cli import run_chat
from tests.api.conftest import BASE, CMPL, Api
from tests.api.fake_engine import Script

MESSAGES = BASE["messages"]


class Running:
    """The app under uvicorn in a thread; the engine's script can be changed by setting `script`."""

    def __init__(self, tokenizer):
        self.script = Script([1])
        self.api = Api(tokenizer, lambda call: self.script)
        self.engine = self.api.engine
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(self.api.app, log_level="warning", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)

    def wait_until(self, condition, seconds=5.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come about"
            time.sleep(0.005)


@pytest.fixture(scope="module")
def running(tokenizer):
    running = Running(tokenizer)
    running.thread.start()
    running.wait_until(lambda: running.server.started)
    yield running
    running.server.should_exit = True
    running.thread.join(10)
    assert not running.thread.is_alive()


@pytest.fixture
def server(running):
    running.engine.calls.clear()
    running.engine.aborted.clear()
    running.engine.resume = asyncio.Event()
    yield running
    running.wait_until(lambda: not running.engine.running)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(server, client, bytes_of):
    server.script = Script([*bytes_of("né🔥日"), 1])
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == "né🔥日"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 11
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "né🔥日"
    assert chunks[-1].usage == answer.usage


def test_completions(server, client, bytes_of):
    server.script = Script(bytes_of("once upon"))
    answer = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["once", "once"]
    assert answer.choices[1].logprobs.tokens == list("once")
    chunks = list(client.completions.create(model="tiny", prompt="a", max_tokens=4, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "once"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_async_client(server, bytes_of):
    server.script = Script([*bytes_of("hello"), 1])

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model="tiny", messages=MESSAGES) for _ in range(8))
            )
            stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, n=2)
            texts = {0: "", 1: ""}
            async for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            return [a.choices[0].message.content for a in answers], texts

    assert asyncio.run(run()) == (["hello"] * 8, {0: "hello", 1: "hello"})


def test_errors_through_the_client(server, client, bytes_of):
    server.script = Script(bytes_of("ok"))
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature="hot")
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt=[5] * 200)
    assert long.value.code == "context_length_exceeded"
    assert server.engine.calls == []
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("fail_after", [0, 2])
def test_a_failing_stream_raises_at_the_client(server, client, bytes_of, fail_after):
    server.script = Script(bytes_of("hello"), fail_after=fail_after)
    with pytest.raises(openai.APIError, match="Internal error"):
        list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_hanging_up_a_stream_aborts_it(server, bytes_of, path):
    server.script = Script(bytes_of("hello"), pause_after=2)
    body = (BASE if "chat" in path else CMPL) | {"stream": True, "n": 2}
    with httpx.stream("POST", server.url + path, json=body) as response:
        lines = response.iter_lines()  # held: dropping it would close the response
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["choices"][0]["finish_reason"] is None
        assert len(server.engine.running) == 2
    server.wait_until(lambda: not server.engine.running, seconds=1)
    assert len(server.engine.aborted) == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_hanging_up_a_plain_request_aborts_it(server, bytes_of, path):
    server.script = Script(bytes_of("hello"), pause_after=2)
    body = (BASE if "chat" in path else CMPL) | {"n": 2}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + path, json=body, timeout=0.3)
    server.wait_until(lambda: not server.engine.running, seconds=1)
    assert len(server.engine.aborted) == 2


def test_chat_in_the_terminal(server, bytes_of):
    server.script = Script([*bytes_of("Hello."), 1])
    lines = iter(["hi", "", "/what", "more", "/reset", "again", "/exit"])
    written = []
    assert run_chat(server.url, read=lambda prompt: next(lines), write=written.append) == 0
    assert "".join(written).count("Hello.\n") == 3
    lengths = [len(call.token_ids) for call in server.engine.calls]
    assert lengths[1] > lengths[0]  # the second turn holds the first
    assert lengths[2] < lengths[1]  # forgotten


def test_ctrl_c_stops_an_answer_in_the_terminal(server, bytes_of):
    server.script = Script(bytes_of("Hello"), pause_after=3)
    lines = iter(["hi", "/exit"])
    written = []

    def write(text):
        written.append(text)
        if text == "H":
            raise KeyboardInterrupt

    assert run_chat(server.url, read=lambda prompt: next(lines), write=write) == 0
    assert written[-1] == " (stopped)\n"
    server.wait_until(lambda: not server.engine.running, seconds=1)
    assert len(server.engine.aborted) == 1


def test_errors_in_the_terminal(server, bytes_of):
    server.script = Script(bytes_of("Hello"), fail_after=2)
    written = []
    lines = iter(["hi", "x" * 2000, "/exit"])
    assert run_chat(server.url, read=lambda prompt: next(lines), write=written.append) == 0
    text = "".join(written)
    assert "error: Internal error." in text
    assert "error: This model's maximum context length is 128 tokens." in text


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    written = []
    assert run_chat(f"http://127.0.0.1:{port}", write=written.append) == 1
    assert written == [
        f"nothing listens at http://127.0.0.1:{port}: start a server with `shoal serve --model DIR`, "
        "or give its address\n"
    ]
