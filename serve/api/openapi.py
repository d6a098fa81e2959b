"""The OpenAPI document of the HTTP API, made from the models that read requests and the types of the answers."""

import functools
from typing import Any

from pydantic import TypeAdapter

from serve import client_types as answers
from serve.api.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from serve.api.responses.request import ResponsesRequest

Schema = dict[str, Any]

_REF = "#/components/schemas/{model}"
_NULL: Schema = {"type": "null"}
_OBJECT: Schema = {"type": "object"}
_TEXT: Schema = {"type": "string"}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

_FUNCTION: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
        "description": _TEXT,
        "parameters": _OBJECT,
        "strict": {"type": ["boolean", "null"]},
    },
}
_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["text"]}, "text": _TEXT},
}
_CONTENT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _PART}, _NULL]}
_CALL: Schema = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": _TEXT,
        "type": {"enum": ["function"]},
        "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT, "arguments": _TEXT}},
    },
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": _CONTENT,
        "reasoning_content": {"type": ["string", "null"]},
        "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, _NULL]},
        "tool_call_id": _TEXT,
    },
}
_CHAT_TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"enum": ["function"]}, "function": _FUNCTION},
}
_RESPONSES_TOOL: Schema = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"enum": ["function"]}, **_FUNCTION["properties"]},
}
_NAMED: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["function", "allowed_tools"]}},
}
_FORMAT: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
        "json_schema": {"type": "object", "properties": {"name": _TEXT, "schema": _OBJECT, "strict": {}}},
    },
}
_ITEM: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message", "reasoning", "function_call", "function_call_output"]},
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}]},
    },
}

# What the models leave to functions that read whole conversations, tools and formats.
_READ_BY_HAND: dict[str, Schema] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "prompt": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _IDS, {"type": "array", "items": _IDS}]},
    "input": {"anyOf": [_TEXT, {"type": "array", "items": _ITEM, "minItems": 1}]},
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 64}]},
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED]},
    "response_format": _FORMAT,
}
_TOOLS: dict[Any, Schema] = {ChatRequest: _CHAT_TOOL, TokenizeRequest: _CHAT_TOOL, ResponsesRequest: _RESPONSES_TOOL}

_REQUESTS: list[Any] = [ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest]
_ANSWERS: list[Any] = [
    answers.ChatCompletion,
    answers.ChatChunk,
    answers.Completion,
    answers.ResponseObject,
    answers.ResponseEvent,
    answers.ModelList,
    answers.Model,
    answers.Tokens,
    answers.Text,
    answers.Error,
]


@functools.cache
def document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1. A request's optional fields may be null, which is the same as absent."""
    kinds = (*_REQUESTS, *_ANSWERS)
    _, shared = TypeAdapter.json_schemas([(one, "validation", TypeAdapter(one)) for one in kinds], ref_template=_REF)
    schemas: dict[str, Schema] = shared["$defs"]
    for kind in _REQUESTS:
        _complete(schemas[kind.__name__], kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Shoal", "version": version, "description": "OpenAI's API, served by Shoal"},
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "where keys are configured"}
            },
        },
        "security": [{}, {"key": []}],
    }


def _complete(schema: Schema, kind: Any) -> None:
    del schema["description"]  # which is for those who read the code
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        known = _READ_BY_HAND.get(name, field)
        if name == "tools":
            known = {"type": "array", "items": _TOOLS[kind]}
        choices = known.get("anyOf") or [
            {key: value for key, value in known.items() if key not in ("default", "title")}
        ]
        if name not in required and {} not in choices and _NULL not in choices:
            choices = [*choices, _NULL]
        schema["properties"][name] = {"anyOf": choices} if len(choices) > 1 else choices[0]


def _paths() -> dict[str, Any]:
    model = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    return {
        "/v1/chat/completions": _post("Chat", "ChatRequest", "ChatCompletion", "ChatChunk"),
        "/v1/completions": _post("Complete a text", "CompletionRequest", "Completion", "Completion"),
        "/v1/responses": _post("Respond, statelessly", "ResponsesRequest", "ResponseObject", "ResponseEvent"),
        "/v1/models": _get("The model served", _json("ModelList")),
        "/v1/models/{name}": _get("One model", _json("Model"), parameters=[model]),
        "/tokenize": _post("Text or messages to token ids", "TokenizeRequest", "Tokens"),
        "/detokenize": _post("Token ids to text", "DetokenizeRequest", "Text"),
        "/tokenizer_info": _get("What the tokenizer is", _any_json()),
        "/health": _get("200 while steps end; 503 else", _any_json(), unwell=True),
        "/version": _get("Shoal's version", _any_json()),
        "/metrics": _get("Prometheus' text format", {"text/plain": {"schema": _TEXT}}),
    }


def _post(summary: str, request: str, answer: str, event: str | None = None) -> dict[str, Any]:
    content = _json(answer)
    refusals = ["400", "401", "404", "413"]
    if event is not None:
        content["text/event-stream"] = {"schema": _ref(event)}
        refusals += ["408", "429", "500", "503", "504"]
    operation = {
        "summary": summary,
        "requestBody": {"required": True, "content": _json(request)},
        "responses": {"200": {"description": "the answer", "content": content}} | _errors(*refusals),
    }
    return {"post": operation}


def _get(summary: str, content: Schema, *, unwell: bool = False, parameters: list[Schema] | None = None) -> Schema:
    refusals = ("401", "404") if parameters else ("503",) if unwell else ("401",)
    operation: Schema = {
        "summary": summary,
        "responses": {"200": {"description": "the answer", "content": content}} | _errors(*refusals),
    }
    return {"get": operation | ({"parameters": parameters} if parameters else {})}


def _errors(*statuses: str) -> Schema:
    return {status: {"description": "an error", "content": _json("Error")} for status in statuses}


def _json(name: str) -> Schema:
    return {"application/json": {"schema": _ref(name)}}


def _any_json() -> Schema:
    return {"application/json": {"schema": _OBJECT}}


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(model=name)}
