"""Log-probabilities in the two shapes of OpenAI's API."""

from typing import Any

from serve.api.choice import TokenScore
from serve.tokenizer import Tokenizer
from workers.step import TokenLogprobs

_LOWEST = -9999.0  # JSON has no -inf; the value vLLM uses


def chat_logprobs(tokenizer: Tokenizer, scores: list[TokenScore], top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice; `top` alternatives a token."""
    content = []
    for score in scores:
        logprobs = score.logprobs
        if logprobs is None:
            continue
        entry = _entry(tokenizer, score.token_id, logprobs.logprob)
        pairs = zip(logprobs.top_ids[:top], logprobs.top_logprobs[:top], strict=True)
        entry["top_logprobs"] = [_entry(tokenizer, token_id, value) for token_id, value in pairs]
        content.append(entry)
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, scores: list[TokenScore]) -> dict[str, Any]:
    """`logprobs` of a completion choice. The token itself is always among its `top_logprobs`, under the same name."""
    return {
        "tokens": [token_name(tokenizer, score.token_id) for score in scores],
        "token_logprobs": [None if s.logprobs is None else _finite(s.logprobs.logprob) for s in scores],
        "top_logprobs": [None if s.logprobs is None else _by_name(tokenizer, s.token_id, s.logprobs) for s in scores],
        "text_offset": [score.offset for score in scores],
    }


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; `bytes:\\xe6\\x97` when it is a part of a character, as OpenAI writes it."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _by_name(tokenizer: Tokenizer, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
    """Tokens of the same text must not overwrite each other: later ones go by their id."""
    named = {token_name(tokenizer, token_id): _finite(logprobs.logprob)}
    for other, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
        if other != token_id:
            name = token_name(tokenizer, other)
            named[f"token_id:{other}" if name in named else name] = _finite(value)
    return named


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    name, data = token_name(tokenizer, token_id), tokenizer.token_bytes(token_id)
    return {"token": name, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
