"""The wire format between a front end (the replica, or `LLM`) and the driver: msgspec over ZeroMQ, one node."""

import msgspec

from workers.step import PromptScores, SamplingParams, TokenLogprobs

# ------------------------------------------------------------------------------------------- front end -> driver


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """A validated request. The front end has checked lengths and ids; the driver trusts it."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    priority: int = 0  # lower runs first, as in vLLM
    cache_salt: str = ""  # requests share cached prefixes only under the same salt
    stop_ids: tuple[int, ...] = ()  # eos (unless ignore_eos) and params.stop_token_ids: what ends the sequence
    tenant: str = ""  # tenants that wait take turns


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Drop these requests, wherever they are; unknown ids are ignored. No further delta is sent for them."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Stop the workers and leave the driver's loop."""


ToDriver = AddRequest | AbortRequests | Shutdown

# ------------------------------------------------------------------------------------------- driver -> front end


class StartupProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Weights read so far, over all ranks."""

    done: int
    total: int


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The workers are up; requests may be sent."""

    num_pages: int
    page_size: int
    page_bytes: int  # of one rank
    seconds: dict[str, float]  # start-up phases of the slowest rank


class EngineDead(msgspec.Struct, frozen=True, array_like=True, tag="dead"):
    """The engine can serve no more: every request in flight has failed."""

    message: str


class RequestDelta(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one request. The last delta of a request has a finish_reason."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop" | "length" | "error"
    stop_token_id: int | None = None  # the id that ended it, when one did (it is the last of token_ids)
    logprobs: list[TokenLogprobs] = []
    prompt_scores: list[PromptScores] = []
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache at first admission
    error: str | None = None
    num_drafted: int = 0  # tokens that were drafted for this step
    num_accepted: int = 0  # of token_ids, how many had been drafted


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges now, and counters since start (monotonic)."""

    running: int
    waiting: int
    pages_used: int  # held by sequences (cached but unheld pages are free)
    pages_total: int
    step_seconds: float  # of the last step, on rank 0
    step_tokens: int  # rows of the last step
    preemptions: int
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # of them found
    prompt_tokens: int
    generated_tokens: int
    max_drafts: int = 0  # 0: speculation is off, and so are the next ones
    chosen_drafts: int = 0  # what the policy chose last
    accept_length: float = 0.0  # mean tokens of a recent verification, the one that is no draft included
    verifications: int = 0  # sequences verified with at least one draft
    draft_tokens: int = 0
    accepted_per_position: list[int] = []


class EngineOutputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    """One message a step, for all sequences."""

    deltas: list[RequestDelta]
    stats: EngineStats


FromDriver = StartupProgress | EngineReady | EngineDead | EngineOutputs
