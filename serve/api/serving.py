"""OpenAI's chat and completions over an engine: dicts in, dicts out. HTTP routes and deployment handles share it."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from serve.api.admission import Admission, Ticket
from serve.api.auth import ApiKeys
from serve.api.caller import Caller
from serve.api.choice import Piece
from serve.api.engine_protocol import Engine
from serve.api.intake import Intake
from serve.api.job import Job
from serve.api.logprobs import chat_logprobs, completion_logprobs
from serve.api.protocol import ChatRequest, CompletionRequest, parse
from serve.api.responses.serving import ResponsesCalls
from serve.api.running import JobRunner
from serve.api.shapes import Json, chat_choice, chat_delta, delta_of, model_card, text_choice
from serve.api.tokens import TokenCalls
from serve.chat_template import ChatFormat
from serve.metrics import EngineMetrics
from serve.parsers.detect import OutputFormat
from serve.parsers.output import Said
from serve.tokenizer import Tokenizer

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
        self.api_keys = api_keys
        self.model_name = model_name
        self.metrics = EngineMetrics(model_name)
        self.runner = JobRunner(engine, self.metrics, admission or Admission(), timeout_s, stall_s)
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
        self.responses = ResponsesCalls(self._intake, self.runner, tokenizer)
        self.tokens = TokenCalls(tokenizer, self._intake, engine.max_model_len)

    def models(self) -> Json:
        return {"object": "list", "data": [self.model(self.model_name)]}

    def model(self, name: str) -> Json:
        self._intake.check_model(name)
        return model_card(name, self._created, self.engine.max_model_len)

    def render_metrics(self) -> bytes:
        return self.metrics.render(self.engine.stats)

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
        return self._chat_events(job, self.runner.enter(job))

    async def open_completions(self, body: Json, caller: Caller = Caller()) -> Events:
        """completions_stream in two steps: a bad request fails here, before the stream begins."""
        job = await self._intake.completion(parse(CompletionRequest, body), caller)
        return self._completion_events(job, self.runner.enter(job))

    # --------------------------------------------------------------------------------------------------- streaming

    async def _chat_events(self, job: Job, ticket: Ticket) -> Events:
        kind = "chat.completion.chunk"
        greeted: set[int] = set()
        async with aclosing(self.runner.run(job, ticket)) as changes:
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
        async with aclosing(self.runner.run(job, ticket)) as changes:
            async for choice in changes:
                piece = choice.take()
                if piece.parts or piece.scores:
                    yield job.chunk(kind, text_choice(choice.index, piece.text(), self._text_scores(job, piece), None))
                if choice.finish_reason:
                    yield job.chunk(kind, text_choice(choice.index, "", None, choice.finish_reason))
        if job.include_usage:
            yield job.head(kind) | {"choices": [], "usage": job.usage()}

    async def _collect(self, job: Job) -> list[Piece]:
        await self.runner.run_all(job)
        return [choice.take() for choice in job.choices]

    def _chat_scores(self, job: Job, piece: Piece) -> Json | None:
        return None if job.top_logprobs is None else chat_logprobs(self._tokenizer, piece.scores, job.top_logprobs)

    def _text_scores(self, job: Job, piece: Piece) -> Json | None:
        return None if job.top_logprobs is None else completion_logprobs(self._tokenizer, piece.scores)
