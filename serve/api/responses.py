"""Response objects in OpenAI's exact shapes."""

from typing import Any

Json = dict[str, Any]


def model_card(name: str, created: int, max_model_len: int) -> Json:
    return {"id": name, "object": "model", "created": created, "owned_by": "shoal", "max_model_len": max_model_len}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, drafted: int, accepted: int) -> Json:
    """`completion_tokens_details` tells of speculation, where there was any: of the tokens drafted, those accepted are
    part of the answer."""
    result: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if drafted:
        result["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return result


def chat_choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}


def chat_delta(index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def text_choice(index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
