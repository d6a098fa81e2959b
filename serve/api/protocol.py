"""The requests of OpenAI's API: which fields are known, of which type, and what this version honours or refuses.

A field that is null counts as absent and an unknown one is ignored, but a *known* parameter that cannot be honoured is
refused by name, unless its value asks for nothing.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from serve.api.errors import bad_request, from_validation, unsupported
from workers.step import MAX_LOGPROBS

MAX_CHOICES = 128  # of one prompt, as OpenAI
MAX_STOPS = 64  # stop strings of a request: each is looked for at every token


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(StrictModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(StrictModel):
    """What both endpoints share. None = the client said nothing. Ranges are SamplingParams' to check."""

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    stop: Annotated[list[str], BeforeValidator(_one_or_many)] = Field(default=[], max_length=MAX_STOPS)
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    cache_salt: str = ""
    user: str | None = None
    # What the answer must look like, in OpenAI's words, vLLM's and SGLang's; `structure` checks them.
    response_format: Any = None
    structured_outputs: dict[str, Any] = {}
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None

    def structure_fields(self) -> dict[str, Any]:
        """Those of the fields that say what the answer must look like which ask for something."""
        fields = {name: getattr(self, name) for name in _STRUCTURE}
        return {name: value for name, value in fields.items() if value not in (None, {}, [], "")}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions. `messages` are checked by `plain_messages`."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None  # default: unless the final message is continued
    continue_final_message: bool = False
    add_special_tokens: bool = False  # the template writes bos itself
    tools: list[Any] = []  # checked by `read_tools`, as is tool_choice
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True  # whether the reasoning is sent


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt` (text, texts, ids, lists of ids) is checked by `prompts.read_prompts`."""

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True


class TokenizeRequest(StrictModel):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None  # default: for a prompt, not for messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[Any] = []
    tool_choice: Any = None
    reasoning_effort: ReasoningEffort | None = None
    return_token_strs: bool = False


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


Asks = Callable[[Any], bool]


def _unless(*harmless: Any) -> Asks:
    return lambda value: not any(value == item and type(value) is type(item) for item in harmless)


_UNLESS_EMPTY = _unless([], {}, "", False)

_REFUSED: Mapping[str, Asks] = {
    # OpenAI's
    "functions": _UNLESS_EMPTY,
    "function_call": _unless("none", "auto"),
    "audio": _UNLESS_EMPTY,
    "modalities": _unless(["text"], []),
    "prediction": _UNLESS_EMPTY,
    "web_search_options": lambda value: True,
    "verbosity": _unless("medium"),
    "service_tier": _unless("auto", "default"),
    "store": _UNLESS_EMPTY,
    "suffix": _UNLESS_EMPTY,
    # other servers'
    "use_beam_search": _UNLESS_EMPTY,
    "prompt_logprobs": lambda value: True,
    "truncate_prompt_tokens": lambda value: True,
    "allowed_token_ids": _UNLESS_EMPTY,
    "bad_words": _UNLESS_EMPTY,
    "logits_processors": _UNLESS_EMPTY,
    "chat_template": _UNLESS_EMPTY,
    "documents": _UNLESS_EMPTY,
    "return_token_ids": _UNLESS_EMPTY,
    "return_tokens_as_token_ids": _UNLESS_EMPTY,
}

# What chat has and plain completions lack.
_CHAT_ONLY: Mapping[str, Asks] = {
    "tools": _UNLESS_EMPTY,
    "tool_choice": _unless("none", "auto"),
    "reasoning_effort": _unless("none"),
}

_STRUCTURE = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
)
# Their nulls are part of a schema.
_VERBATIM = frozenset({"guided_json", "json_schema"})

Request = TypeVar("Request", bound=StrictModel)


def parse(kind: type[Request], body: Any) -> Request:
    """Validates a decoded body. Raises ApiError (400) that names the first field at fault."""
    if not isinstance(body, dict):
        raise bad_request("The request body must be a JSON object.")
    given = {
        key: value if key in _VERBATIM else _without_nulls(value) for key, value in body.items() if value is not None
    }
    if issubclass(kind, GenerationRequest):
        _refuse_unsupported(kind, given)
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise from_validation(error) from None
    if isinstance(request, GenerationRequest) and request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed when stream is true.", "stream_options")
    return request


def _without_nulls(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def _refuse_unsupported(kind: type[GenerationRequest], given: dict[str, Any]) -> None:
    refused = _REFUSED if kind is ChatRequest else {**_REFUSED, **_CHAT_ONLY}
    for name, asks in refused.items():
        if name in given and asks(given[name]):
            raise unsupported(name)
    if kind is CompletionRequest and "best_of" in given and given["best_of"] != given.get("n", 1):
        raise unsupported("best_of", " unless it equals n")
    if kind is ChatRequest and given.get("echo"):
        raise unsupported("echo", " in chat")
    if kind is ChatRequest and given.get("top_logprobs") and not given.get("logprobs"):
        raise bad_request("top_logprobs is only allowed when logprobs is true.", "top_logprobs")
