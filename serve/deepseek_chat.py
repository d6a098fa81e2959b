"""Chat encodings of DeepSeek-V3.2 and V4, whose checkpoints ship no Jinja template but the rules followed here.

A turn of the assistant begins with `<think>`, its reasoning and `</think>` where it thinks, and with `</think>` where
it does not. Tools stand at the end of the first system message, calls and results as DSML, the models' own XML-like
marks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
Kind = Literal["deepseek_v32", "deepseek_v4"]

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_THINK, _END_THINK = "<think>", "</think>"
_MARK = "｜DSML｜"

_CALLS_V32, _CALLS_V4 = "function_calls", "tool_calls"
_EXAMPLE = """<{mark}{calls}>
<{mark}invoke name="${name}_NAME">
<{mark}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{mark}parameter>
...
</{mark}invoke>
<{mark}invoke name="${name}_NAME2">
...
</{mark}invoke>
</{mark}{calls}>"""
# What the models were trained to read, word for word.
_TOOLS_V32 = """

## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the \
user:
{example}
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:
<｜DSML｜function_calls>
...
</｜DSML｜function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
{schemas}
</functions>
"""
_TOOLS_V4 = """

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

{example}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


@dataclass(frozen=True)
class _Rules:
    """What differs between the two."""

    calls: str  # the tag around calls
    tools: str
    example_name: str
    keeps_reasoning_with_tools: bool  # of turns before the last user turn


_RULES: dict[Kind, _Rules] = {
    "deepseek_v32": _Rules(_CALLS_V32, _TOOLS_V32, "FUNCTION", False),
    "deepseek_v4": _Rules(_CALLS_V4, _TOOLS_V4, "TOOL", True),
}


def encode_chat(
    kind: Kind,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    *,
    thinking: bool = False,
    add_generation_prompt: bool = True,
) -> str:
    """The text that a model is given for messages in OpenAI's form, of roles system, developer, user, assistant and
    tool, `content` a string or None, and for tools; with `add_generation_prompt` ready for the assistant's turn.

    Reasoning of earlier turns (`reasoning`, for V3.2 also `reasoning_content`) is dropped when the user has spoken
    since, but V4 keeps it where there are tools. Raises ValueError for an unknown role, and for arguments of a call
    that are no JSON object.
    """
    rules = _RULES[kind]
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    keeps_all = bool(tools) and rules.keeps_reasoning_with_tools
    parts = [_BOS]
    instructions = _tools_text(rules, tools) if tools else ""
    if instructions and not any(m["role"] in ("system", "developer") for m in messages):
        parts.append(instructions)
        instructions = ""
    for i, message in enumerate(messages):
        role, text = message["role"], message.get("content") or ""
        is_last = i == len(messages) - 1
        opens = not is_last or add_generation_prompt
        if role in ("system", "developer"):
            parts.append(text + instructions)
            instructions = ""
        elif role == "user":
            parts.append(_user_turn(kind, messages, i, text))
            if opens and not _user_goes_on(kind, messages, i):
                parts.append(_ASSISTANT + _opening(thinking and (keeps_all or i >= last_user)))
        elif role == "tool":
            parts.append(_result(kind, messages, i, text))
            if opens and not _user_goes_on(kind, messages, i):
                opening = _opening(thinking and (keeps_all or i >= last_user))
                parts.append(f"\n\n{opening}" if kind == "deepseek_v32" else _ASSISTANT + opening)
        elif role == "assistant":
            reasoning = ""
            if thinking and (keeps_all or i > last_user):
                reasoning = _reasoning(kind, message) + _END_THINK
            parts.append(reasoning + text + _calls(rules, message.get("tool_calls") or ()) + _EOS)
        else:
            raise ValueError(f"messages[{i}].role: {role!r} is not known: use system, user, assistant or tool")
    return "".join(parts)


def _opening(thinks: bool) -> str:
    return _THINK if thinks else _END_THINK


def _reasoning(kind: Kind, message: Message) -> str:
    """V4's rules know `reasoning` alone."""
    given = message.get("reasoning")
    if given is None and kind == "deepseek_v32":
        given = message.get("reasoning_content")
    return given or ""


def _user_goes_on(kind: Kind, messages: Sequence[Message], i: int) -> bool:
    """Whether the turn continues in the next message: results of one turn's calls stand together, and in V4 they are
    part of the user's turn."""
    following = messages[i + 1]["role"] if i + 1 < len(messages) else None
    if kind == "deepseek_v32":
        return messages[i]["role"] == "tool" and following == "tool"
    return following in ("user", "tool")


def _user_turn(kind: Kind, messages: Sequence[Message], i: int, text: str) -> str:
    goes_on = kind == "deepseek_v4" and i > 0 and messages[i - 1]["role"] in ("user", "tool")
    return f"\n\n{text}" if goes_on else _USER + text


def _result(kind: Kind, messages: Sequence[Message], i: int, text: str) -> str:
    """A tool's result, with what stands around the results of one turn."""
    if kind == "deepseek_v4":
        return _user_turn(kind, messages, i, f"<tool_result>{text}</tool_result>")
    is_first = i == 0 or messages[i - 1]["role"] != "tool"
    is_final = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
    start, end = "\n\n<function_results>" if is_first else "", "\n</function_results>" if is_final else ""
    return f"{start}\n<result>{text}</result>{end}"


def _calls(rules: _Rules, calls: Sequence[dict[str, Any]]) -> str:
    if not calls:
        return ""
    lines = [f"\n\n<{_MARK}{rules.calls}>"]
    for call in calls:
        function = call["function"]
        lines.append(f'<{_MARK}invoke name="{function["name"]}">')
        for name, value in _arguments(function).items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value, ensure_ascii=False)
            lines.append(
                f'<{_MARK}parameter name="{name}" string="{"true" if is_text else "false"}">{shown}</{_MARK}parameter>'
            )
        lines.append(f"</{_MARK}invoke>")
    return "\n".join([*lines, f"</{_MARK}{rules.calls}>"])


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    given = function.get("arguments")
    try:
        value = json.loads(given or "{}") if isinstance(given, str) else given
    except ValueError:
        value = given
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"arguments of the tool call {function['name']!r} are not a JSON object")
    return value


def _tools_text(rules: _Rules, tools: Sequence[dict[str, Any]]) -> str:
    schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = _EXAMPLE.format(mark=_MARK, calls=rules.calls, name=rules.example_name)
    return rules.tools.format(example=example, schemas=schemas)
