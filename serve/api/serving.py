"""OpenAI's chat and completions over an engine: dicts in, dicts out. HTTP routes and deployment handles share it."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from serve.api.admission import Admission, Ticket
from serve.api.auth import ApiKeys
from serve.api.caller import Caller, Lease
from serve.api.choice import Choice, Piece
from serve.api.engine_protocol import Engine
from serve.api.errors import ApiError, client_gone, draining, engine_dead, engine_stalled, request_timeout, to_api_error
from serve.api.fanout import Fanout
from serve.api.intake import Intake
from serve.api.job import Job
from serve.api.logprobs import chat_logprobs, completion_logprobs
from serve.api.protocol import ChatRequest, CompletionRequest, parse
from serve.api.shapes import Json, chat_choice, chat_delta, delta_of, model_card, text_choice
from serve.api.tokens import TokenCalls
from serve.chat_template import ChatFormat
from serve.driver.messages import RequestDelta
from serve.metrics import EngineMetrics, SequenceTimer
from serve.parsers.detect import OutputFormat
from serve.parsers.output import Said
from serve.tokenizer import Tokenizer

logger = logging.getLogger("ray.serve")  # whose records bear X-Request-Id

_DRAIN_POLL_S = 0.05

Events = AsyncGenerator[Json, None]


class OpenAIServing:
    """`sampling_defaults` are the checkpoint's (see `checkpoint_defaults`); `chat_template` None refuses chat.

    Temperature, top_p, top_k, min_p and repetition_penalty that a request leaves out come from these defaults, as in
    vLLM. All calls raise ApiError and nothing else; cancelling a call, or closing a stream, aborts its sequences.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        chat_template: ChatFormat | None,
        model_name: str,
        sampling_defaults: dict[str, float] | None = None,
        output_format: OutputFormat = OutputFormat(),
        api_keys: ApiKeys = ApiKeys(),
        admission: Admission | None = None,
        timeout_s: float | None = None,
        stall_s: float = 60.0,
        keep_alive_s: float = 15.0,
        cors_allow_origins: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        self.keep_alive_s = keep_alive_s
        self.cors_allow_origins = cors_allow_origins
        self._draining = False
        self._timeout_s = timeout_s
        self._stall_s = stall_s
        self._admission = admission or Admission()
        self.api_keys = api_keys
        self.model_name = model_name
        self.metrics = EngineMetrics(model_name)
        self._tokenizer = tokenizer
        self._created = int(time.time())
        defaults = sampling_defaults or {}
        self._intake = Intake(
            tokenizer,
            chat_template,
            output_format,
            model_name,
            defaults,
            engine.max_model_len,
            engine.vocab_size,
            can_end=bool(engine.eos_token_ids),
        )
        self.tokens = TokenCalls(tokenizer, self._intake, engine.max_model_len)

    def models(self) -> Json:
        return {"object": "list", "data": [self.model(self.model_name)]}

    def model(self, name: str) -> Json:
        self._intake.check_model(name)
        return model_card(name, self._created, self.engine.max_model_len)

    def render_metrics(self) -> bytes:
        return self.metrics.render(self.engine.stats)

    def check_alive(self) -> None:
        """Raises ApiError (503) once the engine is gone."""
        if self.engine.dead is not None:
            raise engine_dead()

    def check_progress(self) -> None:
        """For health checks: raises ApiError (503) once the engine is gone, while the server drains, or when requests
        are pending and no step has ended for too long. A busy engine, however many wait, is well."""
        self.check_alive()
        if self._draining:
            raise draining()
        if self.engine.stalled_s > self._stall_s:
            raise engine_stalled(self._stall_s)

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests from now on, and waits for those in progress; returns whether all have ended in time."""
        self._draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._admission.num_sequences and loop.time() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        return not self._admission.num_sequences

    async def chat(self, body: Json, caller: Caller = Caller()) -> Json:
        job = await self._intake.chat(parse(ChatRequest, body), caller)
        pieces = await self._collect(job)
        choices = [
            chat_choice(choice.index, piece, self._chat_scores(job, piece), choice.finish_reason)
            for choice, piece in zip(job.choices, pieces, strict=True)
        ]
        return job.head("chat.completion") | {"choices": choices, "usage": job.usage()}

    async def completions(self, body: Json, caller: Caller = Caller()) -> Json:
        job = await self._intake.completion(parse(CompletionRequest, body), caller)
        pieces = await self._collect(job)
        choices = [
            text_choice(choice.index, piece.text(), self._text_scores(job, piece), choice.finish_reason)
            for choice, piece in zip(job.choices, pieces, strict=True)
        ]
        return job.head("text_completion") | {"choices": choices, "usage": job.usage()}

    async def chat_stream(self, body: Json, caller: Caller = Caller()) -> Events:
        """The chunks of a streamed answer; the body need not say `stream`."""
        async with aclosing(await self.open_chat({**body, "stream": True}, caller)) as events:
            async for event in events:
                yield event

    async def completions_stream(self, body: Json, caller: Caller = Caller()) -> Events:
        """The chunks of a streamed answer; the body need not say `stream`."""
        async with aclosing(await self.open_completions({**body, "stream": True}, caller)) as events:
            async for event in events:
                yield event

    async def open_chat(self, body: Json, caller: Caller = Caller()) -> Events:
        """chat_stream in two steps: a bad request fails here, before the stream begins."""
        job = await self._intake.chat(parse(ChatRequest, body), caller)
        return self._chat_events(job, self._enter(job))

    async def open_completions(self, body: Json, caller: Caller = Caller()) -> Events:
        """completions_stream in two steps: a bad request fails here, before the stream begins."""
        job = await self._intake.completion(parse(CompletionRequest, body), caller)
        return self._completion_events(job, self._enter(job))

    def _enter(self, job: Job) -> Ticket:
        """Raises ApiError: 503 when the engine is gone or the server drains, 429 when it is full."""
        self.check_alive()
        if self._draining:
            raise draining()
        prompts = [len(job.prompt(index).token_ids) for index in range(len(job.choices))]
        try:
            return self._admission.enter(prompts, job.caller.tenant)
        except ApiError:
            self.metrics.refused.inc()
            raise

    # --------------------------------------------------------------------------------------------------- streaming

    async def _chat_events(self, job: Job, ticket: Ticket) -> Events:
        kind = "chat.completion.chunk"
        greeted: set[int] = set()
        async with aclosing(self._run(job, ticket)) as changes:
            async for choice in changes:
                piece = choice.take()
                parts, scores = piece.parts, self._chat_scores(job, piece)
                if not parts and (piece.scores or (choice.finish_reason and choice.index not in greeted)):
                    parts = [Said("content", "")]
                for said in parts:
                    delta = delta_of(said)
                    if choice.index not in greeted:
                        greeted.add(choice.index)
                        delta = {"role": "assistant"} | delta
                    yield job.chunk(kind, chat_delta(choice.index, delta, scores, None))
                    scores = None
                if choice.finish_reason:
                    yield job.chunk(kind, chat_delta(choice.index, {}, None, choice.finish_reason))
        if job.include_usage:
            yield job.head(kind) | {"choices": [], "usage": job.usage()}

    async def _completion_events(self, job: Job, ticket: Ticket) -> Events:
        kind = "text_completion"
        async with aclosing(self._run(job, ticket)) as changes:
            async for choice in changes:
                piece = choice.take()
                if piece.parts or piece.scores:
                    yield job.chunk(kind, text_choice(choice.index, piece.text(), self._text_scores(job, piece), None))
                if choice.finish_reason:
                    yield job.chunk(kind, text_choice(choice.index, "", None, choice.finish_reason))
        if job.include_usage:
            yield job.head(kind) | {"choices": [], "usage": job.usage()}

    async def _collect(self, job: Job) -> list[Piece]:
        async with aclosing(self._run(job, self._enter(job))) as changes:
            async for _ in changes:
                pass
        return [choice.take() for choice in job.choices]

    # ----------------------------------------------------------------------------------------------------- running

    async def _run(self, job: Job, ticket: Ticket) -> AsyncGenerator[Choice, None]:
        """Runs the job's sequences; yields a choice whenever it has changed, the last time with a finish reason."""
        timers = [SequenceTimer(self.metrics) for _ in job.choices]
        begin = asyncio.get_running_loop().time()
        deadline = math.inf if self._timeout_s is None else begin + self._timeout_s
        ended = "abort"
        try:
            async with Fanout([self._generate(job, index) for index in range(len(job.choices))]) as fanout:
                left = len(job.choices)
                while left:
                    changed = self._take_in(job, await self._next(fanout, deadline, job.caller.lease), timers)
                    for choice in changed:
                        ticket.begun(choice.index)
                        if choice.finish_reason:
                            fanout.stop(choice.index)
                            left -= 1
                    for choice in changed:
                        yield choice
        except Exception as error:
            ended = "error"
            raise to_api_error(error) from None
        finally:
            ticket.leave()
            self._log(job, asyncio.get_running_loop().time() - begin)
            for timer in timers:
                timer.finish(ended)

    async def _next(self, fanout: Fanout, deadline: float, lease: Lease | None) -> list[tuple[int, RequestDelta]]:
        """Raises ApiError past the deadline (504), a time of the event loop, and for a client that is gone (408)."""
        now = asyncio.get_running_loop().time
        while True:
            expires = math.inf if lease is None else lease.expires
            try:
                async with asyncio.timeout_at(None if (end := min(deadline, expires)) == math.inf else end):
                    return await fanout.batch()
            except TimeoutError:
                if now() >= deadline and self._timeout_s is not None:
                    raise request_timeout(self._timeout_s) from None
                if lease is not None and now() >= lease.expires:
                    raise client_gone() from None

    def _generate(self, job: Job, index: int) -> AsyncIterator[RequestDelta]:
        return self.engine.generate(
            job.prompt(index).token_ids,
            job.params[index],
            request_id=f"{job.id}-{index}",
            priority=job.priority,
            cache_salt=job.cache_salt,
            tenant=job.caller.tenant,
        )

    def _take_in(self, job: Job, batch: list[tuple[int, RequestDelta]], timers: list[SequenceTimer]) -> list[Choice]:
        """The choices that the deltas changed, each once: what arrived together leaves in one chunk."""
        changed: dict[int, Choice] = {}
        for index, delta in batch:
            choice = job.choices[index]
            if choice.is_finished():  # the engine was ahead of a stop string
                continue
            before = choice.num_tokens
            choice.add(delta)
            changed[index] = choice
            timers[index].add_tokens(choice.num_tokens - before)
            if choice.finish_reason:
                timers[index].finish(choice.finish_reason)
        return list(changed.values())

    def _log(self, job: Job, seconds: float) -> None:
        usage, reasons = job.usage(), ",".join(choice.finish_reason or "cut" for choice in job.choices)
        tokens = usage["prompt_tokens"], usage["completion_tokens"]
        logger.info("%s: %d tokens in, %d out, %s, %.3f s", job.id, *tokens, reasons, seconds)

    def _chat_scores(self, job: Job, piece: Piece) -> Json | None:
        return None if job.top_logprobs is None else chat_logprobs(self._tokenizer, piece.scores, job.top_logprobs)

    def _text_scores(self, job: Job, piece: Piece) -> Json | None:
        return None if job.top_logprobs is None else completion_logprobs(self._tokenizer, piece.scores)
