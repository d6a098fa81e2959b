"""Response objects in OpenAI's exact shapes."""

from typing import Any

Json = dict[str, Any]


def model_card(name: str, created: int, max_model_len: int) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": "shoal", "max_model_len": max_model_len}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def chat_choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}


def chat_delta(index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def text_choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
