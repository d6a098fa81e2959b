"""The prompt of a request -> token ids, with every check that the engine relies on."""

import asyncio
from dataclasses import dataclass
from typing import Any

from serve.api.errors import bad_request, context_length_exceeded
from serve.tokenizer import Tokenizer, TokenizerError

MAX_PROMPTS = 4096  # of one request
_LONG_TEXT = 8192  # characters; longer texts are encoded in a thread, so that other streams go on


@dataclass(frozen=True)
class Prompt:
    """Validated: 1 <= len(token_ids) < max_model_len, every id below the engine's vocabulary."""

    token_ids: list[int]
    text: str | None  # None when the client sent ids


@dataclass(frozen=True)
class PromptReader:
    """Raises ApiError (400) for whatever cannot be a prompt of this model."""

    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int

    async def read_all(self, value: Any, *, add_special_tokens: bool) -> list[Prompt]:
        """`prompt` of /v1/completions: a text, texts, token ids or lists of token ids."""
        prompts = _split(value)
        if len(prompts) > MAX_PROMPTS:
            raise bad_request(f"prompt holds {len(prompts)} prompts: at most {MAX_PROMPTS} are allowed", "prompt")
        return [
            await self.from_text(prompt, "prompt", add_special_tokens=add_special_tokens)
            if isinstance(prompt, str)
            else self.from_ids(prompt)
            for prompt in prompts
        ]

    async def from_text(self, text: str, param: str, *, add_special_tokens: bool) -> Prompt:
        if not text:
            raise bad_request(f"{param} must not be empty", param)
        if len(text) > self.max_model_len * self.tokenizer.longest_token:
            message = f"However, your {param} has {len(text)} characters, which cannot fit."
            raise context_length_exceeded(self.max_model_len, message, param)
        try:
            if len(text) < _LONG_TEXT:
                ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            else:
                ids = await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        except TokenizerError as error:
            raise bad_request(f"{param}: {error}", param) from None
        if not ids:
            raise bad_request(f"{param} encodes to no tokens", param)
        self._check_length(ids, param)
        return Prompt(ids, text)

    def from_ids(self, ids: list[Any]) -> Prompt:
        if not ids:
            raise bad_request("prompt must not be empty", "prompt")
        self._check_length(ids, "prompt")
        for token_id in ids:
            if type(token_id) is not int:
                raise bad_request("prompt must be a string, strings, token ids or lists of token ids", "prompt")
            if not 0 <= token_id < self.vocab_size:
                message = f"prompt holds the token id {token_id}: this model's ids are from 0 to {self.vocab_size - 1}"
                raise bad_request(message, "prompt")
        return Prompt(ids, None)

    def output_budget(self, prompt: Prompt, asked: int | None, default: int | None, param: str) -> int:
        """Tokens the answer may have: what was asked if it fits, else the default or all that the context leaves."""
        left = self.max_model_len - len(prompt.token_ids)
        if asked is None:
            return left if default is None else min(left, default)
        if asked > left:
            message = (
                f"However, you requested {len(prompt.token_ids) + asked} tokens ({len(prompt.token_ids)} in the "
                f"prompt, {asked} in the completion). Shorten the prompt or lower {param}."
            )
            raise context_length_exceeded(self.max_model_len, message, param)
        return asked

    def _check_length(self, ids: list[Any], param: str) -> None:
        if len(ids) >= self.max_model_len:
            message = f"However, your {param} has {len(ids)} tokens, which leaves no room for an answer. Shorten it."
            raise context_length_exceeded(self.max_model_len, message, param)


def _split(value: Any) -> list[Any]:
    """One entry a prompt, each a str or a list (whose items are checked by `from_ids`)."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if not value:
            raise bad_request("prompt must not be empty", "prompt")
        if all(isinstance(item, str) for item in value) or all(isinstance(item, list) for item in value):
            return value
        if all(type(item) is int for item in value):
            return [value]
    raise bad_request("prompt must be a string, strings, token ids or lists of token ids", "prompt")
