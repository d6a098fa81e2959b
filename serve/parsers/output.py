"""The text a model writes in its turn, told apart: its reasoning, its answer, and calls of tools."""

import enum
import uuid
from collections.abc import Generator
from typing import Literal, NamedTuple

from serve.parsers.source import Source
from serve.parsers.tool_formats import Arguments, CallBegins, Schemas, ToolFormat

THINK, END_THINK = "<think>", "</think>"


class Said(NamedTuple):
    """A part of a turn. For a call `text` is the tool's name; its arguments follow, under the same index."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    call: int = 0  # its number
    id: str = ""  # of the call, where it begins


def append(parts: list[Said], said: Said) -> None:
    """Adds a part; what continues the last one joins it."""
    last = parts[-1] if parts else None
    if last is not None and said.kind != "call" and (said.kind, said.call) == (last.kind, last.call):
        parts[-1] = last._replace(text=last.text + said.text)
    else:
        parts.append(said)


class Thinking(enum.Enum):
    """What the prompt's end says of the turn's beginning."""

    OPEN = "open"  # it is inside a reasoning
    CLOSED = "closed"  # there is none
    MAYBE = "maybe"  # there is one if the turn begins with its tag
    IGNORED = "ignored"  # the tags have no meaning

    @classmethod
    def of_prompt(cls, prompt: str) -> "Thinking":
        """Where a prompt ends that is ready for the assistant's turn."""
        end = prompt.rstrip()
        return cls.OPEN if end.endswith(THINK) else cls.CLOSED if end.endswith(END_THINK) else cls.MAYBE


class OutputParser:
    """Takes a turn's text in any pieces; what comes out joins to the same whatever the cuts.

    White space at the seams is removed as the format demands: newlines around a reasoning where `exact` is false, and
    the format's gap between the answer and calls. A turn that is cut off leaves what was certain until then.
    """

    def __init__(
        self,
        thinking: Thinking,
        tool_format: ToolFormat | None = None,
        tools: Schemas | None = None,
        *,
        parallel_calls: bool = True,
        exact: bool = False,
    ) -> None:
        """Without `tool_format` nothing is a call. `parallel_calls`: False drops all calls but the first."""
        self.thinks = thinking is Thinking.OPEN  # whether the text so far ends inside a reasoning
        self.has_calls = False
        self.calls = False  # whether the text so far ends inside a block of calls
        self._source = Source()
        self._format = tool_format
        self._tools = tools or {}
        self._parallel = parallel_calls
        self._exact = exact
        self._num_calls = 0
        self._steps = self._turn(thinking)

    def add(self, text: str) -> list[Said]:
        """What has become certain with this text."""
        self._source.more(text)
        return self._go_on()

    def finish(self) -> list[Said]:
        """The rest. Nothing may be added any more."""
        self._source.close()
        return self._go_on()

    def _go_on(self) -> list[Said]:
        """Runs until the turn waits for more; adjacent parts of one kind are joined."""
        parts: list[Said] = []
        for said in self._steps:
            if said is None:
                break
            append(parts, said)
        return parts

    def _turn(self, thinking: Thinking) -> Generator[Said | None, None, None]:
        if thinking is Thinking.MAYBE:
            space = yield from self._source.space()
            self.thinks = yield from self._source.starts_with(THINK)
            if not self.thinks:
                self._source.unread(space)
        if self.thinks:
            yield from self._reasoning()
        while not self._source.ended:
            is_block = yield from self._content()
            if is_block and self._format is not None:
                self.calls = True
                yield from self._calls(self._format)
                self.calls = False

    def _reasoning(self) -> Generator[Said | None, None, None]:
        if not self._exact:
            yield from self._source.space("\n")
        held, mark = "", None
        while mark is None and not self._source.ended:
            text, mark = yield from self._source.piece(END_THINK)
            held += text
            shown = held if self._exact else held.rstrip("\n")
            if shown:
                yield Said("reasoning", shown)
                held = held[len(shown) :]
        if mark is not None:
            self.thinks = False
            if not self._exact:
                yield from self._source.space("\n")

    def _content(self) -> Generator[Said | None, None, bool]:
        """Returns whether a block of calls begins. The white space before that is held back, and what stands alone
        behind a block is none of the answer."""
        marks = () if self._format is None else (self._format.begin,)
        held = ""
        while not self._source.ended:
            text, mark = yield from self._source.piece(*marks, partial=not self.has_calls)
            held += text
            shown = held.rstrip() if marks else held
            if mark is not None and self._format is not None and self._format.gap is not None:
                shown = held.removesuffix(self._format.gap)
            if shown and not (self.has_calls and shown.isspace()):
                yield Said("content", shown)
                held = held[len(shown) :]
            if mark is not None:
                return True
        if held and not self.has_calls:
            yield Said("content", held)
        return False

    def _calls(self, tool_format: ToolFormat) -> Generator[Said | None, None, None]:
        wanted = False
        for event in tool_format.read(self._source, self._tools):
            if event is None:
                yield None
            elif isinstance(event, CallBegins):
                wanted = self._parallel or self._num_calls == 0
                self._num_calls += 1
                if wanted:
                    self.has_calls = True
                    yield Said("call", event.name, self._num_calls - 1, event.id or f"call_{uuid.uuid4().hex[:24]}")
            elif isinstance(event, Arguments) and wanted:
                yield Said("arguments", event.text, self._num_calls - 1)
