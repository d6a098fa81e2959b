"""How a checkpoint wants chats: its Jinja template, with what transformers offers such templates, or the encoding
that is built in for models that ship none.

A template comes with the model and is not trusted: it runs in Jinja's immutable sandbox.
"""

import json
from abc import ABC, abstractmethod
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from configs.base import ConfigError
from serve.deepseek_chat import Kind, encode_chat
from serve.tokenizer import read_optional_json

Message = dict[str, Any]

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_FINAL_MARK = "\ue000final\ue000"  # private-use characters, which no template trims


class ChatTemplateError(ValueError):
    """The template refused the messages, or cannot do what was asked."""


class ChatFormat(ABC):
    """Renders messages, plain dicts whose `content` is a string (or None beside tool calls), to the text a model is
    given."""

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Raises ChatTemplateError; `tools` in OpenAI's form; `kwargs` are further variables the template may know."""
        if clash := sorted(_RESERVED & set(kwargs or {})):
            raise ChatTemplateError(f"{clash[0]} is set by the request itself and cannot be a template argument")
        prepared = [self._prepare(message) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
            if not prepared or not prepared[-1].get("content"):
                raise ChatTemplateError("continue_final_message needs a last message with content")
            prepared[-1]["content"] += _FINAL_MARK
        text = self._render(prepared, tools or [], add_generation_prompt, kwargs or {})
        if continue_final_message:
            text, mark, _ = text.rpartition(_FINAL_MARK)
            if not mark:
                raise ChatTemplateError("the chat template does not show the last message, so it cannot be continued")
        return text

    @abstractmethod
    def _prepare(self, message: Message) -> Message:
        """A copy of the message, in the form that `_render` needs."""

    @abstractmethod
    def _render(
        self, messages: list[Message], tools: list[dict[str, Any]], add_generation_prompt: bool, kwargs: dict[str, Any]
    ) -> str:
        """Raises ChatTemplateError."""


class ChatTemplate(ChatFormat):
    """A Jinja template. How it wants past tool calls (arguments as JSON text or as a dict; content None or "") is
    found by trying when it is loaded.

    Raises ConfigError when the source is not a valid template.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the checkpoint's chat template is not valid: {error}") from None
        self._special_tokens = special_tokens
        self.source = source
        self._knows_developer = "developer" in source
        self._empty_content, self._dict_arguments = self._probe_tool_calls()

    @classmethod
    def from_folder(cls, folder: Path, special_tokens: dict[str, str]) -> "ChatTemplate | None":
        """chat_template.jinja, else tokenizer_config.json's `chat_template` (of several, the one named default)."""
        path = folder / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), special_tokens)
        source = read_optional_json(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):
            source = {item["name"]: item["template"] for item in source}.get("default")
        return cls(source, special_tokens) if isinstance(source, str) else None

    def _render(
        self, messages: list[Message], tools: list[dict[str, Any]], add_generation_prompt: bool, kwargs: dict[str, Any]
    ) -> str:
        described = [{**tool, "function": _described(tool["function"])} for tool in tools] or None
        variables: dict[str, Any] = {"tools": described, "documents": None, **self._special_tokens, **kwargs}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
        except Exception as error:  # a template is a program: it may fail in any way
            raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from None

    def _prepare(self, message: Message) -> Message:
        prepared = dict(message)
        if prepared["role"] == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        if calls := prepared.get("tool_calls"):
            prepared["content"] = prepared.get("content") or self._empty_content
            prepared["tool_calls"] = [self._prepare_call(call) for call in calls]
        return prepared

    def _prepare_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function.get("arguments")
        if arguments in (None, "", "null"):
            arguments = "{}"
        if self._dict_arguments and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                raise ChatTemplateError(f"arguments of the tool call {function['name']!r} are not valid JSON") from None
        elif not self._dict_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    def _probe_tool_calls(self) -> tuple[str | None, bool]:
        """(content beside tool calls, arguments as dict): the first form that shows a call whole, else that renders."""
        renders: list[tuple[str | None, bool]] = []
        forms: list[tuple[str | None, bool]] = [(None, False), ("", False), (None, True), ("", True)]
        for self._empty_content, self._dict_arguments in forms:
            try:
                text = self._render([self._prepare(message) for message in _PROBE], [], False, {})
            except ChatTemplateError:
                continue
            renders.append((self._empty_content, self._dict_arguments))
            if "probe_name" in text and "probe_key" in text and '\\"probe_key' not in text:
                return renders[-1]
        return renders[0] if renders else ("", False)


class DeepSeekChat(ChatFormat):
    """The built-in encoding of a model; `thinking` (or `enable_thinking`) among the template's arguments says whether
    the assistant thinks, which it does not by default."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def _prepare(self, message: Message) -> Message:
        return dict(message)

    def _render(
        self, messages: list[Message], tools: list[dict[str, Any]], add_generation_prompt: bool, kwargs: dict[str, Any]
    ) -> str:
        thinking = kwargs.get("thinking", kwargs.get("enable_thinking", False))
        if not isinstance(thinking, bool):
            raise ChatTemplateError("thinking must be true or false")
        try:
            return encode_chat(
                self.kind, messages, tools, thinking=thinking, add_generation_prompt=add_generation_prompt
            )
        except ValueError as error:
            raise ChatTemplateError(str(error)) from None


def load_chat_format(folder: Path, special_tokens: dict[str, str]) -> ChatFormat | None:
    """The checkpoint's own template if it has one, else what is built in for its `model_type`, else None. Raises
    ConfigError when the template is not valid."""
    template = ChatTemplate.from_folder(folder, special_tokens)
    kind = read_optional_json(folder / "config.json").get("model_type")
    if template is None and (kind == "deepseek_v32" or kind == "deepseek_v4"):
        return DeepSeekChat(kind)
    return template


_PROBE: list[Message] = [
    {"role": "user", "content": "call"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "probe_name", "arguments": '{"probe_key": "probe value"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "done"},
]


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _described(function: dict[str, Any]) -> dict[str, Any]:
    """With all that templates take for granted, in the usual order."""
    always = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {"name": function["name"]} | always | function


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which would change what the model reads."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
