"""What an answer must look like: OpenAI's `response_format`, vLLM's and SGLang's fields for the same, and calls that a
`tool_choice` demands, as one of xgrammar's structural tags.

A tag is JSON text. It covers all that the model writes in its turn, the reasoning included, which it leaves free.
"""

import asyncio
import functools
import importlib
import json
import re
from typing import Any

from serve.api.errors import bad_request
from serve.api.protocol import GenerationRequest
from serve.api.tools import ToolUse, check_depth
from serve.parsers.detect import OutputFormat
from serve.parsers.output import END_THINK, THINK, Thinking

Format = dict[str, Any]  # of a structural tag

_MAX_WHITE_SPACE = 20  # characters between JSON's marks: room for indentation, but no endless lines
MAX_GRAMMAR_CHARS = 256 * 1024
# What JSON schemas may say and xgrammar passes over.
_UNSUPPORTED = frozenset({"not", "if", "$dynamicRef", "$recursiveRef", "dependentSchemas"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # schemas by name
_LITERALS = frozenset({"enum", "const", "default", "examples"})
# Of a message of xgrammar's: when and where in its sources it arose.
_ORIGIN = re.compile(r"^\[[\d:]+\] \S+: ")


def structured_format(request: GenerationRequest) -> tuple[Format, str] | None:
    """What the request wants its answer to be, and the field that says so. Raises ApiError (400)."""
    wanted = [
        (found, field)
        for field, value in request.structure_fields().items()
        if (found := _READERS[field](value, field)) is not None
    ]
    if len(wanted) > 1:
        raise bad_request(f"{wanted[0][1]} and {wanted[1][1]} exclude each other", wanted[1][1])
    if not wanted:
        return None
    check_depth(*wanted[0])
    return wanted[0]


def turn_grammar(
    structure: Format | None, use: ToolUse | None, output: OutputFormat, thinking: Thinking = Thinking.CLOSED
) -> str:
    """The structural tag of a turn, "" if it is free: the structure, or calls where tools must or may be called."""
    calls = None if use is None else _calls(use, output, must_call=use.mode == "required" or structure is not None)
    if use is not None and use.mode == "required":
        wanted = calls
    elif structure is not None and calls is not None:
        wanted = {"type": "or", "elements": [structure, calls]}
    else:
        wanted = structure or calls
    if wanted is None:
        return ""
    return json.dumps(
        {"type": "structural_tag", "format": _after_reasoning(wanted, output, thinking)}, ensure_ascii=False
    )


class GrammarChecker:
    """Tells what is wrong with a grammar before it reaches the engine."""

    async def check(self, grammar: str, field: str) -> None:
        """Raises ApiError (400) naming the field."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise bad_request(f"{field} is larger than {MAX_GRAMMAR_CHARS} characters", field, "invalid_schema")
        if problem := await asyncio.to_thread(_problem, grammar):
            raise bad_request(f"{field}: {problem}", field, "invalid_schema")


def warm_up() -> None:
    """Imports xgrammar, which takes seconds the first time."""
    importlib.import_module("xgrammar")


@functools.lru_cache(maxsize=256)
def _problem(grammar: str) -> str | None:
    import xgrammar

    try:
        xgrammar.Grammar.from_structural_tag(grammar)
    except RecursionError:
        return "it is nested too deeply"
    except RuntimeError as error:
        return _ORIGIN.sub("", str(error)).strip()[:500]
    return None


# ------------------------------------------------------------------------------------------------------ requests


def _response_format(value: Any, field: str) -> Format | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _json_object()
    if kind == "json_schema":
        described = value.get("json_schema")
        if not isinstance(described, dict) or not isinstance(described.get("name", ""), str):
            raise bad_request(f"{field}.json_schema must be an object with name and schema", f"{field}.json_schema")
        if described.get("schema") is None:
            return _json_object()
        return _json_schema(described["schema"], f"{field}.json_schema.schema")
    if kind == "structural_tag":
        return _structural_tag(value, field)
    message = f"{field}.type must be 'text', 'json_object', 'json_schema' or 'structural_tag'"
    raise bad_request(message, f"{field}.type")


def _structured_outputs(value: Any, field: str) -> Format | None:
    """vLLM's."""
    given = {key: item for key, item in value.items() if key in _OUTPUT_KINDS and item not in (None, False)}
    if unknown := sorted(set(value) - set(_OUTPUT_KINDS) - _OUTPUT_HINTS):
        raise bad_request(f"{field} has the unknown field {unknown[0]!r}", f"{field}.{unknown[0]}")
    if len(given) != 1:
        raise bad_request(f"{field} must hold exactly one of {', '.join(_OUTPUT_KINDS)}", field)
    kind, item = given.popitem()
    return _OUTPUT_KINDS[kind](item, f"{field}.{kind}")


def _json_object(value: Any = True, field: str = "") -> Format:
    return {"type": "json_schema", "json_schema": {"type": "object"}, "max_whitespace_cnt": _MAX_WHITE_SPACE}


def _json_schema(value: Any, field: str) -> Format:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise bad_request(f"{field} is not valid JSON", field, "invalid_schema") from None
    if not isinstance(value, dict | bool):
        raise bad_request(f"{field} must be a JSON schema", field, "invalid_schema")
    _check_keywords(value, field)
    return {"type": "json_schema", "json_schema": value, "max_whitespace_cnt": _MAX_WHITE_SPACE}


def _check_keywords(schema: Any, field: str) -> None:
    """Raises ApiError for keywords that could not be kept to."""
    todo = [schema]
    while todo:
        item = todo.pop()
        if not isinstance(item, dict):
            continue
        for key, value in item.items():
            if key in _UNSUPPORTED or (key == "allOf" and isinstance(value, list) and len(value) > 1):
                raise bad_request(f"{field} uses {key!r}, which is not supported", field, "unsupported_schema")
            if key in _BY_NAME and isinstance(value, dict):
                todo += value.values()
            elif key not in _LITERALS:
                todo += value if isinstance(value, list) else [value]


def _regex(value: Any, field: str) -> Format:
    return {"type": "regex", "pattern": _text(value, field)}


def _ebnf(value: Any, field: str) -> Format:
    return {"type": "grammar", "grammar": _text(value, field)}


def _choice(value: Any, field: str) -> Format:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise bad_request(f"{field} must be a list of strings that are not empty", field)
    return {"type": "or", "elements": [{"type": "const_string", "value": item} for item in value]}


def _structural_tag(value: Any, field: str) -> Format:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise bad_request(f"{field} is not valid JSON", field, "invalid_schema") from None
    wanted = value.get("format") if isinstance(value, dict) else None
    if not isinstance(wanted, dict):
        raise bad_request(f"{field}.format must be an object", f"{field}.format", "invalid_schema")
    return wanted


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad_request(f"{field} must be a string that is not empty", field)
    return value


_OUTPUT_KINDS = {
    "json": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "structural_tag": _structural_tag,
}
_OUTPUT_HINTS = frozenset({"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"})
_READERS = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json_schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "json_schema": _json_schema,
    "regex": _regex,
    "ebnf": _ebnf,
}

# ------------------------------------------------------------------------------------------------------ turns


def _calls(use: ToolUse, output: OutputFormat, *, must_call: bool) -> Format | None:
    """Calls as the model's format writes them; None when they are free: nothing demands a call, or a schema."""
    if not must_call and not use.strict:
        return None
    if output.tool_format is None:
        raise bad_request("this model has no format for tool calls", "tools", "unsupported_parameter")
    from xgrammar import get_model_structural_tag

    tools = use.callable if must_call else [_strict_or_free(tool) for tool in use.callable]
    choice: Any = {"type": "function", "function": {"name": tools[0]["function"]["name"]}} if use.named else None
    tag = get_model_structural_tag(
        output.tool_format.grammar,
        tools=[{"type": "function", "function": tool["function"]} for tool in tools],
        tool_choice=choice or ("required" if must_call else "auto"),
        reasoning="disabled",
        parallel_tool_calls=use.parallel,
        max_whitespace_cnt=output.tool_format.spaces,
    )
    wanted: Format = tag.model_dump()["format"]
    return wanted


def _strict_or_free(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    return {**tool, "function": {**function, "strict": function.get("strict") is True}}


def _after_reasoning(wanted: Format, output: OutputFormat, thinking: Thinking) -> Format:
    """The prompt may have opened the reasoning; else a model that is known to think may begin with one."""
    if thinking is Thinking.OPEN:
        reasoning = _reasoning("")
    elif thinking is Thinking.MAYBE and output.thinker:
        reasoning = {"type": "optional", "content": _reasoning(THINK)}
    else:
        return wanted
    return {"type": "sequence", "elements": [reasoning, wanted]}


def _reasoning(begin: str) -> Format:
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": [END_THINK, f"{END_THINK}\n\n"]}
