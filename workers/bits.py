"""Masks of tokens, a bit each."""

import torch


def allowed_tokens(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bits [..., words] int32 -> [..., vocab_size] bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    return ((masks[..., None] >> shifts) & 1).bool().flatten(-2)[..., :vocab_size]
