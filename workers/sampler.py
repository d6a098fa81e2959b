"""From logits to tokens, on rank 0: the others are told.

Per-slot parameters live in device tables written when a sequence is admitted. Each processing stage runs only when a
sequence of the batch needs it, so a greedy batch costs one argmax; what a batch needs is known on the host, and all the
rest is on the device, so that a CUDA graph can hold a step. The result of a row depends on that row alone.
"""

import enum
import functools
import operator
from typing import NamedTuple

import torch

from workers.bits import allowed_tokens
from workers.draw import draw, uniform
from workers.edits import LogitEdits
from workers.penalties import PenaltyTables
from workers.step import MAX_LOGPROBS, Admission, SamplingParams, TokenLogprobs

# Streams of random numbers. The target's tokens come from the first, with drafts or without.
_TARGET, _DRAFT, _ACCEPT = 0, 1, 2


class Needs(enum.IntFlag):
    """The stages that a batch's requests need."""

    DRAWS = enum.auto()  # temperature
    LIMITS = enum.auto()  # top_k, top_p
    FLOORS = enum.auto()  # min_p
    REJECTION = enum.auto()  # drafts taken by rejection sampling
    EDITS = enum.auto()  # logit_bias, min_tokens
    PENALTIES = enum.auto()
    SCORES = enum.auto()  # logprobs
    GRAMMAR = enum.auto()

    @classmethod
    def of(cls, params: SamplingParams, repeatable: bool) -> "Needs":
        """What one request needs; `repeatable`: requests without a seed of their own have one, too."""
        draws = params.temperature > 0
        wants = {
            cls.DRAWS: draws,
            cls.LIMITS: draws and (params.top_k > 0 or params.top_p < 1),
            cls.FLOORS: draws and params.min_p > 0,
            cls.REJECTION: draws and params.seed is None and not repeatable,
            cls.EDITS: bool(params.logit_bias) or params.min_tokens > 0,
            cls.PENALTIES: params.has_penalties,
            cls.SCORES: params.logprobs is not None,
            cls.GRAMMAR: bool(params.grammar),
        }
        return functools.reduce(operator.or_, (need for need, wanted in wants.items() if wanted), cls(0))


class Verdict(NamedTuple):
    """What a step's logits said: the first counts [n] int64 of tokens [n, 1 + drafts] int64 go on the sequences."""

    tokens: torch.Tensor
    counts: torch.Tensor


class TokenScores(NamedTuple):
    """Log-probabilities of tokens, and of the most likely ones in falling order."""

    chosen: torch.Tensor  # [...] float32
    top_ids: torch.Tensor  # [..., at most MAX_LOGPROBS] int64
    top: torch.Tensor  # the same shape, float32


