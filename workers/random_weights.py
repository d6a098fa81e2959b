"""Random weights that keep a model's numbers finite and its router balanced, to measure speed without a checkpoint."""

import zlib
from collections.abc import Callable

import torch

from layers.models.decoder import Decoder
from layers.weights import Weight

_AT_ONCE = 1 << 28  # elements drawn at a time


def fill_randomly(model: Decoder, rank: int, progress: Callable[[int, int], None]) -> None:
    """Fills every parameter, the same way each time. Matrices are normal with variance 1 / inputs, which keeps the size
    of what passes through; embeddings have variance 1, so that tokens differ, and with them the experts that they
    choose; norms are ones, biases zeros.

    `progress(done_bytes, total_bytes)`. What ranks share is the same on all of them.
    """
    weights = list(model.weights())
    total = sum(weight.target.nbytes for weight in weights)
    done = 0
    for weight in weights:
        draw(weight, rank)
        done += weight.target.nbytes
        progress(done, total)


def draw(weight: Weight, rank: int = 0) -> None:
    """Fills one checkpoint tensor's target; parts of one get numbers of their own on every rank."""
    target, shard = weight.target, weight.shard
    if target.dim() == 1:
        target.fill_(0.0 if weight.name.endswith("bias") else 1.0)
        return
    is_part = shard is not None and shard.length < shard.full
    inputs = shard.full if shard is not None and shard.dim == 1 else target.shape[-1]
    std = 1.0 if weight.name.endswith("embed_tokens.weight") else inputs**-0.5
    seed = zlib.crc32(f"{weight.name}{rank if is_part else ''}".encode())
    generator = torch.Generator(target.device).manual_seed(seed)
    for rows in target.split(max(1, _AT_ONCE // target.shape[-1])):
        drawn = torch.randn(rows.shape, generator=generator, device=target.device, dtype=torch.float32)
        rows.copy_(drawn.mul_(std).bfloat16())  # what a checkpoint would hold, whatever the target's type
