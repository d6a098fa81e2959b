"""Changes to single logits by slot: logit_bias, and the ids that min_tokens forbids."""

import torch

from workers.step import Admission

# Not -inf: where a grammar allows nothing but the end, the end it is.
_UNLIKELY = -1e30


class LogitEdits:
    """Made when the first request with such parameters arrives."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self._bias = torch.zeros(slots, vocab_size, device=device)
        self._forbidden = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)  # while there are too few
        self._min_tokens = torch.zeros(slots, dtype=torch.int64, device=device)

    def admit(self, admission: Admission) -> None:
        """Writes a slot's tables."""
        slot, params = admission.slot, admission.params
        self._bias[slot] = 0
        self._forbidden[slot] = False
        self._min_tokens[slot] = params.min_tokens
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=self.device)
            self._bias[slot, ids] = torch.tensor(list(params.logit_bias.values()), device=self.device)
        if params.min_tokens and admission.stop_ids:
            self._forbidden[slot, torch.tensor(admission.stop_ids, device=self.device)] = True

    def apply(self, logits: torch.Tensor, slot_ids: torch.Tensor, num_output: torch.Tensor) -> torch.Tensor:
        """logits [n, m, vocab] of slots [n], before output token number num_output [n, m] -> new logits."""
        too_early = num_output < self._min_tokens[slot_ids, None]
        masked = too_early[..., None] & self._forbidden[slot_ids, None]
        return (logits + self._bias[slot_ids, None]).masked_fill(masked, _UNLIKELY)
