"""A small terminal chat over HTTP: what `shoal chat` runs."""

import json
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

import httpx

_HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer."


class ChatError(Exception):
    """The server did not answer as hoped; the message is for the user."""


class ChatSession:
    """A conversation with one model. `params` are further fields of each request."""

    def __init__(self, client: httpx.Client, model: str | None, params: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._params = params
        self.messages: list[dict[str, str]] = []

    def reset(self) -> None:
        self.messages.clear()

    def ask(self, text: str) -> Generator[str, None, None]:
        """The answer's pieces as they come. What was shown stays in the conversation, also when stopped early.

        Raises ChatError; the question is then forgotten.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        except ChatError:
            self.messages.pop()
            raise
        except (KeyboardInterrupt, GeneratorExit):
            self._answered(pieces)
            raise
        self._answered(pieces)

    def _answered(self, pieces: list[str]) -> None:
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _stream(self) -> Iterator[str]:
        body = {"messages": self.messages, "stream": True, "model": self._model, **self._params}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise ChatError(_error_message(response))
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if data != line and data != "[DONE]":
                        yield _text(json.loads(data))
        except httpx.ConnectError:
            raise ChatError(_nobody(self._client.base_url)) from None
        except httpx.HTTPError as error:
            raise ChatError(f"the connection to {self._client.base_url} broke: {error}") from None


def run_chat(
    base_url: str,
    model: str | None = None,
    params: dict[str, Any] | None = None,
    *,
    read: Callable[[str], str] = input,
    write: Callable[[str], None] = lambda text: print(text, end="", flush=True),
) -> int:
    """Chats until /exit or the end of the input; returns the exit status (1 when nothing listens at `base_url`).

    `base_url` is the server's root, e.g. http://127.0.0.1:8000; `model` None takes the one that is served.
    """
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=base_url, headers=headers, timeout=httpx.Timeout(None, connect=5.0)) as client:
        try:
            client.get("/v1/models").raise_for_status()
        except httpx.HTTPStatusError as error:
            write(f"{base_url} answered {error.response.status_code}: {_error_message(error.response)}\n")
            return 1
        except httpx.HTTPError:
            write(_nobody(base_url) + "\n")
            return 1
        write(_HELP + "\n")
        _converse(ChatSession(client, model, params or {}), read, write)
    return 0


def _converse(session: ChatSession, read: Callable[[str], str], write: Callable[[str], None]) -> None:
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        if line == "/exit":
            return
        if line == "/reset":
            session.reset()
            write("(forgotten)\n")
        elif line.startswith("/"):
            write(_HELP + "\n")
        elif line:
            _answer(session, line, write)


def _answer(session: ChatSession, line: str, write: Callable[[str], None]) -> None:
    pieces = session.ask(line)
    try:
        for piece in pieces:
            write(piece)
        write("\n")
    except KeyboardInterrupt:
        pieces.close()  # closes the connection, which aborts the answer on the server
        write(" (stopped)\n")
    except ChatError as error:
        write(f"error: {error}\n")


def _text(event: dict[str, Any]) -> str:
    if "error" in event:
        raise ChatError(event["error"]["message"])
    choices = event["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""


def _error_message(response: httpx.Response) -> str:
    try:
        message: str = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
    return message


def _nobody(base_url: object) -> str:
    return f"nothing listens at {base_url}: start a server with `shoal serve --model DIR`, or give its address"
