"""/tokenize, /detokenize and /tokenizer_info, in vLLM's form."""

import asyncio
from typing import Any

from serve.api.errors import bad_request
from serve.api.intake import Intake
from serve.api.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest, parse
from serve.api.shapes import Json
from serve.api.tools import read_tools
from serve.tokenizer import Tokenizer, TokenizerError

_LONG_TEXT = 1 << 14  # characters that are encoded off the event loop


class TokenCalls:
    """What the tokenizer alone can answer. All calls raise ApiError and nothing else."""

    def __init__(self, tokenizer: Tokenizer, intake: Intake, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._intake = intake
        self._max_model_len = max_model_len

    async def tokenize(self, body: Json) -> Json:
        """The ids of a prompt, or of messages as the model would be given them; they need not fit its context."""
        request = parse(TokenizeRequest, body)
        self._intake.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("Give either prompt or messages.", "prompt")
        text, special = request.prompt, request.add_special_tokens
        if request.messages is not None:
            chat = ChatRequest(
                messages=request.messages,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                chat_template_kwargs=request.chat_template_kwargs,
                tools=request.tools,
                tool_choice=request.tool_choice,
                reasoning_effort=request.reasoning_effort,
            )
            text = self._intake.chat_text(chat, read_tools(chat))
        special = request.messages is None if special is None else special  # a template writes bos itself
        ids = await self._encode(text or "", special)
        answer: Json = {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids}
        if request.return_token_strs:
            answer["token_strs"] = [self._tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
        return answer

    async def detokenize(self, body: Json) -> Json:
        """The text of token ids, special tokens included."""
        request = parse(DetokenizeRequest, body)
        self._intake.check_model(request.model)
        for token_id in request.tokens:
            if not 0 <= token_id < self._tokenizer.vocab_size:
                most = self._tokenizer.vocab_size - 1
                raise bad_request(f"tokens holds the id {token_id}: this tokenizer's are from 0 to {most}", "tokens")
        decode = self._tokenizer.decode
        return {"prompt": await asyncio.to_thread(decode, request.tokens, skip_special_tokens=False)}

    def info(self) -> Json:
        """What tokenizer_config.json says, and sizes."""
        known: dict[str, Any] = {"vocab_size": self._tokenizer.vocab_size, "max_model_len": self._max_model_len}
        return {**self._tokenizer.config, **self._tokenizer.special_tokens, **known}

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encode = self._tokenizer.encode
        try:
            if len(text) < _LONG_TEXT:
                return encode(text, add_special_tokens=add_special_tokens)
            return await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens)
        except TokenizerError as error:
            raise bad_request(str(error), "prompt") from None
