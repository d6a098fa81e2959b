"""Offline use, without Ray Serve: the same driver and workers, in local processes.

with LLM("examples/tiny-model", tp=2) as llm:
    for completion in llm.generate(["In the beginning"], SamplingParams(temperature=0, max_tokens=20)):
        print(completion.text)
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
from pydantic import ValidationError

from configs.base import ConfigError, explain
from configs.engine import EngineConfig, ParallelConfig
from serve.api.choice import Choice
from serve.driver.messages import StartupProgress
from serve.engine import AsyncEngine
from serve.hosting import EnginePlan, LocalHost
from serve.tokenizer import Tokenizer
from workers.step import PromptScores, SamplingParams, TokenLogprobs

T = TypeVar("T")
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt."""

    index: int  # of the prompt in the call
    prompt_token_ids: list[int]
    token_ids: list[int]  # a token that ended the sequence included
    text: str  # without that token; empty when the checkpoint has no tokenizer
    finish_reason: str  # "stop" | "length"
    logprobs: list[TokenLogprobs]
    num_cached_tokens: int
    num_drafted: int  # tokens that were drafted for it
    num_accepted: int  # of them, those that became part of it


class LLM:
    """An engine with `tp` local workers. Close it (or use it as a context manager) to end them.

    `settings` are fields of EngineConfig. Raises ConfigError for settings that cannot work, before anything starts,
    and EngineDeadError when the workers cannot start.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tp: int = 1,
        ep: int = 1,
        on_progress: Callable[[StartupProgress], None] = lambda progress: None,
        **settings: Any,
    ) -> None:
        try:
            parallel = ParallelConfig(tp_size=tp, ep_size=ep)
            config = EngineConfig(model=Path(model), parallel=parallel, **settings)
        except ValidationError as error:
            raise ConfigError(explain(error, where="LLM")) from None
        self.plan = EnginePlan.make(config)
        self.tokenizer = Tokenizer(config.model) if (config.model / "tokenizer.json").is_file() else None
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="shoal-llm", daemon=True)
        self._thread.start()
        try:
            self._engine = self._run(AsyncEngine.start(self.plan, LocalHost, on_progress)).result()
        except BaseException:
            self._stop_loop()
            raise

    @property
    def engine(self) -> AsyncEngine:
        """The engine, for its `started` figures and `stats`; its methods belong to the LLM's own event loop."""
        return self._engine

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> list[Completion]:
        """Answers all prompts (texts or token ids) together; results in the prompts' order. See `submit`."""
        return [future.result() for future in self.submit(prompts, params)]

    def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = SamplingParams()
    ) -> list[Future[Completion]]:
        """Starts all prompts and returns their futures. Nothing is started if any prompt is unusable: ValueError.

        max_tokens is cut to what the context leaves.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} SamplingParams: give one, or one for each")
        ids = [self._token_ids(prompt, i) for i, prompt in enumerate(prompts)]
        cut = [self._cut(p, len(token_ids)) for p, token_ids in zip(each, ids, strict=True)]
        return [
            self._run(self._complete(i, token_ids, p)) for i, (token_ids, p) in enumerate(zip(ids, cut, strict=True))
        ]

    def logits(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Teacher-forced logits of every prompt position, one prompt at a time: float32 [len, vocab] each."""
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logits=True, ignore_eos=True)
        ids = [self._token_ids(prompt, i) for i, prompt in enumerate(prompts)]
        return [self._run(self._score(token_ids, params)).result() for token_ids in ids]

    def close(self) -> None:
        """Ends the workers; further calls fail."""
        if self._thread.is_alive():
            self._run(self._engine.stop()).result()
            self._stop_loop()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _cut(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        left = self.plan.max_model_len - num_prompt
        if params.max_tokens <= left:
            return params
        return msgspec.structs.replace(params, max_tokens=left, min_tokens=min(params.min_tokens, left))

    def _token_ids(self, prompt: Prompt, index: int) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"{self.plan.config.model} has no tokenizer.json: give token ids instead of text")
            ids = self.tokenizer.encode(prompt, add_special_tokens=True)
        else:
            ids = list(prompt)
        if not 0 < len(ids) < self.plan.max_model_len:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens: 1 to {self.plan.max_model_len - 1} leave room for an answer"
            )
        vocab = self.plan.model.vocab_size
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < vocab:
                raise ValueError(f"prompt {index} holds {token_id!r}: token ids are integers from 0 to {vocab - 1}")
        return ids

    async def _complete(self, index: int, token_ids: list[int], params: SamplingParams) -> Completion:
        choice = Choice(index, self.tokenizer, params) if self.tokenizer is not None else None
        output: list[int] = []
        num_drafted = num_accepted = 0
        logprobs: list[TokenLogprobs] = []
        text, finish_reason, cached = "", "", 0
        stream = self._engine.generate(token_ids, params, request_id=f"offline-{next(self._ids)}")
        try:
            async for delta in stream:
                if delta.error is not None:
                    raise RuntimeError(delta.error)
                output += delta.token_ids
                num_drafted += delta.num_drafted
                num_accepted += delta.num_accepted
                logprobs += delta.logprobs
                cached = cached or delta.num_cached_tokens
                finish_reason = delta.finish_reason or finish_reason
                if choice is not None:
                    choice.add(delta)
                    text += choice.take().text()
                    if choice.finish_reason is not None:
                        output, finish_reason = output[: choice.num_tokens], choice.finish_reason
                        break
        finally:
            await stream.aclose()
        scores = logprobs[: len(output)]
        return Completion(index, token_ids, output, text, finish_reason, scores, cached, num_drafted, num_accepted)

    async def _score(self, token_ids: list[int], params: SamplingParams) -> np.ndarray:
        parts: list[PromptScores] = []
        async for delta in self._engine.generate(token_ids, params, request_id=f"offline-{next(self._ids)}"):
            if delta.error is not None:
                raise RuntimeError(delta.error)
            parts += delta.prompt_scores
        vocab = self.plan.model.vocab_size
        result = np.empty((len(token_ids), vocab), dtype=np.float32)
        for part in parts:
            rows = np.frombuffer(part.logits, dtype="<f4").reshape(-1, vocab)
            result[part.start : part.start + len(rows)] = rows
        return result
