"""The handle client against a deployment of the scripted serving, in Ray Serve's in-process testing mode."""

import asyncio
import pickle

import pytest
from ray import serve as ray_serve
from ray.exceptions import RayTaskError

from serve.api.errors import ApiError
from serve.client import Client
from serve.errors import EngineDeadError
from serve.tokenizer import Tokenizer
from tests.api.conftest import BASE, FOLDER, Api
from tests.api.fake_engine import Script

MESSAGES = BASE["messages"]


class Server:
    """What the real deployment's handle methods look like."""

    def __init__(self, script):
        self.serving = Api(Tokenizer(FOLDER), script).serving

    async def chat(self, body):
        return await self.serving.chat(body)

    async def completions(self, body):
        return await self.serving.completions(body)

    async def chat_stream(self, body):
        async for chunk in self.serving.chat_stream(body):
            yield chunk

    async def completions_stream(self, body):
        async for chunk in self.serving.completions_stream(body):
            yield chunk

    def models(self):
        return self.serving.models()


class Response:
    """Ray's side of one call."""

    def __init__(self, error=None):
        self.error = error
        self.cancelled = False

    def result(self):
        raise self.error

    def __iter__(self):
        return iter([{"n": 1}, {"n": 2}])

    def cancel(self):
        self.cancelled = True


class Handle:
    """A handle whose every method gives `response`."""

    def __init__(self, response):
        self.response = response

    def options(self, stream):
        assert stream
        return self

    def __getattr__(self, method):
        return self

    def remote(self, body):
        return self.response


def connect(script):
    return Client(ray_serve.run(ray_serve.deployment(Server).bind(script), _local_testing_mode=True))


def test_plain_calls(bytes_of):
    client = connect(Script([*bytes_of("hello"), 1]))
    assert client.chat(MESSAGES)["choices"][0]["message"]["content"] == "hello"
    assert client.complete("hi", max_tokens=2)["choices"][0]["text"] == "he"
    assert client.complete([[5], [6]])["choices"][1]["text"] == "hello"
    assert client.models()["data"][0]["id"] == "tiny"


def test_streams(bytes_of):
    client = connect(Script([*bytes_of("hello"), 1]))
    chunks = list(client.stream_chat(MESSAGES))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "hello"
    chunks = list(client.stream_complete("hi"))
    assert "".join(c["choices"][0]["text"] for c in chunks) == "hello"


def test_async_calls(bytes_of):
    client = connect(Script([*bytes_of("hello"), 1]))

    async def run():
        chat = await client.achat(MESSAGES)
        text = await client.acomplete("hi")
        chunks = [chunk async for chunk in client.astream_chat(MESSAGES)]
        texts = [chunk async for chunk in client.astream_complete("hi")]
        models = await client.amodels()
        return chat, text, chunks, texts, models

    chat, text, chunks, texts, models = asyncio.run(run())
    assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"] == "hello"
    assert chunks[-1]["choices"][0]["finish_reason"] == texts[-1]["choices"][0]["finish_reason"] == "stop"
    assert models["object"] == "list"


def test_errors_are_api_errors(bytes_of):
    client = connect(Script(bytes_of("ok")))
    with pytest.raises(ApiError) as raised:
        client.chat([])
    assert (raised.value.status, raised.value.param) == (400, "messages")
    with pytest.raises(ApiError) as raised:
        list(client.stream_complete("hi", n=0))
    assert raised.value.param == "n"

    async def run():
        await client.achat(MESSAGES, temperature="hot")

    with pytest.raises(ApiError) as raised:
        asyncio.run(run())
    assert raised.value.param == "temperature"


def test_a_dead_engine(bytes_of):
    client = connect(Script(bytes_of("ok"), fail_after=1, error=EngineDeadError("gone")))
    with pytest.raises(ApiError) as raised:
        client.chat(MESSAGES)
    assert (raised.value.status, raised.value.code) == (503, "engine_dead")


def test_the_cause_is_taken_out_of_rays_wrapper():
    error = ApiError(429, "full", "rate_limit_error", "n", "busy", 3)
    wrapped = RayTaskError("chat", "traceback", error).as_instanceof_cause()

    with pytest.raises(ApiError) as raised:
        Client(Handle(Response(wrapped))).chat(MESSAGES)
    assert raised.value is error


def test_an_interrupted_call_is_cancelled():
    response = Response(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Client(Handle(response)).chat(MESSAGES)
    assert response.cancelled
    failed = Response(ValueError("other"))
    with pytest.raises(ValueError, match="other"):
        Client(Handle(failed)).chat(MESSAGES)
    assert not failed.cancelled


def test_closing_a_stream_cancels_it():
    response = Response()
    stream = Client(Handle(response)).stream_chat(MESSAGES)
    assert next(stream) == {"n": 1}
    assert not response.cancelled
    stream.close()
    assert response.cancelled


def test_api_errors_pickle_whole():
    error = ApiError(429, "full", "rate_limit_error", "n", "busy", 3)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.status, copy.message, copy.type, copy.param, copy.code, copy.retry_after_s) == (
        429, "full", "rate_limit_error", "n", "busy", 3
    )  # fmt: skip
    assert str(copy) == "full"
    assert copy.headers() == {"Retry-After": "3"}
