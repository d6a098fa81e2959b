"""A Responses answer as it grows: its items, and the events that tell of them."""

import time
import uuid
from collections.abc import Iterator

from serve.api.choice import Choice, Piece
from serve.api.errors import ApiError
from serve.api.job import Job
from serve.api.logprobs import chat_logprobs
from serve.api.responses.request import ResponsesRequest
from serve.api.shapes import Json
from serve.parsers.output import Said
from serve.tokenizer import Tokenizer


class Answer:
    """Takes in what a job's one choice has gained; every call yields events, whose `sequence_number` is in order."""

    def __init__(self, job: Job, request: ResponsesRequest, tokenizer: Tokenizer) -> None:
        self._job = job
        self._request = request
        self._tokenizer = tokenizer
        self._output: list[Json] = []
        self._open: Json | None = None  # the item that grows: the last of the output
        self._scores: list[Json] = []  # of the answer's tokens, not yet sent
        self._status = "in_progress"
        self._error: Json | None = None
        self._completed_at: int | None = None
        self._num_events = 0

    def begin(self) -> Iterator[Json]:
        yield self._event("response.created", response=self.response())
        yield self._event("response.in_progress", response=self.response())

    def add(self, piece: Piece) -> Iterator[Json]:
        if self._job.top_logprobs is not None:
            scores = [score for score in piece.scores if score.inside == "content"]
            self._scores += chat_logprobs(self._tokenizer, scores, self._job.top_logprobs)["content"]
        for said in piece.parts:
            yield from self._add(said)

    def finish(self, choice: Choice) -> Iterator[Json]:
        """The answer has ended as the choice says."""
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        if status == "completed" and all(item["type"] == "reasoning" for item in self._output):
            yield from self._add(Said("content", ""))
        yield from self._close(status)
        self._status = status
        self._completed_at = int(time.time()) if status == "completed" else None
        yield self._event(f"response.{status}", response=self.response())

    def fail(self, error: ApiError) -> Iterator[Json]:
        """The answer breaks off."""
        yield from self._close("incomplete")
        self._status = "failed"
        self._error = {"code": "server_error", "message": error.message}
        yield self._event("error", code=error.code, message=error.message, param=error.param)
        yield self._event("response.failed", response=self.response())

    def response(self) -> Json:
        """The Response object as it stands."""
        request, params = self._request, self._job.params[0]
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._job.created,
            "completed_at": self._completed_at,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": cut,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "model": self._job.model,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": request.text.format or {"type": "text"}, "verbosity": request.text.verbosity},
            "tool_choice": request.tool_choice or "auto",
            "tools": [_TOOL_DEFAULTS | tool for tool in request.tools],
            "top_logprobs": request.top_logprobs,
            "top_p": params.top_p,
            "truncation": request.truncation,
            "usage": None if self._status == "in_progress" else self._usage(),
            "user": request.user,
            "metadata": request.metadata,
        }

    # ------------------------------------------------------------------------------------------------------- items

    def _add(self, said: Said) -> Iterator[Json]:
        if said.kind == "call":
            yield from self._begin_item("function_call", call_id=said.id, name=said.text, arguments="")
        elif said.kind == "arguments":
            assert self._open is not None  # the call has begun
            self._open["arguments"] += said.text
            yield self._item_event("response.function_call_arguments.delta", delta=said.text)
        else:
            yield from self._add_text(said)

    def _add_text(self, said: Said) -> Iterator[Json]:
        kind, part_kind = _ITEMS[said.kind], _PARTS[said.kind]
        if self._open is None or self._open["type"] != kind:
            if kind == "message":
                yield from self._begin_item(kind, role="assistant", content=[])
            else:
                yield from self._begin_item(kind, summary=[], content=[], encrypted_content=None)
            yield self._part_event("response.content_part.added", part=_part(part_kind))
            self._item["content"] = [_part(part_kind)]
        part = self._item["content"][0]
        part["text"] += said.text
        told: Json = {"delta": said.text}
        if kind == "message":
            told["logprobs"], self._scores = self._scores, []
            part["logprobs"] += told["logprobs"]
        if said.text:
            yield self._part_event(f"response.{part_kind}.delta", **told)

    @property
    def _item(self) -> Json:
        assert self._open is not None
        return self._open

    def _begin_item(self, kind: str, **fields: object) -> Iterator[Json]:
        yield from self._close("completed")
        item = {"id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self._open = item
        self._output.append(item)
        yield self._output_event("response.output_item.added", item)

    def _close(self, status: str) -> Iterator[Json]:
        """Ends the item that grows, if there is one."""
        if self._open is None:
            return
        item = self._open
        item["status"] = status
        if item["type"] == "function_call":
            told: Json = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **told)
        else:
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"] += self._scores
                self._scores = []
            told = {key: part[key] for key in ("text", "logprobs") if key in part}
            yield self._part_event(f"response.{part['type']}.done", **told)
            yield self._part_event("response.content_part.done", part=dict(part))
        yield self._output_event("response.output_item.done", item)
        self._open = None

    # ------------------------------------------------------------------------------------------------------ events

    def _event(self, kind: str, **fields: object) -> Json:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _output_event(self, kind: str, item: Json) -> Json:
        return self._event(kind, output_index=len(self._output) - 1, item=dict(item))

    def _item_event(self, kind: str, **fields: object) -> Json:
        return self._event(kind, output_index=len(self._output) - 1, item_id=self._item["id"], **fields)

    def _part_event(self, kind: str, **fields: object) -> Json:
        return self._item_event(kind, content_index=0, **fields)

    def _usage(self) -> Json:
        usage = self._job.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"]
            | {"cache_write_tokens": 0},  # there is no price on it
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


_ITEMS = {"content": "message", "reasoning": "reasoning"}
_PARTS = {"content": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TOOL_DEFAULTS: Json = {"description": None, "parameters": None, "strict": False}


def _part(kind: str) -> Json:
    part: Json = {"type": kind, "text": ""}
    return part | {"annotations": [], "logprobs": []} if kind == "output_text" else part
