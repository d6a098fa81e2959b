"""Chat messages as clients send them -> the plain form a chat template takes."""

from typing import Any

from serve.api.errors import bad_request

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_PASSED = ("role", "name", "tool_call_id")


def plain_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Contents become strings (text parts joined), empty tool calls vanish, reasoning goes by `reasoning_content`.

    Raises ApiError (400) naming the message and the part.
    """
    if not messages:
        raise bad_request("messages must hold at least one message", "messages")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_request(f"{where} must be an object with role and content", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad_request(f"{where}.role must be a string, e.g. 'user'", f"{where}.role")
    plain = {key: message[key] for key in _PASSED if message.get(key) is not None}
    calls = _tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    plain["content"] = _text(message.get("content"), f"{where}.content", optional=role == "assistant")
    if calls:
        plain["tool_calls"] = calls
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning is not None:
        plain["reasoning_content"] = _text(reasoning, f"{where}.reasoning_content", optional=True)
    return plain


def _text(content: Any, where: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of text parts", where)
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise bad_request(f"{where} must be an object like {{'type': 'text', 'text': '...'}}", where)
    if (field := _TEXT_PARTS.get(kind)) is None:
        raise bad_request(f"{where} is of type {kind!r}: this model takes text parts only", where)
    text = part.get(field)
    if not isinstance(text, str):
        raise bad_request(f"{where}.{field} must be a string", f"{where}.{field}")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise bad_request(f"{where} must be a list", where)
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where}[{index}].function.name must be a string", f"{where}[{index}].function.name")
        if not isinstance(function.get("arguments"), str | dict | None):
            path = f"{where}[{index}].function.arguments"
            raise bad_request(f"{path} must be a string of JSON", path)
    return calls
