"""HTTP plumbing: bodies, server-sent events, and noticing that a client has gone."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from serve.api.errors import ApiError, bad_request, to_api_error
from serve.api.shapes import Json

_SHORTEST_SLEEP_S = 0.001
MAX_BODY_BYTES = 32 * 2**20

# Some clients split lines at these characters too, which JSON may hold as they are.
_LINE_BREAKS = {"\u0085": b"\\u0085", "\u2028": b"\\u2028", "\u2029": b"\\u2029"}

T = TypeVar("T")


async def read_json_body(request: Request) -> Any:
    """Raises ApiError: 413 for a body over MAX_BODY_BYTES, 400 for one that is not JSON."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The request body is not valid JSON: {error}", code="invalid_json") from None


def json_response(content: Json, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers())


class EventStream(StreamingResponse):
    """Server-sent events, closed with `data: [DONE]` also after an error. A client that goes away closes `events`.
    Where nothing was told for `keep_alive_s` seconds a comment is sent, which clients ignore and proxies do not.
    `named`: each event goes by its `type`, and they tell themselves of their end and of errors."""

    def __init__(self, events: AsyncGenerator[Json, None], keep_alive_s: float, *, named: bool = False) -> None:
        self._keep_alive_s = keep_alive_s
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold chunks back
        self._lines = _named_sse(events) if named else _sse(events)
        super().__init__(self._lines, headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        keeper = _KeepAlive(send, self._keep_alive_s)
        task = asyncio.create_task(keeper.run())
        try:
            async with aclosing(self._lines):
                await self.stream_response(keeper.send)
        finally:
            task.cancel()


class _KeepAlive:
    """An ASGI `send` that knows when it was last used."""

    def __init__(self, send: Send, period_s: float) -> None:
        self._send = send
        self._period_s = period_s
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()
        self._idle = False  # between two messages of a response that has begun and not ended

    async def send(self, message: Message) -> None:
        self._idle = False
        await self._send(message)
        self._last = self._clock()
        self._idle = message["type"] == "http.response.start" or message.get("more_body", False)

    async def run(self) -> None:
        """Sends comments until it is cancelled."""
        while True:
            await asyncio.sleep(max(self._last + self._period_s - self._clock(), _SHORTEST_SLEEP_S))
            if self._idle and self._clock() >= self._last + self._period_s:
                await self.send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the client went away first: `work` is then cancelled and has ended."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _sse(events: AsyncGenerator[Json, None]) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(events):
            async for event in events:
                yield _event(event)
    except Exception as error:
        yield _event(to_api_error(error).body())
    yield b"data: [DONE]\n\n"


async def _named_sse(events: AsyncGenerator[Json, None]) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(events):
            async for event in events:
                yield b"event: " + event["type"].encode() + b"\n" + _event(event)
    except Exception as error:
        to_api_error(error)  # for the log: the client was told


def _event(content: Json) -> bytes:
    data = msgspec.json.encode(content)
    for char, escaped in _LINE_BREAKS.items():
        data = data.replace(char.encode(), escaped)
    return b"data: " + data + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large() -> ApiError:
    message = f"The request body is larger than {MAX_BODY_BYTES} bytes."
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="request_too_large")
