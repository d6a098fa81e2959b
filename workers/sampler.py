"""From logits to tokens, on rank 0: the others are told.

Per-slot parameters live in device tables written when a sequence is admitted. Each processing stage runs only when a
row of the batch asks for it, so a greedy batch costs one argmax. The result of a row depends on that row alone.
"""

import torch

from workers.draw import uniform
from workers.step import Admission, SamplingParams, TokenLogprobs


class Sampler:
    """Sampling state of every slot, and the pipeline over it."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
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
        if params.has_penalties and self._penalties is None:
            self._penalties = PenaltyTables(len(self._params), self.vocab_size, self.device)
        if self._penalties is not None:
            self._penalties.admit(admission)  # without penalties, too: the slot's last owner may have had some

    def sample(
        self, logits: torch.Tensor, slots: list[int], positions: torch.Tensor
    ) -> tuple[torch.Tensor, list[list[TokenLogprobs]]]:
        """logits [rows, vocab] float32, each row's slot, and the positions [rows] int64 that the new tokens will have
        -> tokens [rows] int64 and, for rows that ask, their log-probabilities under the unprocessed logits."""
        params = [self._params[slot] for slot in slots]
        slot_ids = torch.tensor(slots, device=self.device)
        processed = self._process(logits, slots, slot_ids, positions)
        tokens = processed.argmax(-1)
        if any(p.temperature > 0 for p in params):
            drawn = self._draw(processed, params, slot_ids, positions)
            tokens = torch.where(self.temperature[slot_ids] > 0, drawn, tokens)
        if self._penalties is not None:
            self._penalties.count(slot_ids, tokens)
        asked = [i for i, p in enumerate(params) if p.logprobs is not None]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in slots]
        if asked:
            tops = [params[i].logprobs or 0 for i in asked]
            for i, entry in zip(asked, token_logprobs(logits[asked], tokens[asked], tops), strict=True):
                logprobs[i] = [entry]
        return tokens, logprobs

    def _process(
        self, logits: torch.Tensor, slots: list[int], slot_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """logit_bias, min_tokens and penalties; a new tensor if anything changes."""
        edited = [i for i, slot in enumerate(slots) if self._params[slot].logit_bias or self._params[slot].min_tokens]
        penalised = any(self._params[slot].has_penalties for slot in slots)
        if not edited and not penalised:
            return logits
        logits = logits.clone()
        for i in edited:
            params, stop_ids = self._params[slots[i]], self._stop_ids[slots[i]]
            if params.logit_bias:
                ids = torch.tensor(list(params.logit_bias), device=self.device)
                logits[i, ids] += torch.tensor(list(params.logit_bias.values()), device=self.device)
            if params.min_tokens and stop_ids:
                ids = torch.tensor(stop_ids, device=self.device)
                too_early = positions[i] - self.num_prompt[slots[i]] < params.min_tokens
                logits[i, ids] = torch.where(too_early, -torch.inf, logits[i, ids])
        if penalised and self._penalties is not None:
            logits = self._penalties.apply(logits, slot_ids)
        return logits

    def _draw(
        self, logits: torch.Tensor, params: list[SamplingParams], slot_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        # Greedy rows are divided by 1: their draw is not used, and must not produce NaN. With the greatest logit at 0
        # a temperature however small gives no infinity.
        temperature = self.temperature[slot_ids]
        scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)[:, None]
        if any(0 < p.top_k < self.vocab_size or p.top_p < 1 for p in params):
            scaled = limit_top(scaled, self.top_k[slot_ids], self.top_p[slot_ids])
        probs = scaled.softmax(-1)
        if any(p.min_p > 0 for p in params):
            floor = self.min_p[slot_ids, None] * probs.amax(-1, keepdim=True)
            probs = probs.masked_fill(probs < floor, 0.0)
        return draw(probs, uniform(self.seed[slot_ids], positions))


class PenaltyTables:
    """Token counts of the slots, made when the first request with penalties arrives."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self._in_prompt = torch.zeros(max_num_seqs, vocab_size, dtype=torch.bool, device=device)
        self._out_counts = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int32, device=device)
        # repetition, frequency, presence; slots without penalties keep the neutral row
        self._strength = torch.tensor([[1.0, 0.0, 0.0]], device=device).repeat(max_num_seqs, 1)

    def admit(self, admission: Admission) -> None:
        """Counts a sequence's known tokens: the prompt, and after a preemption its output so far."""
        slot, params = admission.slot, admission.params
        self._in_prompt[slot] = False
        self._out_counts[slot] = 0
        tokens = torch.tensor(admission.history, dtype=torch.int64, device=self.device)
        self._in_prompt[slot, tokens[: admission.num_prompt]] = True
        output = tokens[admission.num_prompt :]
        self._out_counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        row = [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        self._strength[slot] = torch.tensor(row, device=self.device)

    def count(self, slot_ids: torch.Tensor, tokens: torch.Tensor) -> None:
        """Adds the tokens just sampled."""
        self._out_counts.index_put_((slot_ids, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)

    def apply(self, logits: torch.Tensor, slot_ids: torch.Tensor) -> torch.Tensor:
        """Repetition penalty over prompt and output (Keskar et al., arXiv 1909.05858), then frequency and presence
        penalties over the output, as OpenAI defines them."""
        counts = self._out_counts[slot_ids]
        repetition, frequency, presence = self._strength[slot_ids].unbind(-1)
        seen = self._in_prompt[slot_ids] | (counts > 0)
        repeated = torch.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
        logits = torch.where(seen, repeated, logits)
        return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def limit_top(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Masks all but each row's top_k [rows] most likely entries, and of those the smallest set whose probability
    reaches top_p [rows] (Holtzman et al., arXiv 1904.09751). Of equal logits the lowest ids stay."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    dropped = (before >= top_p[:, None]) & (top_p[:, None] < 1)  # rounding may bring `before` to 1 and beyond
    dropped[:, 0] = False
    return torch.empty_like(logits).scatter_(-1, ids, ordered.masked_fill(dropped, -torch.inf))


def draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sampling: probs [rows, vocab] (need not sum to 1), u [rows] float64 in [0, 1) -> ids [rows]."""
    cdf = probs.double().cumsum(-1)
    target = u * cdf[:, -1]
    return torch.searchsorted(cdf, target[:, None], right=True).squeeze(-1).clamp_(max=probs.shape[-1] - 1)


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
