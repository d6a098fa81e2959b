"""A Python client of a Serve application over its DeploymentHandle: no HTTP, the same requests and answers."""

from collections.abc import AsyncGenerator, Generator
from typing import Any

from ray import serve as ray_serve
from ray.serve.handle import DeploymentHandle

from serve.api.errors import ApiError
from serve.api.responses import Json


class Client:
    """`target` is a handle, or the name of a running application (ray.init must have been called).

    Answers are OpenAI's objects as dicts, streams give its chunks. `params` are the request's other fields. Raises
    ApiError as the server did; a stream that is closed or abandoned is cancelled on the server. The plain methods
    block and belong outside event loops; those that begin with `a` belong inside.
    """

    def __init__(self, target: DeploymentHandle | str) -> None:
        self._handle = ray_serve.get_app_handle(target) if isinstance(target, str) else target

    def chat(self, messages: list[Json], **params: Any) -> Json:
        return self._call("chat", {"messages": messages, **params})

    def complete(self, prompt: Any, **params: Any) -> Json:
        return self._call("completions", {"prompt": prompt, **params})

    def models(self) -> Json:
        return self._call("models")

    def stream_chat(self, messages: list[Json], **params: Any) -> Generator[Json, None, None]:
        return self._stream("chat_stream", {"messages": messages, **params})

    def stream_complete(self, prompt: Any, **params: Any) -> Generator[Json, None, None]:
        return self._stream("completions_stream", {"prompt": prompt, **params})

    async def achat(self, messages: list[Json], **params: Any) -> Json:
        return await self._acall("chat", {"messages": messages, **params})

    async def acomplete(self, prompt: Any, **params: Any) -> Json:
        return await self._acall("completions", {"prompt": prompt, **params})

    async def amodels(self) -> Json:
        return await self._acall("models")

    def astream_chat(self, messages: list[Json], **params: Any) -> AsyncGenerator[Json, None]:
        return self._astream("chat_stream", {"messages": messages, **params})

    def astream_complete(self, prompt: Any, **params: Any) -> AsyncGenerator[Json, None]:
        return self._astream("completions_stream", {"prompt": prompt, **params})

    def _call(self, method: str, *args: Json) -> Json:
        response = getattr(self._handle, method).remote(*args)
        try:
            answer: Json = response.result()
        except Exception as error:
            raise _original(error) from None
        except BaseException:  # Ctrl-C: nobody waits for the answer any more
            response.cancel()
            raise
        return answer

    async def _acall(self, method: str, *args: Json) -> Json:
        response = getattr(self._handle, method).remote(*args)
        try:
            answer: Json = await response
        except Exception as error:
            raise _original(error) from None
        except BaseException:  # the caller's task was cancelled
            response.cancel()
            raise
        return answer

    def _stream(self, method: str, body: Json) -> Generator[Json, None, None]:
        """Ray never cancels a response that is merely dropped, hence the `finally`."""
        chunks = getattr(self._handle.options(stream=True), method).remote(body)
        try:
            yield from chunks
        except Exception as error:
            raise _original(error) from None
        finally:
            chunks.cancel()

    async def _astream(self, method: str, body: Json) -> AsyncGenerator[Json, None]:
        chunks = getattr(self._handle.options(stream=True), method).remote(body)
        try:
            async for chunk in chunks:
                yield chunk
        except Exception as error:
            raise _original(error) from None
        finally:
            chunks.cancel()


def _original(error: Exception) -> Exception:
    """Ray raises a task's exception wrapped, with the exception itself as `cause`."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, ApiError) else error
