"""Cross-origin requests: none are answered unless the settings name who may send them."""

from collections.abc import Callable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send


class Cors:
    """Starlette's middleware, made when the settings are known: `get_origins` is called for each request."""

    def __init__(self, app: ASGIApp, get_origins: Callable[[], Sequence[str]]) -> None:
        self._app = app
        self._get_origins = get_origins
        self._made: tuple[Sequence[str], ASGIApp] = ((), app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and (origins := self._get_origins()):
            if self._made[0] != origins:
                self._made = origins, self._make(origins)
            app = self._made[1]
        await app(scope, receive, send)

    def _make(self, origins: Sequence[str]) -> ASGIApp:
        return CORSMiddleware(
            self._app,
            allow_origins=origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
