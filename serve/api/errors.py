"""Every error a client sees, in OpenAI's envelope: {"error": {"message", "type", "param", "code"}}."""

import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from serve.errors import EngineDeadError

logger = logging.getLogger("ray.serve")  # whose records bear X-Request-Id

RETRY_AFTER_S = 5  # what clients are told when the engine is gone: about the time a replica takes to be replaced


class ApiError(Exception):
    """An error with a status and OpenAI's fields. Pickles whole, so that it can cross a deployment handle."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Callable[..., "ApiError"], tuple[Any, ...]]:
        fields = (self.status, self.message, self.type, self.param, self.code, self.retry_after_s)
        return ApiError, fields

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if (
            self.status == HTTPStatus.GATEWAY_TIMEOUT
        ):  # clients retry it of themselves, which would only add to the load
            headers["X-Should-Retry"] = "false"
        return headers


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def context_length_exceeded(limit: int, message: str, param: str) -> ApiError:
    """Clients look for either phrase in the message, so both are there."""
    code = "context_length_exceeded"
    return bad_request(f"This model's maximum context length is {limit} tokens. {message} ({code})", param, code)


def unsupported(name: str, why: str = "") -> ApiError:
    message = f"{name} is not supported by this version of Shoal{why}: leave it out"
    return bad_request(message, name, "unsupported_parameter")


def engine_dead() -> ApiError:
    message = "The engine behind this model has stopped and is being replaced. Try again in a few seconds."
    status = HTTPStatus.SERVICE_UNAVAILABLE
    return ApiError(status, message, "service_unavailable_error", code="engine_dead", retry_after_s=RETRY_AFTER_S)


def engine_stalled(seconds: float) -> ApiError:
    message = f"Requests are pending and no step has ended for {seconds:g} s."
    status = HTTPStatus.SERVICE_UNAVAILABLE
    return ApiError(status, message, "service_unavailable_error", code="engine_stalled", retry_after_s=RETRY_AFTER_S)


def draining() -> ApiError:
    message = "This server is about to stop and takes no new requests. Try again in a few seconds."
    status = HTTPStatus.SERVICE_UNAVAILABLE
    return ApiError(status, message, "service_unavailable_error", code="server_draining", retry_after_s=RETRY_AFTER_S)


def client_gone() -> ApiError:
    message = "The client has not renewed its lease: it is taken to be gone."
    return ApiError(HTTPStatus.REQUEST_TIMEOUT, message, "timeout_error", code="client_gone")


def request_timeout(seconds: float) -> ApiError:
    message = f"The request took longer than {seconds:g} s, which is this server's limit, and was stopped."
    return ApiError(HTTPStatus.GATEWAY_TIMEOUT, message, "timeout_error", code="request_timeout")


def to_api_error(error: BaseException) -> ApiError:
    """What the client is told of any exception. Internals stay in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return engine_dead()
    logger.error("request failed by an internal error", exc_info=error)
    message = "Internal error. The server's log has the details."
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, "internal_error", code="internal_error")


def from_validation(error: ValidationError) -> ApiError:
    """The first problem of a pydantic error as a 400 that names the field."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = field_path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return bad_request(f"{param}: {message}" if param else message, param or None)


def field_path(path: Sequence[str | int]) -> str:
    """("messages", 0, "role") -> "messages[0].role"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
