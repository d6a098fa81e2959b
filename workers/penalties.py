"""Token counts of the slots, for repetition, frequency and presence penalties."""

import torch

from workers.step import Admission


class PenaltyTables:
    """Made when the first request with penalties arrives."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self._in_prompt = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        self._out_counts = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)
        # repetition, frequency, presence; slots without penalties keep the neutral row
        self._strength = torch.tensor([[1.0, 0.0, 0.0]], device=device).repeat(slots, 1)

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

    def count(self, slot_ids: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Adds the first counts [n] of tokens [n, m] to the outputs of slots [n]."""
        new = (torch.arange(tokens.shape[1], device=self.device) < counts[:, None]).int()
        self._out_counts.index_put_((slot_ids[:, None].expand_as(tokens), tokens), new, accumulate=True)

    def apply(self, logits: torch.Tensor, slot_ids: torch.Tensor, pending: torch.Tensor) -> torch.Tensor:
        """Repetition penalty over prompt and output (Keskar et al., arXiv 1909.05858), then frequency and presence
        penalties over the output, as OpenAI defines them.

        logits [n, m, vocab] of slots [n]; row j comes after the first j of the n's tokens pending [n, m - 1].
        """
        counts = self._out_counts[slot_ids, None].repeat(1, logits.shape[1], 1)
        for j in range(pending.shape[1]):
            later = counts[:, j + 1 :]
            token = pending[:, j, None, None].expand(-1, later.shape[1], 1)
            later.scatter_add_(-1, token, torch.ones_like(token, dtype=torch.int32))
        repetition, frequency, presence = self._strength[slot_ids, None, None].unbind(-1)
        seen = self._in_prompt[slot_ids, None] | (counts > 0)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        return logits - frequency * counts - presence * (counts > 0)
