"""One choice of an answer: a sequence's tokens turned into its parts, scores and a finish reason."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from serve.api.errors import ApiError
from serve.api.prompts import Prompt
from serve.detokenizer import make_detokenizer
from serve.driver.messages import RequestDelta
from serve.parsers.output import OutputParser, Said, append
from serve.stop import StopChecker
from serve.tokenizer import Tokenizer
from workers.step import SamplingParams, TokenLogprobs


class TokenScore(NamedTuple):
    """A token with its log-probabilities (None for a prompt's first) and where its text begins in the choice's text."""

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int
    inside: Literal["content", "reasoning", "calls"] = "content"  # what the token is part of


class Piece(NamedTuple):
    """What a choice has gained since it was last asked."""

    parts: list[Said]
    scores: list[TokenScore]

    def text(self, kind: str = "content") -> str:
        """All parts of one kind joined."""
        return "".join(said.text for said in self.parts if said.kind == kind)


@dataclass(frozen=True)
class Echo:
    """The prompt comes before the answer; `prompt_only` drops the answer (max_tokens 0, used for scoring)."""

    prompt: Prompt
    prompt_only: bool


@dataclass(frozen=True)
class Turn:
    """The answer is an assistant's turn: `parser` tells its parts apart, and needs to see the special tokens `keep`."""

    parser: OutputParser
    keep: frozenset[int] = frozenset()
    with_reasoning: bool = True  # whether the reasoning is shown


class Choice:
    """Takes tokens one by one, so that text, count and scores do not depend on how the engine grouped them.

    A token that ends the sequence (eos, stop_token_ids) counts and is scored but has no text, unless
    include_stop_str_in_output. Tokens after a stop string are dropped: the caller aborts the sequence once
    `finish_reason` is set. Stop strings are looked for in the answer alone, not in reasoning or calls of tools, and not
    in the first `min_tokens` tokens.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        echo: Echo | None = None,
        turn: Turn | None = None,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_reasoning_tokens = 0  # of them, those that the model thought with
        self.num_cached_tokens = 0
        self.num_drafted = 0  # tokens drafted for this choice
        self.num_accepted = 0  # of them, those that became part of it
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._params = params
        self._echo = echo
        self._turn = turn
        self._detokenizer = make_detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            keep=frozenset() if turn is None else turn.keep,
        )
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output)
        self._parts: list[Said] = []  # not yet taken
        self._scores: list[TokenScore] = []  # not yet taken
        self._offset = 0  # length of the text decoded so far
        self._prompt_scores: dict[int, TokenLogprobs] = {}  # by position; a preempted prompt is scored again

    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, delta: RequestDelta) -> None:
        """Raises ApiError (500) when the engine gave this sequence up."""
        if delta.finish_reason == "error":
            message = delta.error or "The engine could not run this request."
            raise ApiError(500, message, "server_error", code="engine_error")
        self.num_cached_tokens = self.num_cached_tokens or delta.num_cached_tokens
        for scores in delta.prompt_scores:
            self._prompt_scores |= {scores.start + row + 1: one for row, one in enumerate(scores.logprobs)}
        if delta.token_ids and self._echo is not None:
            self._show_prompt(self._echo.prompt)
            if self._echo.prompt_only:
                self.finish_reason = "length"
                return
            self._echo = None
        self.num_drafted += delta.num_drafted
        last = len(delta.token_ids) - 1
        for position, token_id in enumerate(delta.token_ids):
            hidden = position == last and delta.stop_token_id is not None
            score = delta.logprobs[position] if delta.logprobs else None
            self.num_accepted += position < delta.num_accepted
            self._add_token(token_id, score, shown=not hidden or self._params.include_stop_str_in_output)
            if self.finish_reason:
                return
        if delta.finish_reason:
            self._finish(delta.finish_reason)

    def take(self) -> Piece:
        """Scores wait for the text that follows them, or for the end, so that both stay together."""
        if not self._parts and not self.finish_reason:
            return Piece([], [])
        piece = Piece(self._parts, self._scores)
        self._parts, self._scores = [], []
        return piece

    def _add_token(self, token_id: int, score: TokenLogprobs | None, *, shown: bool) -> None:
        self.num_tokens += 1
        offset, thought = self._offset, self._thinks
        if shown:
            self._add_text(self._detokenizer.add(token_id), searched=self.num_tokens > self._params.min_tokens)
        thought = thought or self._thinks
        self.num_reasoning_tokens += thought
        if self._params.logprobs is not None:
            calls = self._turn is not None and self._turn.parser.calls
            inside: Literal["content", "reasoning", "calls"] = (
                "reasoning" if thought else "calls" if calls else "content"
            )
            self._scores.append(TokenScore(token_id, score, offset, inside))

    @property
    def _thinks(self) -> bool:
        return self._turn is not None and self._turn.parser.thinks

    def _add_text(self, text: str, *, searched: bool) -> None:
        self._offset += len(text)
        if self._turn is None:
            self._take_in([Said("content", text)], searched=searched)
        elif text:
            self._take_in(self._turn.parser.add(text), searched=searched)

    def _take_in(self, parts: list[Said], *, searched: bool) -> None:
        for said in parts:
            if self._stop.matched:
                return
            if said.kind == "content":
                self._show(said._replace(text=self._stop.add(said.text) if searched else said.text))
            elif said.kind != "reasoning" or (self._turn is not None and self._turn.with_reasoning):
                self._show(Said("content", self._stop.flush()))
                self._show(said)
        if self._stop.matched:
            self._end("stop")

    def _show(self, said: Said) -> None:
        if said.text or said.kind == "call":
            append(self._parts, said)

    def _finish(self, reason: str) -> None:
        self._add_text(self._detokenizer.flush(), searched=True)
        if self._turn is not None:
            self._take_in(self._turn.parser.finish(), searched=True)
        self._show(Said("content", self._stop.flush()))
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self.finish_reason is None:
            called = reason == "stop" and self._turn is not None and self._turn.parser.has_calls
            self.finish_reason = "tool_calls" if called else reason

    def _show_prompt(self, prompt: Prompt) -> None:
        detokenizer = make_detokenizer(self._tokenizer, skip_special_tokens=self._params.skip_special_tokens)
        text = ""
        for position, token_id in enumerate(prompt.token_ids):
            if self._params.prompt_logprobs is not None:
                self._scores.append(TokenScore(token_id, self._prompt_scores.get(position), len(text)))
            text += detokenizer.add(token_id)
        text += detokenizer.flush()
        text = text if prompt.text is None else prompt.text
        self._show(Said("content", text))
        self._offset = len(text)
