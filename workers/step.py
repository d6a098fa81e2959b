"""The wire format between the driver and the workers, and the sampling parameters it carries.

Every message is a msgspec struct encoded with MessagePack. The driver broadcasts `ToWorker` messages to all ranks;
ranks push `FromWorker` messages back. Arrays are positional (`array_like`), so fields may only be appended.

Sequences live in *slots*: an index from admission to finish. Workers keep device tables indexed by slot, so a plan
carries only what changed and a steady decode step costs O(batch) bytes whatever the context length.
"""

from typing import Annotated

import msgspec

MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request's tokens are chosen. Defaults are those of OpenAI's and vLLM's APIs.

    Order of application: logit_bias, min_tokens (stop ids masked), repetition / frequency / presence penalties,
    grammar, temperature, then top_k, top_p and min_p on the resulting probabilities.

    Raises ValueError naming the field when a value is out of its range.
    """

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 or -1 = all
    min_p: float = 0.0  # [0, 1]
    seed: int | None = None
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    repetition_penalty: float = 1.0  # > 0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # alternatives to report beside the chosen token's; 0 = only the chosen token's
    prompt_logprobs: int | None = None  # the same for every prompt token (turns prefix reuse off for the request)
    prompt_logits: bool = False  # return raw fp32 logits of every prompt row (debugging and parity)
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # applied by the front end, which aborts the sequence
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: str = ""  # what the output must look like: a structural tag of xgrammar's, as JSON; "" = anything

    def __post_init__(self) -> None:
        check = _check_range
        check("temperature", self.temperature, 0.0, 100.0)
        check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check("top_k", self.top_k, -1, 2**31 - 1)
        check("min_p", self.min_p, 0.0, 1.0)
        check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        check("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.seed is not None:
            check("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check(name, value, 0, MAX_LOGPROBS)
        for token, bias in self.logit_bias.items():
            check(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if any(not s for s in self.stop):
            raise ValueError("stop must not contain an empty string")

    @property
    def needs_history(self) -> bool:
        """Whether the worker must be told the tokens so far when the sequence enters a slot."""
        return self.has_penalties or bool(self.grammar)

    @property
    def has_penalties(self) -> bool:
        """Whether the worker must know the tokens so far to process this request's logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not (low < value if open_low else low <= value) or not value <= high:  # written so that NaN fails
        raise ValueError(f"{name} must be in {'(' if open_low else '['}{low}, {high}], got {value}")


# ------------------------------------------------------------------------------------------- driver -> workers


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A sequence enters a slot (first time, or again after a preemption)."""

    slot: int
    seed: int  # decided by the driver, so that every rank and every re-admission draws the same numbers
    params: SamplingParams
    num_prompt: int  # prompt tokens; positions from here on are output
    num_computed: int  # tokens whose KV is already in `pages` (prefix cache)
    pages: list[int]
    stop_ids: list[int]  # ids that min_tokens masks (eos and stop_token_ids)
    history: list[int]  # prompt and output so far; empty unless params.needs_history


class PrefillChunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, start + len(token_ids)) of a sequence whose values the host knows."""

    slot: int
    start: int
    token_ids: list[int]
    sample: bool  # the chunk ends at the last known token: sample the next one from its last row
    next_ids: list[int] = []  # up to num_draft_tokens known tokens that follow the chunk, for the MTP modules


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """One forward pass. Slots in `decode` run their last sampled token and `verify` drafts after it, all of which the
    device already has; a slot that holds fewer drafts runs as many rows, but only drafts it has can be accepted.
    Every slot sampled in this step then drafts `draft` tokens for the next."""

    step: int
    freed: list[int]  # slots given back since the last plan; applied before `admitted`
    admitted: list[Admission]
    new_pages: list[tuple[int, list[int]]]  # (slot, pages appended to its block table)
    decode: list[int]
    chunks: list[PrefillChunk]
    verify: int = 0
    draft: int = 0


class StartCache(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Sent once, when every rank has loaded: allocate the KV cache with this many pages."""

    num_pages: int


class PrepareGrammar(msgspec.Struct, frozen=True, array_like=True, tag="grammar"):
    """Compile a grammar, for a sequence that is to be admitted once that is done. Steps go on meanwhile."""

    key: int
    grammar: str  # as SamplingParams.grammar


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Leave the step loop."""


ToWorker = StartCache | StepPlan | PrepareGrammar | Stop

# ------------------------------------------------------------------------------------------- workers -> driver


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """Progress of reading weights; bytes of this rank's shard."""

    rank: int
    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The rank holds its weights and could hold this many KV pages."""

    rank: int
    num_pages: int
    page_bytes: int
    seconds: dict[str, float]  # where the time of start-up went, by phase


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The KV cache is allocated; plans may be sent."""

    rank: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the token itself, and of the most likely ids in falling order."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """What was asked of a chunk's prompt rows. Row i scores the token at position start + i + 1."""

    slot: int
    start: int
    logprobs: list[TokenLogprobs]  # of the known next token; the last prompt row has none
    logits: Annotated[bytes, msgspec.Meta(description="little-endian fp32 [rows, vocab]")]


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag="output"):
    """Result of a plan, from rank 0. Sampled sequences in order: plan.decode, then plan.chunks with `sample`."""

    step: int
    tokens: list[list[int]]  # accepted tokens of each sampled sequence
    logprobs: list[list[TokenLogprobs]]  # parallel to tokens where asked for, else empty lists
    prompt_scores: list[PromptScores]
    seconds: float  # the step's duration on the worker


class GrammarReady(msgspec.Struct, frozen=True, array_like=True, tag="compiled"):
    """What became of a PrepareGrammar, from rank 0."""

    key: int
    problem: str | None  # why it cannot be used, or None


class WorkerFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The rank is about to exit; `message` is for the operator's log."""

    rank: int
    message: str


FromWorker = Loading | Loaded | Ready | StepOutput | GrammarReady | WorkerFailed
