"""A Python client of a Serve application over its DeploymentHandle: no HTTP, the same requests and answers."""

import contextlib
import threading
import uuid
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any, cast

from ray import serve as ray_serve
from ray.serve.handle import DeploymentHandle

from serve.api.caller import LEASE_FIELD, RENEW_S
from serve.api.errors import ApiError
from serve.api.shapes import Json
from serve.client_types import ChatChunk, ChatCompletion, Completion, ModelList, ResponseEvent, ResponseObject


class Client:
    """`target` is a handle, or the name of a running application (ray.init must have been called). Works in a driver
    script as well as inside another deployment.

    Answers are OpenAI's objects as typed dicts, streams give its chunks. `params` are the request's other fields.
    Raises ApiError as the server did. A stream that is closed or abandoned is cancelled on the server, and so is
    whatever this client waited for when its process dies: while it waits, it renews a lease. The plain methods block
    and belong outside event loops; those that begin with `a` belong inside.
    """

    def __init__(self, target: DeploymentHandle | str) -> None:
        self._handle = ray_serve.get_app_handle(target) if isinstance(target, str) else target
        self._lease = _LeaseKeeper(self._handle)

    def chat(self, messages: list[Json], **params: Any) -> ChatCompletion:
        return cast(ChatCompletion, self._call("chat", {"messages": messages, **params}))

    def complete(self, prompt: Any, **params: Any) -> Completion:
        return cast(Completion, self._call("completions", {"prompt": prompt, **params}))

    def respond(self, input: Any, **params: Any) -> ResponseObject:
        """OpenAI's Responses API: `input` is a text, or a list of items."""
        return cast(ResponseObject, self._call("responses", {"input": input, **params}))

    def models(self) -> ModelList:
        return cast(ModelList, self._call("models"))

    def stream_chat(self, messages: list[Json], **params: Any) -> Generator[ChatChunk, None, None]:
        return self._stream("chat_stream", {"messages": messages, **params})

    def stream_complete(self, prompt: Any, **params: Any) -> Generator[Completion, None, None]:
        return self._stream("completions_stream", {"prompt": prompt, **params})

    async def achat(self, messages: list[Json], **params: Any) -> ChatCompletion:
        return cast(ChatCompletion, await self._acall("chat", {"messages": messages, **params}))

    async def acomplete(self, prompt: Any, **params: Any) -> Completion:
        return cast(Completion, await self._acall("completions", {"prompt": prompt, **params}))

    def stream_respond(self, input: Any, **params: Any) -> Generator[ResponseEvent, None, None]:
        """The events of the Responses API."""
        return self._stream("responses_stream", {"input": input, **params})

    async def arespond(self, input: Any, **params: Any) -> ResponseObject:
        return cast(ResponseObject, await self._acall("responses", {"input": input, **params}))

    def astream_respond(self, input: Any, **params: Any) -> AsyncGenerator[ResponseEvent, None]:
        return self._astream("responses_stream", {"input": input, **params})

    async def amodels(self) -> ModelList:
        return cast(ModelList, await self._acall("models"))

    def astream_chat(self, messages: list[Json], **params: Any) -> AsyncGenerator[ChatChunk, None]:
        return self._astream("chat_stream", {"messages": messages, **params})

    def astream_complete(self, prompt: Any, **params: Any) -> AsyncGenerator[Completion, None]:
        return self._astream("completions_stream", {"prompt": prompt, **params})

    def _call(self, method: str, *args: Json) -> Any:
        with self._lease.held():
            response = getattr(self._handle, method).remote(*map(self._lease.name_in, args))
            try:
                return response.result()
            except Exception as error:
                raise _original(error) from None
            except BaseException:  # Ctrl-C: nobody waits for the answer any more
                response.cancel()
                raise

    async def _acall(self, method: str, *args: Json) -> Any:
        with self._lease.held():
            response = getattr(self._handle, method).remote(*map(self._lease.name_in, args))
            try:
                return await response
            except Exception as error:
                raise _original(error) from None
            except BaseException:  # the caller's task was cancelled
                response.cancel()
                raise

    def _stream(self, method: str, body: Json) -> Generator[Any, None, None]:
        """Ray never cancels a response that is merely dropped, hence the `finally`."""
        with self._lease.held():
            chunks = getattr(self._handle.options(stream=True), method).remote(self._lease.name_in(body))
            try:
                yield from chunks
            except Exception as error:
                raise _original(error) from None
            finally:
                chunks.cancel()

    async def _astream(self, method: str, body: Json) -> AsyncGenerator[Any, None]:
        with self._lease.held():
            chunks = getattr(self._handle.options(stream=True), method).remote(self._lease.name_in(body))
            try:
                async for chunk in chunks:
                    yield chunk
            except Exception as error:
                raise _original(error) from None
            finally:
                chunks.cancel()


class _LeaseKeeper:
    """Renews one lease while calls are in progress, from a thread that ends with the last of them."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self.name = uuid.uuid4().hex
        self._handle = handle
        self._lock = threading.Lock()
        self._calls = 0
        self._idle = threading.Event()

    def name_in(self, body: Json) -> Json:
        """The request with the lease that it is held under."""
        return {**body, LEASE_FIELD: self.name}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                self._idle = threading.Event()
                threading.Thread(target=self._renew, args=(self._idle,), name="shoal-lease", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls:
                    self._idle.set()

    def _renew(self, idle: threading.Event) -> None:
        while not idle.wait(RENEW_S):
            with contextlib.suppress(Exception):  # the call itself tells of a server that is gone
                self._handle.broadcast("renew_lease", self.name).results()


def _original(error: Exception) -> Exception:
    """Ray raises a task's exception wrapped, with the exception itself as `cause`."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, ApiError) else error
