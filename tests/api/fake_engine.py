"""An engine that says what a script tells it to, with an engine's rules for stop ids, min_tokens and max_tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from serve.driver.messages import EngineStats, RequestDelta
from serve.tokenizer import Tokenizer
from workers.step import PromptScores, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Script:
    """What one sequence says. `fail_after` deltas it raises `error`; after `pause_after` it waits for the engine's
    `resume`. `cut` tokens make a delta (0 = all)."""

    token_ids: list[int]
    cut: int = 1
    fail_after: int | None = None
    error: Exception = field(default_factory=lambda: RuntimeError("secret detail"))
    pause_after: int | None = None
    cached: int = 0
    rejected: int = (
        0  # drafts of each delta that were not accepted; with any, all tokens but a delta's last were drafts
    )


@dataclass(frozen=True)
class Call:
    token_ids: list[int]
    params: SamplingParams
    request_id: str
    priority: int
    cache_salt: str
    tenant: str


def fake_logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The token itself is the most likely one; its neighbours follow."""
    first = -0.1 - (token_id % 13) / 8
    return TokenLogprobs(first, [token_id + i for i in range(count)], [first - i for i in range(count)])


class FakeEngine:
    max_model_len = 128

    def __init__(self, tokenizer: Tokenizer, script_of: Callable[[Call], Script]) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.eos_token_ids = (1,)
        self.calls: list[Call] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.resume = asyncio.Event()
        self.dead: str | None = None
        self.stats: EngineStats | None = None
        self.stalled_s = 0.0
        self._script_of = script_of

    async def generate(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
    ) -> AsyncIterator[RequestDelta]:
        call = Call(token_ids, params, request_id, priority, cache_salt, tenant)
        self.calls.append(call)
        self.running.add(request_id)
        ended = False
        try:
            script = self._script_of(call)
            for number, delta in enumerate(self._deltas(call, script)):
                if number == script.fail_after:
                    ended = True
                    raise script.error
                if number == script.pause_after:
                    await self.resume.wait()
                ended = delta.finish_reason is not None
                yield delta
                await asyncio.sleep(0)
        finally:
            self.running.discard(request_id)
            if not ended:
                self.aborted.append(request_id)

    def _deltas(self, call: Call, script: Script) -> list[RequestDelta]:
        tokens, reason, stop_id = self._run(call.params, script.token_ids)
        first = RequestDelta(call.request_id, [], prompt_scores=_prompt_scores(call), num_cached_tokens=script.cached)
        cut = script.cut or len(tokens)
        deltas = [first]
        for start in range(0, len(tokens), cut):
            some = tokens[start : start + cut]
            count = call.params.logprobs
            logprobs = [] if count is None else [fake_logprobs(t, count) for t in some]
            last = start + cut >= len(tokens)
            deltas.append(
                RequestDelta(
                    call.request_id,
                    some,
                    finish_reason=reason if last else None,
                    stop_token_id=stop_id if last else None,
                    logprobs=logprobs,
                    num_drafted=len(some) - 1 + script.rejected if script.rejected else 0,
                    num_accepted=len(some) - 1 if script.rejected else 0,
                )
            )
        return deltas

    def _run(self, params: SamplingParams, script: list[int]) -> tuple[list[int], str, int | None]:
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        tokens: list[int] = []
        for token in script:
            if token in stop_ids and len(tokens) < params.min_tokens:
                continue  # masked
            tokens.append(token)
            if token in stop_ids:
                return tokens, "stop", token
            if len(tokens) == params.max_tokens:
                return tokens, "length", None
        return tokens, "length", None  # the end of the script


def _prompt_scores(call: Call) -> list[PromptScores]:
    """In two chunks, as a chunked prefill would send them."""
    count = call.params.prompt_logprobs
    if count is None:
        return []
    rows = [fake_logprobs(token, count) for token in call.token_ids[1:]]
    half = len(rows) // 2
    return [PromptScores(0, 0, rows[:half], b""), PromptScores(0, half, rows[half:], b"")]
