"""Response objects in OpenAI's exact shapes."""

from typing import Any

from serve.api.choice import Piece
from serve.parsers.output import Said

Json = dict[str, Any]


def model_card(name: str, created: int, max_model_len: int) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": "shoal", "max_model_len": max_model_len}


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, drafted: int, accepted: int, reasoning_tokens: int
) -> Json:
    """`completion_tokens_details` tells of speculation, where there was any: of the tokens drafted, those accepted are
    part of the answer."""
    details = {"reasoning_tokens": reasoning_tokens}
    if drafted:
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": details,
    }


def chat_choice(index: int, piece: Piece, logprobs: Json | None, finish_reason: str | None) -> Json:
    """The content is null where the assistant only calls tools."""
    text, reasoning, calls = piece.text(), piece.text("reasoning"), _tool_calls(piece.parts)
    message: Json = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
    if reasoning:
        message |= _both_names(reasoning)
    if calls:
        message["tool_calls"] = calls
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}


def delta_of(said: Said) -> Json:
    """The `delta` that a part of a turn makes."""
    if said.kind == "content":
        return {"content": said.text}
    if said.kind == "reasoning":
        return _both_names(said.text)
    call: Json = {"index": said.call, "function": {"arguments": said.text}}
    if said.kind == "call":
        call |= {"id": said.id, "type": "function", "function": {"name": said.text, "arguments": ""}}
    return {"tool_calls": [call]}


def chat_delta(index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _both_names(reasoning: str) -> Json:
    """Clients know one or the other."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}


def _tool_calls(parts: list[Said]) -> list[Json]:
    calls: list[Json] = []
    for said in parts:
        if said.kind == "call":
            function = {"name": said.text, "arguments": ""}
            calls.append({"id": said.id, "type": "function", "function": function})
        elif said.kind == "arguments":
            calls[said.call]["function"]["arguments"] += said.text
    return calls


def text_choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
