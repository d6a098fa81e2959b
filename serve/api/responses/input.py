"""The `input` of a Responses request: items of a conversation -> chat messages."""

from typing import Any

from serve.api.errors import ApiError, bad_request

Message = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHTS = {"reasoning_text": "text", "summary_text": "text", "text": "text"}


def chat_messages(given: Any, instructions: str | None) -> list[Message]:
    """Raises ApiError (400) naming the item and the field."""
    reader = _Reader()
    if instructions:
        reader.messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        reader.messages.append({"role": "user", "content": given})
        return reader.messages
    if not isinstance(given, list) or not given:
        raise bad_request("input must be a string or a list of items that is not empty", "input")
    for index, item in enumerate(given):
        reader.add(item, f"input[{index}]")
    return reader.messages


class _Reader:
    """An assistant's turn comes in several items: reasoning, a message, calls. They become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None  # the last message, while items may still belong to it

    def add(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise bad_request(f"{where} must be an object", where)
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            self._add_reasoning(item, where)
        elif kind == "function_call":
            self._add_call(item, where)
        elif kind == "function_call_output":
            self._turn = None
            call_id, output = _string(item, "call_id", where), _text(item.get("output"), f"{where}.output", _TEXTS)
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        else:
            known = "'message', 'reasoning', 'function_call' or 'function_call_output'"
            raise _wrong(f"{where}.type", f"must be {known}: other items are not supported")

    def _add_message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise _wrong(f"{where}.role", f"must be one of {', '.join(map(repr, _ROLES))}")
        content = _text(item.get("content"), f"{where}.content", _TEXTS)
        if role != "assistant":
            self._turn = None
            self.messages.append({"role": role, "content": content})
        else:
            self._begin("content", "tool_calls")["content"] = content

    def _add_reasoning(self, item: dict[str, Any], where: str) -> None:
        if item.get("encrypted_content"):
            raise _wrong(f"{where}.encrypted_content", "cannot be read here: send the reasoning's content")
        field = "content" if item.get("content") else "summary"
        text = _text(item.get(field) or [], f"{where}.{field}", _THOUGHTS)
        self._begin("reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def _add_call(self, item: dict[str, Any], where: str) -> None:
        function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
        call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
        self._begin().setdefault("tool_calls", []).append(call)

    def _begin(self, *unless: str) -> Message:
        """The assistant's turn that goes on, or a new one where it has one of these already."""
        if self._turn is None or any(field in self._turn for field in unless):
            self._turn = {"role": "assistant"}
            self.messages.append(self._turn)
        return self._turn


def _text(content: Any, where: str, kinds: dict[str, str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "must be a string or a list of parts")
    return "".join(_part(part, f"{where}[{index}]", kinds) for index, part in enumerate(content))


def _part(part: Any, where: str, kinds: dict[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise _wrong(where, f"must be of type {' or '.join(map(repr, kinds))}: this model reads text alone")
    return _string(part, kinds[kind], where)


def _string(item: dict[str, Any], field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{field}", "must be a string")
    return value


def _wrong(field: str, message: str) -> ApiError:
    return bad_request(f"{field} {message}", field)
