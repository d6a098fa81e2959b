"""/v1/responses over a runner: dicts in, dicts out."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from serve.api.admission import Ticket
from serve.api.caller import Caller
from serve.api.errors import ApiError, to_api_error
from serve.api.intake import Intake
from serve.api.job import Job
from serve.api.protocol import ChatRequest, parse
from serve.api.responses.output import Answer
from serve.api.responses.request import ResponsesRequest, in_these_words, read_request
from serve.api.running import JobRunner
from serve.api.shapes import Json
from serve.tokenizer import Tokenizer

Events = AsyncGenerator[Json, None]


class ResponsesCalls:
    """All calls raise ApiError and nothing else; cancelling a call, or closing a stream, aborts its sequence."""

    def __init__(self, intake: Intake, runner: JobRunner, tokenizer: Tokenizer) -> None:
        self._intake = intake
        self._runner = runner
        self._tokenizer = tokenizer

    async def create(self, body: Json, caller: Caller = Caller()) -> Json:
        """A Response object."""
        job, request = await self._read(body, caller)
        answer = Answer(job, request, self._tokenizer)
        async with aclosing(self._events(job, self._runner.enter(job), answer)) as events:
            async for _ in events:
                pass
        return answer.response()

    async def stream(self, body: Json, caller: Caller = Caller()) -> Events:
        """The events of a streamed answer; the body need not say `stream`. One that breaks off says so, then raises."""
        async with aclosing(await self.open({**body, "stream": True}, caller)) as events:
            async for event in events:
                yield event

    async def open(self, body: Json, caller: Caller = Caller()) -> Events:
        """`stream` in two steps: a bad request fails here, before the stream begins."""
        job, request = await self._read(body, caller)
        return self._events(job, self._runner.enter(job), Answer(job, request, self._tokenizer))

    async def _read(self, body: Json, caller: Caller) -> tuple[Job, ResponsesRequest]:
        request, chat = read_request(body)
        try:
            return await self._intake.chat(parse(ChatRequest, chat), caller, kind="resp_"), request
        except ApiError as error:
            raise in_these_words(error) from None

    async def _events(self, job: Job, ticket: Ticket, answer: Answer) -> Events:
        try:
            async with aclosing(self._runner.run(job, ticket)) as changes:
                for event in answer.begin():
                    yield event
                async for choice in changes:
                    for event in answer.add(choice.take()):
                        yield event
            for event in answer.finish(job.choices[0]):
                yield event
        except Exception as error:
            for event in answer.fail(to_api_error(error)):
                yield event
            raise
