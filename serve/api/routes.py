"""The HTTP side of the OpenAI API. Bodies are parsed by hand so that every error has OpenAI's envelope.

X-Request-Id is not handled here: Ray Serve takes it from the request, or makes one, and returns it.
"""

from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from importlib import metadata
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from serve.api.auth import TENANT, RequireApiKey
from serve.api.caller import Caller
from serve.api.cors import Cors
from serve.api.errors import ApiError, to_api_error
from serve.api.openapi import document
from serve.api.serving import Events, OpenAIServing
from serve.api.shapes import Json
from serve.api.transport import (
    EventStream,
    error_response,
    json_response,
    read_json_body,
    while_connected,
)

_CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody is left to read it


def create_app(get_serving: Callable[[], OpenAIServing]) -> FastAPI:
    """The application; `get_serving` is called for each request, as the serving may exist only in a replica."""
    app = FastAPI(title="Shoal", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(RequireApiKey, get_keys=lambda: get_serving().api_keys)
    app.add_middleware(Cors, get_origins=lambda: get_serving().cors_allow_origins)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _any_error)

    def readable(path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return app.api_route(path, methods=["GET", "HEAD"])

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        serving = get_serving()
        return await _generate(request, serving.chat, serving.open_chat, serving.keep_alive_s)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        serving = get_serving()
        return await _generate(request, serving.completions, serving.open_completions, serving.keep_alive_s)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        serving = get_serving()
        calls = serving.responses
        return await _generate(request, calls.create, calls.open, serving.keep_alive_s, named_events=True)

    @app.api_route("/v1/responses/{name:path}", methods=["GET", "HEAD", "POST", "DELETE"])
    async def stored_response(name: str) -> Response:
        message = "Responses are not stored by this server: there is none to read, cancel or delete."
        return error_response(ApiError(HTTPStatus.NOT_FOUND, message, param="response_id", code="not_stored"))

    @readable("/v1/models")
    async def models() -> Response:
        return json_response(get_serving().models())

    @readable("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        try:
            return json_response(get_serving().model(name))
        except ApiError as error:
            return error_response(error)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await _answer(request, get_serving().tokens.tokenize)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await _answer(request, get_serving().tokens.detokenize)

    @readable("/tokenizer_info")
    async def tokenizer_info() -> Response:
        return json_response(get_serving().tokens.info())

    @readable("/health")
    async def health() -> Response:
        try:
            get_serving().runner.check_progress()
        except ApiError as error:
            return error_response(error)
        return json_response({"status": "ok"})

    @readable("/version")
    async def version() -> Response:
        return json_response({"version": _version()})

    @readable("/openapi.json")
    async def openapi() -> Response:
        return json_response(document(_version()))

    @readable("/metrics")
    async def metrics() -> Response:
        serving = get_serving()
        return Response(serving.render_metrics(), media_type=serving.metrics.content_type)

    return app


async def _generate(
    request: Request,
    whole: Callable[[Json, Caller], Coroutine[Any, Any, Json]],
    opened: Callable[[Json, Caller], Awaitable[Events]],
    keep_alive_s: float,
    *,
    named_events: bool = False,
) -> Response:
    """One answer or a stream of it. A client that goes away aborts either."""
    caller = Caller(request.scope.get(TENANT, ""))
    try:
        body = await read_json_body(request)
        if isinstance(body, dict) and body.get("stream") is True:
            return EventStream(await opened(body, caller), keep_alive_s, named=named_events)
        answer = await while_connected(request.receive, whole(body, caller))
    except Exception as error:
        return error_response(to_api_error(error))
    return Response(status_code=_CLIENT_CLOSED_REQUEST) if answer is None else json_response(answer)


async def _answer(request: Request, call: Callable[[Json], Awaitable[Json]]) -> Response:
    try:
        return json_response(await call(await read_json_body(request)))
    except Exception as error:
        return error_response(to_api_error(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        message, code = f"Unknown request URL: {where}", "unknown_url"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and request.method == "OPTIONS":
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=error.headers)
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message, code = f"Method not allowed: {where}", "method_not_allowed"
    else:
        message, code = str(error.detail), "http_error"
    body = ApiError(error.status_code, message, code=code).body()
    return json_response(body, error.status_code, dict(error.headers or {}))


async def _any_error(request: Request, error: Exception) -> Response:
    return error_response(to_api_error(error))


def _version() -> str:
    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
