"""One request of a benchmark: sent to an OpenAI-compatible endpoint, streamed, and timed token by token."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

MAX_ERROR = 300  # characters of a server's words that are kept


@dataclass(frozen=True)
class BenchRequest:
    """A prompt, as text or token ids, and how many tokens to ask for."""

    prompt: str | list[int]
    output_len: int


@dataclass
class Record:
    """What came of a request; times in seconds. `itls`: from each part of the stream with text to the next."""

    start: float  # time.perf_counter()
    ttft: float = 0.0
    latency: float = 0.0  # until the last part with text
    itls: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None with fewer than two."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True)
class Endpoint:
    """Where requests go. `path` ends in chat/completions or completions."""

    base_url: str
    path: str
    model: str
    extra_body: dict[str, Any]
    ignore_eos: bool = False

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + self.path

    def body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": 0,
            "max_tokens": request.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.path.endswith("chat/completions"):
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | self.extra_body


async def send(session: aiohttp.ClientSession, endpoint: Endpoint, request: BenchRequest) -> Record:
    """Never raises: what goes wrong is the record's error."""
    record = Record(start=time.perf_counter())
    try:
        async with session.post(endpoint.url, json=endpoint.body(request)) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:MAX_ERROR]}"
                return record
            await _read(record, response)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"[:MAX_ERROR]
    return record


async def _read(record: Record, response: aiohttp.ClientResponse) -> None:
    last = record.start
    finished = False
    async for event in _events(response):
        now = time.perf_counter()
        if event == "[DONE]":
            finished = True
            break
        part = json.loads(event)
        if "error" in part:
            record.error = f"in the stream: {json.dumps(part['error'])}"[:MAX_ERROR]
            return
        if any(_has_text(choice) for choice in part.get("choices", ())):
            if not record.ttft:
                record.ttft = now - record.start
            else:
                record.itls.append(now - last)
            last = now
            record.latency = now - record.start
        if usage := part.get("usage"):
            record.input_tokens = usage.get("prompt_tokens", 0)
            record.output_tokens = usage.get("completion_tokens", 0)
    if not finished or not record.ttft:
        record.error = "the stream ended without text" if finished else "the stream broke off before [DONE]"
    elif not record.output_tokens:
        record.output_tokens = 1 + len(record.itls)  # a server that sends no usage: parts are the best guess


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of server-sent events."""
    async for line in response.content:
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()
