"""A validated request, ready to run."""

from dataclasses import dataclass

from serve.api.caller import Caller
from serve.api.choice import Choice
from serve.api.prompts import Prompt
from serve.api.shapes import Json, usage
from workers.step import SamplingParams


@dataclass(frozen=True)
class Job:
    """Choice i belongs to prompt i // n; all lists are in order of the choices' indices."""

    id: str  # as the client sees it; the engine's ids are `id-index`
    created: int  # Unix seconds
    model: str
    prompts: list[Prompt]
    n: int
    params: list[SamplingParams]
    choices: list[Choice]
    priority: int
    cache_salt: str
    top_logprobs: int | None  # None = no log-probabilities wanted
    include_usage: bool
    continuous_usage: bool
    caller: Caller

    def prompt(self, index: int) -> Prompt:
        return self.prompts[index // self.n]

    def head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, kind: str, choice: Json) -> Json:
        """A streamed chunk. OpenAI sends `usage: null` in all but the last where usage was asked for."""
        chunk = self.head(kind) | {"choices": [choice]}
        if self.include_usage:
            chunk["usage"] = self.usage() if self.continuous_usage else None
        return chunk

    def usage(self) -> Json:
        """So far. A prompt counts once, whatever n; what its first choice found in the cache is what was saved."""
        return usage(
            sum(len(prompt.token_ids) for prompt in self.prompts),
            sum(choice.num_tokens for choice in self.choices),
            sum(choice.num_cached_tokens for choice in self.choices[:: self.n]),
            sum(choice.num_drafted for choice in self.choices),
            sum(choice.num_accepted for choice in self.choices),
            sum(choice.num_reasoning_tokens for choice in self.choices),
        )
