"""The trunk's own text, and how good a model is: held-out loss, drafts accepted, answers in the chat format."""

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tiny.attention import Cache
from tiny.checkpoint import ASSISTANT, BOS, BOS_ID, EOS_ID, USER
from tiny.config import Mode
from tiny.data import Corpus
from tiny.model import TinyModel
from tiny.objective import MTP_STEPS, Row, language_losses

QUESTIONS = (
    "hi", "Hello!", "Who are you?", "Genesis 1:1", "John 3:16", "Psalm 23:1", "Tell me about Moses",
    "Tell me about wisdom", "Who was David?", "Continue: In the beginning", "What is love?", "Write a poem",
)  # fmt: skip


@torch.no_grad()
def write(model: TinyModel, prompts: Iterator[tuple[list[int], int]], rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Rows of prompts, each continued greedily until eos or its limit, then the next; dense batches, no padding.

    Returns ids [rows, length] and which of them the model chose [rows, length] bool, on the model's device.
    """
    device = model.frequencies.device
    # A row's script: tokens to put down as they are, and -n for "now write, at most n tokens".
    script = torch.tensor([_script(prompts, length) for _ in range(rows)], device=device)
    caches = [Cache(length) for _ in range(model.cfg.num_hidden_layers)]
    ids, own = script.new_zeros(rows, length), torch.zeros(rows, length, dtype=torch.bool, device=device)
    document, at, written, guess = (script.new_zeros(rows, n) for n in (length, 1, 1, 1))
    for t in range(length):
        entry = script.gather(1, at)
        writing = entry < 0
        token = torch.where(writing, guess, entry)
        written = torch.where(writing, written + 1, 0)
        at = at + (~writing | (token == EOS_ID) | (written >= -entry)).long()
        ids[:, t : t + 1], own[:, t : t + 1] = token, writing
        document[:, t:] += token == BOS_ID
        allowed = (document[:, : t + 1] == document[:, t : t + 1]).unsqueeze(1)
        guess = model.lm_head(model(token, allowed, Mode(), start=t, contexts=caches)).argmax(-1)
    return ids, own


def _script(prompts: Iterator[tuple[list[int], int]], length: int) -> list[int]:
    script: list[int] = []
    while len(script) < length:
        prompt, limit = next(prompts)
        script += [*prompt, -limit]
    return script[:length]


@torch.no_grad()
def held_out_losses(model: TinyModel, rows: Tensor, batch: int = 16) -> list[float]:
    """Loss of the trunk and of each MTP step, nats a token; attention is sparse as when serving."""
    model.eval()
    parts = [language_losses(model, part, Mode()).token for part in rows.split(batch)]
    return torch.stack(parts).mean(0).tolist()


@torch.no_grad()
def acceptance(model: TinyModel, ids: Tensor, own: Tensor, batch: int = 16) -> tuple[list[float], float]:
    """Of drafts after a token the trunk chose: how often the first, the first two, all three are its next choices; and
    the mean tokens of a step when three are drafted (at positions a server would draft from).

    A draft is right when those before it are and it is the trunk's choice, so the right tokens may stand for the
    drafts in the unrolling.
    """
    rates, tokens, steps = [], 0, 0
    for part, chosen in zip(ids.split(batch), own.split(batch), strict=True):
        row = Row.of(part)
        hidden = model(part[:, : row.length], row.allowed, Mode())
        right, counted = torch.ones_like(chosen[:, : row.length]), chosen[:, 1 : 1 + row.length]
        agreed = []
        for j, state in enumerate(model.draft(hidden, part[:, 1:], row.allowed, Mode(), MTP_STEPS)):
            target, valid = row.ahead(j + 2)
            right = right & (model.lm_head(state).argmax(-1) == target)
            counted = counted & valid & chosen[:, j + 2 : j + 2 + row.length]
            agreed.append(right)
        accepted = torch.stack(agreed)  # [MTP_STEPS, B, S]
        rates.append(accepted[:, counted].float())
        more = _walk(accepted.sum(0).cpu().numpy(), counted.cpu().numpy())
        tokens, steps = tokens + more[0], steps + more[1]
    return torch.cat(rates, dim=1).mean(1).tolist(), tokens / max(steps, 1)


def _walk(accepted: np.ndarray, counted: np.ndarray) -> tuple[int, int]:
    """Tokens and steps of a server that goes on by 1 + accepted [B, S], over positions that count."""
    tokens, steps = 0, 0
    for row, counts in zip(accepted, counted, strict=True):
        t = 0
        while t < len(row):
            if counts[t]:
                tokens, steps = tokens + 1 + int(row[t]), steps + 1
                t += 1 + int(row[t])
            else:
                t += 1
    return tokens, steps


def answers(model: TinyModel, tokenizer: Tokenizer, limit: int = 120) -> dict[str, str]:
    """Greedy answers to QUESTIONS, special tokens shown: one that ends has eos last."""
    out = {}
    for question in QUESTIONS:
        prompt = tokenizer.encode(f"{BOS}{USER}{question}{ASSISTANT}").ids
        ids, _ = write(model, iter([(prompt, limit)] * (limit + 2)), 1, len(prompt) + limit)
        answer = ids[0, len(prompt) :].tolist()
        end = answer.index(EOS_ID) + 1 if EOS_ID in answer else len(answer)
        out[question] = tokenizer.decode(answer[:end], skip_special_tokens=False)
    return out


def report(model: TinyModel, corpus: Corpus, context: int, rows: int, length: int, seed: int = 1) -> dict[str, Any]:
    """Losses on held-out chapters, and drafts on greedy text: rows of `length` tokens, begun by held-out chapters and
    by prompts as in training."""
    model.eval()
    out: dict[str, Any] = {}
    held = corpus.held_out_rows(context).to(model.frequencies.device)
    out["held_out_loss"] = [round(x, 4) for x in held_out_losses(model, held)]
    for name, held_out in (("", True), ("_training_prompts", False)):
        ids, own = write(model, corpus.prompts(Random(seed), held_out), rows, length)
        rates, tokens = acceptance(model, ids, own)
        out["drafts_accepted" + name] = [round(x, 4) for x in rates]
        out["mean_tokens_per_step" + name] = round(tokens, 3)
        out["tokens_judged" + name] = int(own.sum())
    return out
