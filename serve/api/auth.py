"""API keys: who may use the API, where an operator wants to know."""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from http import HTTPStatus
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from configs.base import ConfigError
from serve.api.errors import ApiError, to_api_error
from serve.api.transport import error_response

API_KEYS_VARIABLE = "SHOAL_API_KEYS"  # of the replica's environment: keys with commas between
# What load balancers and Prometheus ask without a key.
OPEN_PATHS = frozenset({"/health", "/version", "/metrics", "/openapi.json"})


TENANT = "shoal.tenant"  # of the ASGI scope


class ApiKeys:
    """The keys that are let in; none at all lets everybody in."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, authorization: str | None) -> str:
        """The key's tenant: one name for each key, "" where none is needed.

        Raises ApiError (401) unless the header (its bytes as Latin-1, as ASGI servers hand them on) is `Bearer KEY`
        with one of the keys. Takes as long for a wrong key as for any right one.
        """
        if not self._digests:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip().encode("latin-1", "replace"))
        known = [hmac.compare_digest(digest, key) for key in self._digests]
        if scheme.lower() == "bearer" and any(known):
            return digest.hex()[:16]
        message = "Incorrect API key: send one that this server knows, as the header 'Authorization: Bearer KEY'."
        raise ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")


class RequireApiKey:
    """ASGI middleware: every path but OPEN_PATHS needs a key, whose tenant it notes in the scope. `get_keys` is called
    for each request."""

    def __init__(self, app: ASGIApp, get_keys: Callable[[], ApiKeys]) -> None:
        self._app = app
        self._get_keys = get_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _path(scope) not in OPEN_PATHS and scope["method"] != "OPTIONS":
            try:
                scope[TENANT] = self._get_keys().check(Headers(scope=scope).get("authorization"))
            except Exception as error:
                await error_response(to_api_error(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def load_api_keys(file: Path | None, listed: str) -> ApiKeys:
    """The keys of a file, one a line (empty lines and those after # are none), and those listed with commas between.
    Raises ConfigError for a file that cannot be read or holds none."""
    keys = [key.strip() for key in listed.split(",") if key.strip()]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file {file} cannot be read: {error}") from None
        in_file = [line for line in lines if line and not line.startswith("#")]
        if not in_file:
            raise ConfigError(f"api_key_file {file} holds no key: write one a line")
        keys += in_file
    return ApiKeys(keys)


def _path(scope: Scope) -> str:
    """Below the application's route prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _digest(key: bytes) -> bytes:
    """Of one length, whatever the key's."""
    return hashlib.sha256(key).digest()
