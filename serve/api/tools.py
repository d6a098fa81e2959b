"""`tools` and `tool_choice` of a chat request."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from serve.api.errors import ApiError, bad_request
from serve.api.protocol import ChatRequest

# Names stand inside the models' tags: nothing that could end one. OpenAI allows letters, digits, _ and - alone.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MAX_TOOLS = 1024
_MAX_DEPTH = 128  # levels of JSON in a schema: reading one takes time that grows with the cube of its depth


@dataclass(frozen=True)
class ToolUse:
    """The functions a model is told of, and how it may call them."""

    tools: list[dict[str, Any]]  # as the client sent them
    callable: list[dict[str, Any]]  # of them, those that may be called
    mode: Literal["auto", "required"]
    named: bool  # exactly one call, of the one that may be called
    parallel: bool  # whether there may be several calls

    @property
    def schemas(self) -> dict[str, Any]:
        """Parameters by name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools}

    @property
    def strict(self) -> bool:
        """Whether arguments of some tool must follow its schema."""
        return any(tool["function"].get("strict") is True for tool in self.callable)


def read_tools(request: ChatRequest) -> ToolUse | None:
    """None when the model is not to call anything: without tools, or with `tool_choice` "none", it is told of none.

    Raises ApiError (400) naming the field.
    """
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
    if len(tools) > _MAX_TOOLS:
        raise bad_request(f"tools holds {len(tools)} tools: at most {_MAX_TOOLS} are allowed", "tools")
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise bad_request(f"tools holds the function {twice!r} twice", "tools")
    choice = request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice asks for a call, but there are no tools", "tool_choice")
        return None
    if choice == "none":
        return None
    if choice in (None, "auto", "required"):
        mode: Literal["auto", "required"] = "required" if choice == "required" else "auto"
        return ToolUse(tools, tools, mode, False, request.parallel_tool_calls)
    return _chosen(choice, tools, request.parallel_tool_calls)


def check_depth(value: Any, field: str) -> None:
    """Raises ApiError (400) for a schema that is nested too deeply."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner for item in level for inner in (item.values() if isinstance(item, dict) else item) if _holds(inner)
        ]
        if not level:
            return
    raise bad_request(f"{field} is nested more than {_MAX_DEPTH} levels deep", field, "invalid_schema")


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list)


def _chosen(choice: Any, tools: list[dict[str, Any]], parallel: bool) -> ToolUse:
    """`tool_choice` as an object: one function, or the allowed ones."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return ToolUse(tools, [_find(choice, tools)], "required", True, False)
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
        if mode in ("auto", "required") and isinstance(listed, list) and listed:
            return ToolUse(tools, [_find(item, tools) for item in listed], mode, False, parallel)
    message = (
        "tool_choice must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': [...]}}"
    )
    raise bad_request(message, "tool_choice")


def _find(choice: Any, tools: list[dict[str, Any]]) -> dict[str, Any]:
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise bad_request("tool_choice names a function that is not among the tools", "tool_choice")


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise bad_request(f"{where} must be an object of type 'function': other tools are not supported", where)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{where}.function must be an object with a name and parameters", f"{where}.function")
    function = {key: value for key, value in function.items() if value is not None}
    _check(function, f"{where}.function")
    return {**tool, "type": "function", "function": function}


def _check(function: dict[str, Any], where: str) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{where}.name", "must be a string of letters, digits, and _ . : / -, at most 128 of them")
    if not isinstance(function.get("description", ""), str):
        raise _wrong(f"{where}.description", "must be a string")
    if not isinstance(function.get("strict", False), bool):
        raise _wrong(f"{where}.strict", "must be true or false")
    parameters = function.get("parameters", {})
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise _wrong(f"{where}.parameters", "must be a JSON schema of type 'object'")
    check_depth(parameters, f"{where}.parameters")


def _wrong(field: str, message: str) -> ApiError:
    return bad_request(f"{field} {message}", field)
