"""From logits to tokens, on rank 0: the others are told.

Per-slot parameters live in device tables written when a sequence is admitted. Each processing stage runs only when a
row of the batch asks for it, so a greedy batch costs one argmax. The result of a row depends on that row alone.
"""

from typing import NamedTuple

import torch

from workers.draw import draw, uniform
from workers.penalties import PenaltyTables
from workers.step import Admission, SamplingParams, TokenLogprobs

# Streams of random numbers. The target's tokens come from the first, with drafts or without.
_TARGET, _DRAFT, _ACCEPT = 0, 1, 2


class Verdict(NamedTuple):
    """What a step's logits said: the first counts [n] int64 of tokens [n, 1 + drafts] int64 go on the sequences."""

    tokens: torch.Tensor
    counts: torch.Tensor


class Sampler:
    """Sampling state of every slot, and the pipeline over it.

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
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._repeatable = repeatable
        self._params: list[SamplingParams] = [SamplingParams()] * max_num_seqs
        self._stop_ids: list[list[int]] = [[]] * max_num_seqs

        def table(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_num_seqs, dtype=dtype, device=device)

        self.temperature = table(torch.float32)
        self.top_p = table(torch.float32)
        self.top_k = table(torch.int64)
        self.min_p = table(torch.float32)
        self.seed = table(torch.int64)
        self.num_prompt = table(torch.int64)
        self.rejects = table(torch.bool)  # whether drafts are taken by rejection sampling
        # What drafts were sampled from, [slots, drafts, vocab].
        self._draft_probs = torch.zeros(max_num_seqs, max_drafts, vocab_size, device=device)
        self._penalties: PenaltyTables | None = None

    def admit(self, admission: Admission) -> None:
        """Writes a slot's tables."""
        slot, params = admission.slot, admission.params
        self._params[slot] = params
        self._stop_ids[slot] = admission.stop_ids
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k if params.top_k > 0 else self.vocab_size
        self.min_p[slot] = params.min_p
        self.seed[slot] = admission.seed
        self.num_prompt[slot] = admission.num_prompt
        self.rejects[slot] = self._uses_rejection(params)
        if params.has_penalties and self._penalties is None:
            self._penalties = PenaltyTables(len(self._params), self.vocab_size, self.device)
        if self._penalties is not None:
            self._penalties.admit(admission)  # without penalties, too: the slot's last owner may have had some

    def _uses_rejection(self, params: SamplingParams) -> bool:
        return params.temperature > 0 and params.seed is None and not self._repeatable

    def verify(
        self,
        logits: torch.Tensor,
        slots: list[int],
        positions: torch.Tensor,
        drafts: torch.Tensor,
        num_drafts: torch.Tensor,
    ) -> Verdict:
        """Samples the next tokens of sequences, keeping the drafts that hold.

        logits [n, 1 + k, vocab] float32 after the last token and after each draft; slots of the n; positions [n] int64
        that the first new tokens will have; drafts [n, k] int64, of which the first num_drafts [n] count.
        """
        params = [self._params[slot] for slot in slots]
        slot_ids = torch.tensor(slots, device=self.device)
        k = drafts.shape[1]
        row_positions = positions[:, None] + torch.arange(1 + k, device=self.device)
        processed = self._process(logits, slots, slot_ids, row_positions, drafts)
        picks = processed.argmax(-1)
        accepted = picks[:, :k] == drafts
        if any(p.temperature > 0 for p in params):
            probs = self._probabilities(processed, params, slot_ids)
            weights = probs
            if k and any(self._uses_rejection(p) for p in params):
                weights, passed = self._reject(probs, slot_ids, row_positions, drafts, num_drafts)
            drawn = draw(weights, self.seed[slot_ids, None].expand_as(row_positions), row_positions, _TARGET)
            picks = torch.where(self.temperature[slot_ids, None] > 0, drawn, picks)
            accepted = picks[:, :k] == drafts
            if weights is not probs:
                accepted = torch.where(self.rejects[slot_ids, None], passed, accepted)
        accepted &= torch.arange(k, device=self.device) < num_drafts[:, None]
        counts = 1 + accepted.long().cumprod(-1).sum(-1)
        kept = torch.arange(1 + k, device=self.device) < counts[:, None] - 1
        tokens = torch.where(kept, torch.nn.functional.pad(drafts, (0, 1)), picks)
        if self._penalties is not None:
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

    def draft(self, logits: torch.Tensor, slots: list[int], positions: torch.Tensor, index: int) -> torch.Tensor:
        """Chooses the index-th draft of sequences: an MTP module's logits [n, vocab] float32, the positions [n] int64
        that the drafts would have -> tokens [n] int64. Repeatable requests draw with the numbers that the target will
        draw with, which makes the two likely to agree."""
        params = [self._params[slot] for slot in slots]
        slot_ids = torch.tensor(slots, device=self.device)
        none = positions.new_empty(len(slots), 0)
        processed = self._process(logits[:, None], slots, slot_ids, positions[:, None], none)
        tokens = processed.argmax(-1).squeeze(1)
        if any(p.temperature > 0 for p in params):
            probs = self._probabilities(processed, params, slot_ids).squeeze(1)
            if any(self._uses_rejection(p) for p in params):
                self._draft_probs[slot_ids, index] = probs
            stream = torch.where(self.rejects[slot_ids], _DRAFT, _TARGET)
            drawn = draw(probs, self.seed[slot_ids], positions, stream)
            tokens = torch.where(self.temperature[slot_ids] > 0, drawn, tokens)
        return tokens

    def logprobs(self, logits: torch.Tensor, slots: list[int], verdict: Verdict) -> list[list[TokenLogprobs]]:
        """Of the sequences that ask, their new tokens' log-probabilities under the unprocessed logits
        [n, 1 + k, vocab]; empty lists for the others."""
        asked = [i for i, slot in enumerate(slots) if self._params[slot].logprobs is not None]
        result: list[list[TokenLogprobs]] = [[] for _ in slots]
        if not asked:
            return result
        counts = verdict.counts.tolist()
        rows = [(i, j) for i in asked for j in range(counts[i])]
        sequences, steps = zip(*rows, strict=True)
        tops = [self._params[slots[i]].logprobs or 0 for i in sequences]
        scored = token_logprobs(logits[sequences, steps], verdict.tokens[sequences, steps], tops)
        for i, entry in zip(sequences, scored, strict=True):
            result[i].append(entry)
        return result

    def _process(
        self,
        logits: torch.Tensor,
        slots: list[int],
        slot_ids: torch.Tensor,
        positions: torch.Tensor,
        pending: torch.Tensor,
    ) -> torch.Tensor:
        """logit_bias, min_tokens and penalties of logits [n, m, vocab] at positions [n, m], row j of which comes after
        j of the n's tokens pending [n, m - 1]; a new tensor if anything changes."""
        edited = [i for i, slot in enumerate(slots) if self._params[slot].logit_bias or self._params[slot].min_tokens]
        penalised = any(self._params[slot].has_penalties for slot in slots)
        if not edited and not penalised:
            return logits
        logits = logits.clone()
        for i in edited:
            params, stop_ids = self._params[slots[i]], self._stop_ids[slots[i]]
            if params.logit_bias:
                ids = torch.tensor(list(params.logit_bias), device=self.device)
                logits[i, :, ids] += torch.tensor(list(params.logit_bias.values()), device=self.device)
            if params.min_tokens and stop_ids:
                ids = torch.tensor(stop_ids, device=self.device)
                too_early = positions[i] - self.num_prompt[slots[i]] < params.min_tokens
                logits[i, :, ids] = logits[i, :, ids].masked_fill(too_early[:, None], -torch.inf)
        if penalised and self._penalties is not None:
            logits = self._penalties.apply(logits, slot_ids, pending)
        return logits

    def _probabilities(
        self, logits: torch.Tensor, params: list[SamplingParams], slot_ids: torch.Tensor
    ) -> torch.Tensor:
        """Temperature, top_k, top_p and min_p of processed logits [n, m, vocab] -> probabilities."""
        # Greedy rows are divided by 1: their draw is not used, and must not produce NaN. With the greatest logit at 0
        # a temperature however small gives no infinity.
        temperature = self.temperature[slot_ids, None, None]
        scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)
        if any(0 < p.top_k < self.vocab_size or p.top_p < 1 for p in params):
            scaled = limit_top(scaled, self.top_k[slot_ids, None], self.top_p[slot_ids, None])
        probs = scaled.softmax(-1)
        if any(p.min_p > 0 for p in params):
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


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, tops: list[int]) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens` [rows] under `logits` [rows, vocab], with each row's `tops` most likely ids."""
    scores = logits.log_softmax(-1)
    chosen = scores.gather(-1, tokens[:, None]).squeeze(-1).tolist()
    best = scores.topk(max(tops), dim=-1) if max(tops) else None
    result = []
    for i, top in enumerate(tops):
        ids = best.indices[i, :top].tolist() if best is not None else []
        values = best.values[i, :top].tolist() if best is not None else []
        result.append(TokenLogprobs(chosen[i], ids, values))
    return result
