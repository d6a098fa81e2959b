"""What is minimised: next-token and MTP losses on text, then the MTP module's distance to the trunk it drafts for."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny.attention import Attention
from tiny.checkpoint import BOS_ID
from tiny.config import Mode
from tiny.data import LOOKAHEAD
from tiny.model import TinyModel

MTP_STEPS = 3
SERVED_TEMPERATURE = 0.6  # generation_config.json's


class Losses(NamedTuple):
    """token [1 + MTP_STEPS] (main, then each MTP step; the drafter's loss: [MTP_STEPS]) and the indexers' (a sum)."""

    token: Tensor
    indexer: Tensor


def document_mask(document: Tensor) -> Tensor:
    """Who may look at whom: not at later tokens, nor into other documents; [B, S] -> [B, S, S] bool."""
    return (document[:, :, None] == document[:, None, :]).tril()


class Row(NamedTuple):
    """Views of a batch of rows [B, S + LOOKAHEAD]: the context, who may look at whom, and which document."""

    ids: Tensor  # [B, S + LOOKAHEAD]
    document: Tensor  # [B, S + LOOKAHEAD] number of the document a token is in
    allowed: Tensor  # [B, S, S] bool: not later, and of the same document
    length: int  # S

    @classmethod
    def of(cls, ids: Tensor) -> "Row":
        document = (ids == BOS_ID).cumsum(-1)
        length = ids.shape[1] - LOOKAHEAD
        return cls(ids, document, document_mask(document[:, :length]), length)

    def ahead(self, distance: int) -> tuple[Tensor, Tensor]:
        """For each position of the context, the token `distance` later, and whether it is of the same document."""
        window = slice(distance, distance + self.length)
        return self.ids[:, window], self.document[:, window] == self.document[:, : self.length]


def take_index_loss(model: TinyModel) -> Tensor:
    """Sum of the losses that the last pass left at its indexers; zero when it did not teach them."""
    total = torch.zeros((), device=model.frequencies.device)
    for module in model.modules():
        if isinstance(module, Attention) and module.index_loss is not None:
            total, module.index_loss = total + module.index_loss, None
    return total


def language_losses(model: TinyModel, ids: Tensor, mode: Mode) -> Losses:
    """Mean cross-entropy (nats a token) of the trunk and of each unrolled MTP step on rows [B, S + LOOKAHEAD]."""
    row = Row.of(ids)
    hidden = model(ids[:, : row.length], row.allowed, mode)
    drafts = model.draft(hidden, ids[:, 1:], row.allowed, mode, MTP_STEPS)
    losses = []
    for distance, state in enumerate([hidden, *drafts], 1):
        target, valid = row.ahead(distance)
        losses.append(F.cross_entropy(model.lm_head(state).float()[valid], target[valid]))
    return Losses(torch.stack(losses), take_index_loss(model))


def drafting_losses(model: TinyModel, ids: Tensor, mode: Mode) -> Losses:
    """Cross-entropy of each MTP step against the (frozen) trunk's distribution for the same token.

    Both are taken at the temperature the model is served at. ids: text the trunk wrote itself, which is what drafts
    are judged on; rows [B, S + LOOKAHEAD]."""
    row = Row.of(ids)
    with torch.no_grad():
        hidden = model(ids, document_mask(row.document), Mode())
        spoken = (model.lm_head(hidden).float() / SERVED_TEMPERATURE).softmax(-1)
    drafts = model.draft(hidden[:, : row.length], ids[:, 1:], row.allowed, mode, MTP_STEPS)
    losses = []
    for j, state in enumerate(drafts):
        _, valid = row.ahead(j + 2)
        target = spoken[:, j + 1 : j + 1 + row.length][valid]
        log_draft = (model.lm_head(state)[valid].float() / SERVED_TEMPERATURE).log_softmax(-1)
        losses.append(-(target * log_draft).sum(-1).mean())
    return Losses(torch.stack(losses), take_index_loss(model))
