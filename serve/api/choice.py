"""One choice of an answer: a sequence's tokens turned into text, scores and a finish reason."""

from dataclasses import dataclass
from typing import NamedTuple

from serve.api.errors import ApiError
from serve.api.prompts import Prompt
from serve.detokenizer import make_detokenizer
from serve.driver.messages import RequestDelta
from serve.stop import StopChecker
from serve.tokenizer import Tokenizer
from workers.step import SamplingParams, TokenLogprobs


class TokenScore(NamedTuple):
    """A token with its log-probabilities (None for a prompt's first) and where its text begins in the choice's text."""

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int


class Piece(NamedTuple):
    """What a choice has gained since it was last asked."""

    text: str
    scores: list[TokenScore]


@dataclass(frozen=True)
class Echo:
    """The prompt comes before the answer; `prompt_only` drops the answer (max_tokens 0, used for scoring)."""

    prompt: Prompt
    prompt_only: bool


class Choice:
    """Takes tokens one by one, so that text, count and scores do not depend on how the engine grouped them.

    A token that ends the sequence (eos, stop_token_ids) counts and is scored but has no text, unless
    include_stop_str_in_output. Tokens after a stop string are dropped: the caller aborts the sequence once
    `finish_reason` is set. The first `min_tokens` tokens are not searched for stop strings.
    """

    def __init__(self, index: int, tokenizer: Tokenizer, params: SamplingParams, echo: Echo | None = None) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_drafted = 0  # tokens drafted for this choice
        self.num_accepted = 0  # of them, those that became part of it
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._params = params
        self._echo = echo
        self._detokenizer = make_detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output)
        self._text = ""  # not yet taken
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
        if not self._text and not self.finish_reason:
            return Piece("", [])
        piece = Piece(self._text, self._scores)
        self._text, self._scores = "", []
        return piece

    def _add_token(self, token_id: int, score: TokenLogprobs | None, *, shown: bool) -> None:
        self.num_tokens += 1
        if self._params.logprobs is not None:
            self._scores.append(TokenScore(token_id, score, self._offset))
        if shown:
            self._add_text(self._detokenizer.add(token_id), searched=self.num_tokens > self._params.min_tokens)

    def _add_text(self, text: str, *, searched: bool) -> None:
        self._offset += len(text)
        self._text += self._stop.add(text) if searched else text
        if self._stop.matched:
            self.finish_reason = "stop"

    def _finish(self, reason: str) -> None:
        self._add_text(self._detokenizer.flush(), searched=True)
        self._text += self._stop.flush()
        self.finish_reason = self.finish_reason or reason

    def _show_prompt(self, prompt: Prompt) -> None:
        detokenizer = make_detokenizer(self._tokenizer, skip_special_tokens=self._params.skip_special_tokens)
        text = ""
        for position, token_id in enumerate(prompt.token_ids):
            if self._params.prompt_logprobs is not None:
                self._scores.append(TokenScore(token_id, self._prompt_scores.get(position), len(text)))
            text += detokenizer.add(token_id)
        text += detokenizer.flush()
        self._text += text if prompt.text is None else prompt.text
        self._offset = len(self._text)
