"""How models write tool calls. Each format reads the inside of a block of calls and yields what it finds as it comes;
arguments always join to a JSON object, once they are whole.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from serve.parsers.source import Source


class CallBegins(NamedTuple):
    """The model calls a tool; `id` where its format has one."""

    name: str
    id: str | None = None


class Arguments(NamedTuple):
    """The next part of the call's arguments, JSON."""

    text: str


CallEvent = CallBegins | Arguments
Schemas = Mapping[str, Any]  # of parameters, by the tool's name
CallReader = Generator[CallEvent | None, None, None]


class ToolFormat(ABC):
    """`begin` opens a block of calls. `gap` is what stands between the text before it and the block (None: any white
    space), and is part of neither. `grammar` is xgrammar's name of the format, `spaces` how many white-space characters
    may stand between its marks where a grammar demands a call."""

    begin: str
    gap: str | None = ""
    marks: tuple[str, ...]  # tags that may be special tokens
    grammar: str
    spaces: int = 20  # room for indented JSON

    @abstractmethod
    def read(self, source: Source, tools: Schemas) -> CallReader:
        """Reads from behind `begin` to the end of the block."""


class JsonCalls(ToolFormat):
    """Arguments are JSON as it is: DeepSeek V3, R1, V3.1 and Kimi K2."""

    def __init__(self, *, begin: str, call: str, arguments: str, ends: tuple[str, ...], end: str, grammar: str) -> None:
        """begin (call name arguments ... one of ends)* end"""
        self.begin = begin
        self.grammar = grammar
        self.marks = (begin, call, arguments, *ends, end)
        self._call, self._arguments, self._ends, self._end = call, arguments, ends, end

    def read(self, source: Source, tools: Schemas) -> CallReader:
        while True:
            _, mark = yield from source.until(self._call, self._end)
            if mark != self._call:
                return
            header, mark = yield from source.until(self._arguments, *self._ends)
            if mark is None:
                return
            yield self._begins(header)
            if mark == self._arguments:
                yield from self._read_arguments(source)
            else:
                yield Arguments("{}")

    def _read_arguments(self, source: Source) -> CallReader:
        yield from source.space()
        held, mark, is_empty = "", None, True
        while mark is None and not source.ended:
            text, mark = yield from source.piece(*self._ends, partial=False)
            held += text
            if shown := held.rstrip():
                yield Arguments(shown)
                held, is_empty = held[len(shown) :], False
        if is_empty and mark is not None:
            yield Arguments("{}")

    def _begins(self, header: str) -> CallBegins:
        return CallBegins(header.strip())


class FencedCalls(JsonCalls):
    """The header tells the kind of tool, too, and arguments stand in a fenced block."""

    def __init__(self, **tags: str) -> None:
        end = "<｜tool▁call▁end｜>"
        super().__init__(arguments="\n```json\n", ends=(f"\n```{end}", f"```{end}", end), **tags)
        self.marks = (self.begin, tags["call"], "<｜tool▁sep｜>", end, tags["end"])

    def _begins(self, header: str) -> CallBegins:
        return CallBegins(header.rpartition("<｜tool▁sep｜>")[2].strip())


class KimiCalls(JsonCalls):
    """Ids are functions.NAME:INDEX, and later turns must show them so."""

    def _begins(self, header: str) -> CallBegins:
        name = header.strip().removeprefix("functions.")
        return CallBegins(name.rpartition(":")[0] or name, header.strip())


class _Members:
    """Writes an object's members as they come."""

    def __init__(self) -> None:
        self._count = 0

    def key(self, name: str) -> Arguments:
        self._count += 1
        return Arguments(("{" if self._count == 1 else ", ") + _quoted(name) + ": ")

    def end(self) -> Arguments:
        return Arguments("}" if self._count else "{}")


