"""A serving over a scripted engine and the shipped model's tokenizer; HTTP without a socket."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from serve.api.routes import create_app
from serve.api.serving import OpenAIServing
from serve.chat_template import ChatTemplate
from serve.tokenizer import Tokenizer
from tests import REPOSITORY
from tests.api.fake_engine import Call, FakeEngine, Script

FOLDER = REPOSITORY / "examples" / "tiny-model"
BASE = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CMPL = {"model": "tiny", "prompt": "hi"}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(FOLDER)


@pytest.fixture(scope="session")
def bytes_of(tokenizer: Tokenizer) -> Callable[[bytes | str], list[int]]:
    """Token ids that spell the given bytes, one token a byte: every character and stop string splits."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)}
    return lambda data: [single[bytes([b])] for b in (data.encode() if isinstance(data, str) else data)]


class Api:
    """A serving whose engine follows one script (or one chosen by the call), and HTTP calls to its app."""

    def __init__(self, tokenizer: Tokenizer, script: Script | Callable[[Call], Script], **kwargs: Any) -> None:
        make_engine = kwargs.pop("engine_class", FakeEngine)
        self.engine = make_engine(tokenizer, script if callable(script) else lambda call: script)
        self.engine.max_model_len = kwargs.pop("max_model_len", 128)
        template = ChatTemplate.from_folder(FOLDER, tokenizer.special_tokens)
        self.serving = OpenAIServing(self.engine, tokenizer, kwargs.pop("template", template), "tiny", **kwargs)
        self.app = create_app(lambda: self.serving)

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(send())

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.request("POST", path, json=body)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", BASE | fields)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", CMPL | fields)

    def stream(self, kind: str = "chat", **fields: Any) -> list[Any]:
        """The events of a stream: dicts, and the string [DONE]."""
        response = getattr(self, kind)(stream=True, **fields)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response.content)


def events(content: bytes) -> list[Any]:
    blocks = content.split(b"\n\n")
    assert blocks.pop() == b""
    data = [block.decode("utf-8").removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


@pytest.fixture
def make_api(tokenizer: Tokenizer) -> Callable[..., Api]:
    return lambda script, **kwargs: Api(tokenizer, script, **kwargs)
