"""From a step's output to what each request is told."""

from serve.driver.batch import Batch
from serve.driver.messages import RequestDelta
from serve.driver.sequence import Sequence
from workers.step import PromptScores, TokenLogprobs


def to_signed64(seed: int) -> int:
    """Any integer wrapped to two's complement of 64 bits: seeds in that range stay as they are."""
    return (seed + 2**63) % 2**64 - 2**63


def accept(
    seq: Sequence,
    tokens: list[int],
    logprobs: list[TokenLogprobs],
    prompt_scores: list[PromptScores],
    num_drafts: int,
) -> RequestDelta:
    """Commits a step's tokens, the last of which was no draft, up to the one that ends the sequence, and says so in the
    delta.

    A stop id is honoured once `min_tokens` outputs stand before it, which is also as long as workers mask it; where a
    grammar allows nothing else it comes earlier, and is the end. The stop token is part of the delta; tokens after the
    end are dropped.
    """
    num_kept = 0
    reason: str | None = None
    stop_token: int | None = None
    for token in tokens:
        num_outputs_before = len(seq.token_ids) - seq.num_prompt
        seq.token_ids.append(token)
        num_kept += 1
        if token in seq.stop_ids and (num_outputs_before >= seq.params.min_tokens or seq.params.grammar):
            reason, stop_token = "stop", token
            break
        if len(seq.token_ids) >= seq.max_len:
            reason = "length"
            break
    num_cached = 0 if seq.started else seq.num_cached or 0
    seq.started = True
    return RequestDelta(
        request_id=seq.request_id,
        token_ids=tokens[:num_kept],
        finish_reason=reason,
        stop_token_id=stop_token,
        logprobs=logprobs[:num_kept],
        prompt_scores=prompt_scores,
        num_cached_tokens=num_cached,
        num_drafted=num_drafts,
        num_accepted=min(num_kept, max(len(tokens) - 1, 0)),
    )


def match_scores(batch: Batch, scores: list[PromptScores]) -> dict[Sequence, list[PromptScores]]:
    """A step's prompt scores by unfinished sequence, without those that were delivered before a preemption.

    Raises RuntimeError for a slot that had no chunk in the step.
    """
    matched: dict[Sequence, list[PromptScores]] = {}
    for score in scores:
        if score.slot not in batch.prefilled:
            raise RuntimeError(f"step {batch.step}: prompt scores for slot {score.slot}, which had no chunk")
        seq, is_news = batch.prefilled[score.slot]
        if is_news and not seq.finished:
            matched.setdefault(seq, []).append(score)
    return matched