class Sampler:
    """Sampling state of every slot (and of one more, greedy, for rows that pad a batch), and the pipeline over it.

    A draft is kept when it is the target's own choice, where that choice is a function of the logits: for greedy
    requests, and for repeatable ones (with a seed of their own, or all when `repeatable`), whose token at a position
    depends on seed, position and target alone, so that drafts change nothing but speed. Other requests sample drafts
    too and take them by rejection sampling (Leviathan et al. 2023, arXiv 2211.17192), which accepts more of them.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        *,
        max_drafts: int = 0,
        repeatable: bool = False,
        decides: bool = True,
    ) -> None:
        """`decides`: whether this rank samples; one that does not only knows what batches need."""
        self.vocab_size = vocab_size
        self.device = device
        self._repeatable = repeatable
        self._decides = decides
        slots = max_num_seqs + 1
        self._params: list[SamplingParams] = [SamplingParams(temperature=0)] * slots
        self._needs = [Needs(0)] * slots

        def table(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(slots, dtype=dtype, device=device)

        self.temperature = table(torch.float32)
        self.top_p = table(torch.float32)
        self.top_k = table(torch.int64)
        self.min_p = table(torch.float32)
        self.seed = table(torch.int64)
        self.num_prompt = table(torch.int64)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self.rejects = table(torch.bool)  # whether drafts are taken by rejection sampling
        # What drafts were sampled from, [slots, drafts, vocab].
        self._draft_probs = torch.zeros(slots, max_drafts if decides else 0, vocab_size, device=device)
        # Made when the first request that needs them arrives.
        self._edits: LogitEdits | None = None
        self._penalties: PenaltyTables | None = None

    def admit(self, admission: Admission) -> None:
        """Writes a slot's tables."""
        slot, params = admission.slot, admission.params
        self._params[slot] = params
        needs = self._needs[slot] = Needs.of(params, self._repeatable)
        if not self._decides:
            return
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k if params.top_k > 0 else self.vocab_size
        self.min_p[slot] = params.min_p
        self.seed[slot] = admission.seed
        self.num_prompt[slot] = admission.num_prompt
        self.rejects[slot] = Needs.REJECTION in needs
        # Once there are tables every request is written to them: the slot's last owner may have left something.
        if Needs.EDITS in needs and self._edits is None:
            self._edits = LogitEdits(len(self._params), self.vocab_size, self.device)
        if self._edits is not None:
            self._edits.admit(admission)
        if Needs.PENALTIES in needs and self._penalties is None:
            self._penalties = PenaltyTables(len(self._params), self.vocab_size, self.device)
        if self._penalties is not None:
            self._penalties.admit(admission)

    def needs(self, slots: list[int]) -> Needs:
        """What a batch of these slots needs."""
        return functools.reduce(operator.or_, (self._needs[slot] for slot in slots), Needs(0))

    def verify(
        self,
        logits: torch.Tensor,
        slot_ids: torch.Tensor,
        positions: torch.Tensor,
        drafts: torch.Tensor,
        num_drafts: torch.Tensor,
        needs: Needs,
        masks: torch.Tensor | None = None,
    ) -> Verdict:
        """Samples the next tokens of sequences, keeping the drafts that hold.

        logits [n, 1 + k, vocab] float32 after the last token and after each draft; slot_ids [n] int64; positions [n]
        int64 that the first new tokens will have; drafts [n, k] int64, of which the first num_drafts [n] count; masks
        [n, 1 + k, words] int32: the tokens that grammars allow, as bits.
        """
        k = drafts.shape[1]
        row_positions = positions[:, None] + torch.arange(1 + k, device=self.device)
        processed = self._process(logits, slot_ids, row_positions, drafts, needs)
        if masks is not None:
            processed = processed.masked_fill(~allowed_tokens(masks, self.vocab_size), -torch.inf)
        picks = processed.argmax(-1)
        accepted = picks[:, :k] == drafts
        if Needs.DRAWS in needs:
            probs = self._probabilities(processed, slot_ids, needs)
            weights = probs
            if k and Needs.REJECTION in needs:
                weights, passed = self._reject(probs, slot_ids, row_positions, drafts, num_drafts)
            drawn = draw(weights, self.seed[slot_ids, None].expand_as(row_positions), row_positions, _TARGET)
            picks = torch.where(self.temperature[slot_ids, None] > 0, drawn, picks)
            accepted = picks[:, :k] == drafts
            if weights is not probs:
                accepted = torch.where(self.rejects[slot_ids, None], passed, accepted)
        tokens, counts = picks, self._one.expand(len(slot_ids))
        if k:
            accepted &= torch.arange(k, device=self.device) < num_drafts[:, None]
            counts = 1 + accepted.long().cumprod(-1).sum(-1)
            kept = torch.arange(1 + k, device=self.device) < counts[:, None] - 1
            tokens = torch.where(kept, torch.nn.functional.pad(drafts, (0, 1)), picks)
        if Needs.PENALTIES in needs and self._penalties is not None:
            self._penalties.count(slot_ids, tokens, counts)
        return Verdict(tokens, counts)

    def _reject(
        self,
        probs: torch.Tensor,
        slot_ids: torch.Tensor,
        positions: torch.Tensor,
        drafts: torch.Tensor,
        num_drafts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rejection sampling of drafts made by `draft`: with target p and draft q a draft passes if u q < p, and in
        place of the first that does not a token of max(p - q, 0) is drawn. -> what to draw from in each row
        [n, 1 + k, vocab], and which drafts pass [n, k]. Rows of other requests keep their p."""
        k = drafts.shape[1]
        counts = self.rejects[slot_ids, None] & (torch.arange(k, device=self.device) < num_drafts[:, None])
        q = self._draft_probs[slot_ids, :k] * counts[..., None]
        p = probs[:, :k]
        coins = uniform(self.seed[slot_ids, None].expand_as(drafts), positions[:, :k], _ACCEPT)
        passed = coins * q.gather(-1, drafts[..., None]).squeeze(-1) < p.gather(-1, drafts[..., None]).squeeze(-1)
        rest = (p - q).clamp_(min=0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # p = q: no draft is rejected
        return torch.cat((rest, probs[:, k:]), dim=1), passed

    def draft(
        self, logits: torch.Tensor, slot_ids: torch.Tensor, positions: torch.Tensor, index: int, needs: Needs
    ) -> torch.Tensor:
        """Chooses the index-th draft of sequences: an MTP module's logits [n, vocab] float32, the positions [n] int64
        that the drafts would have -> tokens [n] int64. Repeatable requests draw with the numbers that the target will
        draw with, which makes the two likely to agree."""
        none = positions.new_empty(len(slot_ids), 0)
        processed = self._process(logits[:, None], slot_ids, positions[:, None], none, needs)
        tokens = processed.argmax(-1).squeeze(1)
        if Needs.DRAWS in needs:
            probs = self._probabilities(processed, slot_ids, needs).squeeze(1)
            if Needs.REJECTION in needs:
                self._draft_probs[slot_ids, index] = probs
            stream = _TARGET + (_DRAFT - _TARGET) * self.rejects[slot_ids].long()
            drawn = draw(probs, self.seed[slot_ids], positions, stream)
            tokens = torch.where(self.temperature[slot_ids] > 0, drawn, tokens)
        return tokens

    def reports(self, scores: TokenScores, slots: list[int], counts: list[int]) -> list[list[TokenLogprobs]]:
        """What the sequences of these slots asked to be told of their first `counts` new tokens, given the scores
        [n, 1 + k] on the host; empty lists for those that did not ask."""
        result: list[list[TokenLogprobs]] = []
        for i, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            top = self._params[slot].logprobs
            result.append([] if top is None else as_lists(TokenScores(*(t[i, :count] for t in scores)), [top] * count))
        return result

    def _process(
        self,
        logits: torch.Tensor,
        slot_ids: torch.Tensor,
        positions: torch.Tensor,
        pending: torch.Tensor,
        needs: Needs,
    ) -> torch.Tensor:
        """logit_bias, min_tokens and penalties of logits [n, m, vocab] at positions [n, m], row j of which comes after
        j of the n's tokens pending [n, m - 1]; a new tensor if anything changes."""
        if Needs.EDITS in needs and self._edits is not None:
            logits = self._edits.apply(logits, slot_ids, positions - self.num_prompt[slot_ids, None])
        if Needs.PENALTIES in needs and self._penalties is not None:
            logits = self._penalties.apply(logits, slot_ids, pending)
        return logits

    def _probabilities(self, logits: torch.Tensor, slot_ids: torch.Tensor, needs: Needs) -> torch.Tensor:
        """Temperature, top_k, top_p and min_p of processed logits [n, m, vocab] -> probabilities."""
        # Greedy rows are divided by 1: their draw is not used, and must not produce NaN. With the greatest logit at 0
        # a temperature however small gives no infinity.
        temperature = self.temperature[slot_ids, None, None]
        scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)
        if Needs.LIMITS in needs:
            scaled = limit_top(scaled, self.top_k[slot_ids, None], self.top_p[slot_ids, None])
        probs = scaled.softmax(-1)
        if Needs.FLOORS in needs:
            floor = self.min_p[slot_ids, None, None] * probs.amax(-1, keepdim=True)
            probs = probs.masked_fill(probs < floor, 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


def limit_top(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Masks all but each row's top_k most likely entries, and of those the smallest set whose probability reaches
    top_p (Holtzman et al., arXiv 1904.09751): logits [..., vocab], limits of their leading shape or one that is
    broadcast to it. Of equal logits the lowest ids stay."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k[..., None], -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    dropped = (before >= top_p[..., None]) & (top_p[..., None] < 1)  # rounding may bring `before` to 1 and beyond
    dropped[..., 0] = False
    return torch.empty_like(logits).scatter_(-1, ids, ordered.masked_fill(dropped, -torch.inf))


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor) -> TokenScores:
    """Log-probabilities of `tokens` [...] under raw `logits` [..., vocab]."""
    scores = logits.log_softmax(-1)
    chosen = scores.gather(-1, tokens[..., None]).squeeze(-1)
    top, top_ids = scores.topk(min(MAX_LOGPROBS, scores.shape[-1]), dim=-1)
    return TokenScores(chosen, top_ids, top)


def as_lists(scores: TokenScores, tops: list[int]) -> list[TokenLogprobs]:
    """One entry for each row of scores [rows], with its `tops` most likely ids."""
    chosen, ids, values = scores.chosen.tolist(), scores.top_ids.tolist(), scores.top.tolist()
    return [TokenLogprobs(chosen[i], ids[i][:top], values[i][:top]) for i, top in enumerate(tops)]
