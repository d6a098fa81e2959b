"""SamplingParams of a request, with the checkpoint's own defaults."""

from pathlib import Path
from typing import Any

from serve.api.errors import bad_request
from serve.api.protocol import GenerationRequest
from serve.tokenizer import read_optional_json
from workers.step import SamplingParams

_FROM_CHECKPOINT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def checkpoint_defaults(folder: Path) -> dict[str, float]:
    """What generation_config.json says of temperature, top_p, top_k, min_p and repetition_penalty.

    A request that leaves one of them out gets this value, as in vLLM; where the file says nothing, OpenAI's default.
    """
    config = read_optional_json(folder / "generation_config.json")
    return {name: config[name] for name in _FROM_CHECKPOINT if config.get(name) is not None}


def sampling_params(
    request: GenerationRequest,
    defaults: dict[str, float],
    *,
    choice: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    vocab_size: int,
    grammar: str = "",
) -> SamplingParams:
    """For choice 0, 1, ... of a prompt: choice i of a seeded request uses seed + i, or all n would be the same text.

    Raises ApiError (400) naming the parameter.
    """
    chosen: dict[str, Any] = dict(defaults)
    for name in _FROM_CHECKPOINT:
        if (value := getattr(request, name)) is not None:
            chosen[name] = value
    try:
        return SamplingParams(
            **chosen,
            seed=None if request.seed is None else request.seed + choice,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=_logit_bias(request.logit_bias, vocab_size),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            stop_token_ids=_stop_ids(request.stop_token_ids, vocab_size),
            stop=tuple(request.stop),
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            grammar=grammar,
        )
    except ValueError as error:
        message = str(error)
        raise bad_request(message, message.split(maxsplit=1)[0].split("[")[0]) from None


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not key.isdecimal() or int(key) >= vocab_size:
            message = f"logit_bias has the key {key!r}: it must be a token id below {vocab_size}"
            raise bad_request(message, "logit_bias")
        bias[int(key)] = value
    return bias


def _stop_ids(given: list[int], vocab_size: int) -> tuple[int, ...]:
    for token_id in given:
        if not 0 <= token_id < vocab_size:
            raise bad_request(f"stop_token_ids has {token_id}: ids are from 0 to {vocab_size - 1}", "stop_token_ids")
    return tuple(given)