class DsmlCalls(ToolFormat):
    """DeepSeek V3.2 and V4: a tag around each parameter says whether its value is a text or JSON."""

    gap = "\n\n"
    spaces = 1

    def __init__(self, calls: str, grammar: str) -> None:
        """`calls`: name of the tag around all calls."""
        self.begin, self._end = f"<｜DSML｜{calls}>", f"</｜DSML｜{calls}>"
        self.marks = ("｜DSML｜",)
        self.grammar = grammar

    def read(self, source: Source, tools: Schemas) -> CallReader:
        while True:
            _, mark = yield from source.until('<｜DSML｜invoke name="', self._end)
            if mark in (None, self._end):
                return
            name, mark = yield from source.until('">')
            if mark is None:
                return
            yield CallBegins(name)
            yield from self._read_parameters(source)

    def _read_parameters(self, source: Source) -> CallReader:
        members = _Members()
        while True:
            _, mark = yield from source.until('<｜DSML｜parameter name="', "</｜DSML｜invoke>")
            if mark is None:
                return
            if mark == "</｜DSML｜invoke>":
                yield members.end()
                return
            header, mark = yield from source.until('">')
            if mark is None:
                return
            name, _, is_text = header.rpartition('" string="')
            yield members.key(name)
            yield from _read_value(source, "</｜DSML｜parameter>", is_text=is_text == "true")


class GlmCalls(ToolFormat):
    """GLM-4.5 to 5: keys and values in tags; texts stand without quotes, and the tool's schema tells them from JSON."""

    begin = "<tool_call>"
    gap = None
    marks = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    grammar = "glm_4_7"
    spaces = 1

    def read(self, source: Source, tools: Schemas) -> CallReader:
        name, mark = yield from source.until("<arg_key>", "</tool_call>")
        if mark is None:
            return
        name = name.strip()
        yield CallBegins(name)
        members = _Members()
        while mark == "<arg_key>":
            key, found = yield from source.until("</arg_key>")
            if found is None:
                return
            yield members.key(key.strip())
            _, found = yield from source.until("<arg_value>")
            if found is None:
                return
            yield from _read_value(source, "</arg_value>", is_text=_takes_text(tools.get(name), key.strip()))
            _, mark = yield from source.until("<arg_key>", "</tool_call>")
        if mark is not None:
            yield members.end()


def _read_value(source: Source, end: str, *, is_text: bool) -> CallReader:
    """A text goes out as it comes. JSON waits until it is whole: what turns out not to be JSON is a text."""
    if not is_text:
        value, mark = yield from source.until(end)
        if mark is not None:
            yield Arguments(value.strip() if _is_json(value) else _quoted(value))
        return
    yield Arguments('"')
    mark = None
    while mark is None and not source.ended:
        text, mark = yield from source.piece(end, partial=False)
        if text:
            yield Arguments(_quoted(text)[1:-1])
    if mark is not None:
        yield Arguments('"')


def _takes_text(schema: Any, key: str) -> bool:
    """Whether a tool's parameter can only be a text."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    parameter = properties.get(key) if isinstance(properties, dict) else None
    return isinstance(parameter, dict) and parameter.get("type") in ("string", ["string"])


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_DEEPSEEK = {"begin": "<｜tool▁calls▁begin｜>", "call": "<｜tool▁call▁begin｜>", "end": "<｜tool▁calls▁end｜>"}

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "deepseek_v3": FencedCalls(**_DEEPSEEK, grammar="deepseek_r1"),
    "deepseek_v31": JsonCalls(
        **_DEEPSEEK, arguments="<｜tool▁sep｜>", ends=("<｜tool▁call▁end｜>",), grammar="deepseek_v3_1"
    ),
    "deepseek_v32": DsmlCalls("function_calls", "deepseek_v3_2"),
    "deepseek_v4": DsmlCalls("tool_calls", "deepseek_v4"),
    "glm": GlmCalls(),
    "kimi_k2": KimiCalls(
        begin="<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>",
        arguments="<|tool_call_argument_begin|>",
        ends=("<|tool_call_end|>",),
        end="<|tool_calls_section_end|>",
        grammar="kimi",
    ),
}
