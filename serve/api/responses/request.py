"""A request to /v1/responses -> the chat request that asks the same."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from serve.api.errors import ApiError, bad_request, unsupported
from serve.api.protocol import ReasoningEffort, StrictModel, parse
from serve.api.responses.input import chat_messages
from workers.step import MAX_LOGPROBS

_LOGPROBS = "message.output_text.logprobs"
# Parts of an answer that a client may ask for: those that never arise here are harmless to ask for.
_INCLUDABLE = frozenset({_LOGPROBS, "reasoning.encrypted_content"})

# The parameters of /v1/chat/completions that mean the same here, OpenAI's and others'.
# fmt: off
_SHARED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens", "ignore_eos",
    "skip_special_tokens", "priority", "cache_salt", "user", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf", "tool_choice", "parallel_tool_calls",
    "chat_template_kwargs", "include_reasoning",
)
# fmt: on
# Those that go by another name here.
_RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": f"include: [{_LOGPROBS!r}]",
}
# What an error says of a chat request -> what it says of this one.
_SPOKEN = (
    (re.compile(r"\bresponse_format(\.json_schema)?"), "text.format"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"(?<=\])\.function\b"), ""),
    (re.compile(r"\bmessages\b"), "input"),
)


class TextConfig(StrictModel):
    format: dict[str, Any] = Field(default={})
    verbosity: str = "medium"


class ReasoningConfig(StrictModel):
    effort: ReasoningEffort | None = None
    summary: str | None = None  # there are none: the reasoning itself is sent
    generate_summary: str | None = None  # its older name


class ResponsesRequest(StrictModel):
    """POST /v1/responses. `input` is read by `chat_messages`, tools and the format are checked as chat's are."""

    input: Any
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[Any] = Field(default=[])
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    include: list[str] = Field(default=[])
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    stream: bool = False
    metadata: dict[str, str] = Field(default={})
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"
    store: bool = False  # OpenAI's default is true: a client that asks for it is told in the answer that it was not
    n: Literal[1] = 1
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in self.include


# What asks for a memory, for a server's own tools, or for more than one model's answer.
_REFUSED: Mapping[str, str] = {
    "previous_response_id": ": nothing is stored, send the whole conversation as input",
    "conversation": ": nothing is stored, send the whole conversation as input",
    "prompt": ": there are no stored prompts, send instructions and input",
    "max_tool_calls": ": this server calls no tools of itself",
    "context_management": "",
    "moderation": "",
}


def read_request(body: Any) -> tuple[ResponsesRequest, dict[str, Any]]:
    """Returns the request and the body of the chat request. Raises ApiError (400) that names the field."""
    given = {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else {}
    for name, why in _REFUSED.items():
        if given.get(name):
            raise unsupported(name, why)
    for name, here in _RENAMED.items():
        if name in given:
            raise bad_request(f"{name} is not a parameter of /v1/responses: use {here}", name, "unknown_parameter")
    request = parse(ResponsesRequest, body)
    _check(request)
    chat = {name: given[name] for name in _SHARED if name in given}
    chat |= {
        "model": request.model,
        "messages": chat_messages(request.input, request.instructions),
        "max_completion_tokens": request.max_output_tokens,
        "tools": [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)],
        "reasoning_effort": request.reasoning.effort,
        "response_format": _response_format(request.text.format),
        "logprobs": request.wants_logprobs,
        "top_logprobs": request.top_logprobs,
        "stream": request.stream,
    }
    return request, chat


def in_these_words(error: ApiError) -> ApiError:
    """An error of the chat request, told of this one."""
    if error.param == "model":  # the message holds a name that the client chose
        return error
    message, param = error.message, error.param
    for pattern, words in _SPOKEN:
        message = pattern.sub(words, message)
        param = None if param is None else pattern.sub(words, param)
    return ApiError(error.status, message, error.type, param, error.code, error.retry_after_s)


def _check(request: ResponsesRequest) -> None:
    for index, name in enumerate(request.include):
        if name not in _INCLUDABLE:
            known = ", ".join(sorted(_INCLUDABLE))
            raise bad_request(f"include[{index}] is not known here: there are {known}", f"include[{index}]")
    if request.top_logprobs and not request.wants_logprobs:
        message = f"top_logprobs is only allowed when include holds {_LOGPROBS!r}"
        raise bad_request(message, "top_logprobs")
    if request.text.verbosity != "medium":
        raise unsupported("text.verbosity")


def _chat_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        message = f"{where} must be an object of type 'function': this server runs no tools of its own"
        raise bad_request(message, where, "unsupported_parameter")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _response_format(wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Responses puts a schema's name beside its type, chat inside."""
    if not wanted:
        return None
    if wanted.get("type") != "json_schema":
        return wanted
    if wanted.get("schema") is None:
        raise bad_request("text.format.schema must be a JSON schema", "text.format.schema", "invalid_schema")
    return {"type": "json_schema", "json_schema": {key: value for key, value in wanted.items() if key != "type"}}
