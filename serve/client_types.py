"""OpenAI's answers as typed dicts. Keys that are not required are there only when they have something to say."""

from typing import (
    Any,
    Literal,
    NotRequired,  # typing's own are none to pydantic before Python 3.12
)

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(TypedDict):
    cached_tokens: int


class OutputTokens(TypedDict):
    reasoning_tokens: int
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: OutputTokens


class Function(TypedDict):
    name: str
    arguments: str  # JSON


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: Function


class Message(TypedDict):
    role: Literal["assistant"]
    content: str | None  # None beside tool calls alone
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]  # the same
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int  # Unix seconds
    model: str
    choices: list[ChatChoice]
    usage: Usage


class PartOfFunction(TypedDict):
    name: NotRequired[str]
    arguments: str


class PartOfToolCall(TypedDict):
    """`id`, `type` and the name come once, first; arguments of the same `index` join."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: PartOfFunction


class Delta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[PartOfToolCall]


class ChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None  # None in a stream's chunks before the last


class Completion(TypedDict):
    """A whole answer, or a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseObject(TypedDict):
    """What is common to all; the request's fields are given back beside these."""

    id: str
    object: Literal["response"]
    created_at: int  # Unix seconds
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]  # by `type`: reasoning, message, function_call
    usage: ResponseUsage | None  # None while it is in progress


class ResponseEvent(TypedDict):
    """`type` says which fields it has besides."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseObject]
    output_index: NotRequired[int]
    item_id: NotRequired[str]
    item: NotRequired[dict[str, Any]]
    content_index: NotRequired[int]
    part: NotRequired[dict[str, Any]]
    delta: NotRequired[str]
    text: NotRequired[str]
    arguments: NotRequired[str]
    name: NotRequired[str]
    logprobs: NotRequired[list[dict[str, Any]]]
    message: NotRequired[str]
    code: NotRequired[str | None]
    param: NotRequired[str | None]


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    prompt: str


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """The envelope of every error."""

    error: ErrorFields
