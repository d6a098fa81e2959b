"""Text that arrives in pieces, read as if it were there whole: what a reader gets does not depend on the cuts.

Parsers are generators that `yield from` these methods and wait inside them: a yielded None asks for more text.
"""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]


class Source:
    """Text not yet read. `more` adds to it, `close` says that no more comes."""

    def __init__(self) -> None:
        self._pending = ""
        self._closed = False

    def more(self, text: str) -> None:
        self._pending += text

    def unread(self, text: str) -> None:
        """Puts back what was read last."""
        self._pending = text + self._pending

    def close(self) -> None:
        self._closed = True

    @property
    def ended(self) -> bool:
        return self._closed and not self._pending

    def piece(self, *marks: str, partial: bool = True) -> Reading[tuple[str, str | None]]:
        """The text that is there before the first of the marks, which is read, too, once it is complete: (text, mark),
        or (text, None) while no mark came. Text that may be the beginning of a mark waits; at the very end it is text
        like any other, unless `partial` is false: then it is dropped."""
        while True:
            start, mark = min(((at, m) for m in marks if (at := self._pending.find(m)) >= 0), default=(-1, None))
            if mark is not None:
                text, self._pending = self._pending[:start], self._pending[start + len(mark) :]
                return text, mark
            sure = len(self._pending) - _begun(self._pending, marks)
            if self._closed:
                text, self._pending = self._pending[: None if partial else sure], ""
                return text, None
            if sure:
                text, self._pending = self._pending[:sure], self._pending[sure:]
                return text, None
            yield

    def until(self, *marks: str) -> Reading[tuple[str, str | None]]:
        """All text before the first of the marks, and the mark; (rest, None) where none comes."""
        parts = []
        while True:
            text, mark = yield from self.piece(*marks)
            parts.append(text)
            if mark is not None or self.ended:
                return "".join(parts), mark

    def space(self, characters: str = " \t\r\n") -> Reading[str]:
        """What there is of these characters."""
        while not self._closed and not self._pending.strip(characters):
            yield
        rest = self._pending.lstrip(characters)
        text, self._pending = self._pending[: len(self._pending) - len(rest)], rest
        return text

    def starts_with(self, mark: str) -> Reading[bool]:
        """Whether the mark comes next; it is read then."""
        while len(self._pending) < len(mark) and mark.startswith(self._pending) and not self._closed:
            yield
        if not self._pending.startswith(mark):
            return False
        self._pending = self._pending[len(mark) :]
        return True


def _begun(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of the text that begins a mark."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
