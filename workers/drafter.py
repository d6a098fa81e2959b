"""The speculative part of a step: MTP modules follow the model's rows, and draft what the next step verifies."""

from collections.abc import Sequence

import torch

from layers.attention.backend import Selection
from layers.attention.mla import LayerCache
from layers.models.decoder import Decoder
from layers.parallel import TensorParallel
from workers.sampler import Needs, Sampler, Verdict
from workers.tables import SlotTables, StepBatch


class Drafter:
    """Runs the model's MTP modules. One module drafts again and again, each time from its own last hidden state;
    several draft one token each. Where the checkpoint says so, the first draft's top-k selection serves the later ones,
    each of which adds its own position (GLM-5.2, `index_share_for_mtp_iteration`).

    Every row that the model ran leaves its entry in each module's cache, so that drafting can start at any step. For
    the last module, whose output is wanted only where a sequence goes on, the other rows are stored without running
    attention or experts. (With several modules, the entry of a sequence's last row in all but the first is made with
    a draft, and stays so if that draft is rejected.)
    """

    def __init__(self, model: Decoder, tables: SlotTables, sampler: Sampler, tp: TensorParallel) -> None:
        if model.config.mtp is None:
            raise ValueError("the model has no MTP modules")
        self.model = model
        self.tables = tables
        self.sampler = sampler
        self.tp = tp
        self.share_selection = model.config.mtp.share_selection

    def run(
        self,
        batch: StepBatch,
        count: int,
        hidden: torch.Tensor,
        verdict: Verdict,
        caches: Sequence[LayerCache],
        needs: Needs,
    ) -> torch.Tensor | None:
        """Drafts `count` tokens for each sampled slot. hidden [rows, hidden] of the batch; `caches`: the modules' own;
        `needs`: of the sampled slots' requests. -> the drafts [sampled, count] int64, if any."""
        if not batch.slot_ids.shape[0]:
            count = 0
        ends = batch.sampled_rows.gather(1, verdict.counts[:, None] - 1).squeeze(1)  # rows of the last tokens kept
        at = batch.positions[ends]
        rotation = self.model.rotary(batch.positions)
        next_ids = self._following(batch, verdict, ends)
        last = len(self.model.mtp) - 1
        drafts: list[torch.Tensor] = []
        state, selection = hidden, None
        for m, (module, cache) in enumerate(zip(self.model.mtp, caches, strict=True)):
            x = module.join(next_ids, state)
            if m < last:
                state, _ = module(x, rotation, cache, batch.attention)
                final = state[ends]
            else:
                module.store(x, rotation, cache, batch.attention.cache_slots)
                if len(drafts) < count:
                    single = self.tables.single_rows(batch.slot_ids, at, batch.max_length)
                    final, selection = module(x[ends], self.model.rotary(at), cache, single)
            if len(drafts) < count:
                drafts.append(self._choose(module.logits(final), batch, at, len(drafts), needs))
            if m < last:
                next_ids = next_ids.roll(-1)
                self._look_ahead(next_ids, batch, m + 1)
                if len(drafts) == m + 1:
                    next_ids[ends] = drafts[-1]
        while len(drafts) < count:  # a single module goes on from where it is
            step = len(drafts)
            module, cache = self.model.mtp[0], caches[0]
            single = self.tables.single_rows(batch.slot_ids, at + step, batch.max_length)
            x = module.join(drafts[-1], final)
            if self.share_selection and selection is not None:
                selection = _extended(selection, single.cache_slots)
                final, _ = module(x, self.model.rotary(at + step), cache, single, selection)
            else:
                final, _ = module(x, self.model.rotary(at + step), cache, single)
            drafts.append(self._choose(module.logits(final), batch, at, step, needs))
        if not drafts:
            return None
        made = torch.stack(drafts, dim=1)
        self.tables.set_drafts(batch.slot_ids, made)
        return made

    def _choose(
        self, logits: torch.Tensor, batch: StepBatch, at: torch.Tensor, index: int, needs: Needs
    ) -> torch.Tensor:
        """Rank 0 decides; the others are told. The row at position t drafts the token of t + 2 + index."""
        if self.tp.rank == 0:
            tokens = self.sampler.draft(logits, batch.slot_ids, at + 2 + index, index, needs)
        else:
            tokens = torch.empty_like(at)
        return self.tp.broadcast(tokens)

    def _following(self, batch: StepBatch, verdict: Verdict, ends: torch.Tensor) -> torch.Tensor:
        """The token after each row's [rows] int64. Behind a rejected draft it does not matter."""
        next_ids = batch.token_ids.roll(-1)
        decoding = batch.num_decoding
        next_ids[: decoding * batch.per_sequence] = verdict.tokens[:decoding].flatten()
        self._look_ahead(next_ids, batch, 0)
        next_ids[ends] = verdict.tokens.gather(1, verdict.counts[:, None] - 1).squeeze(1)
        return next_ids

    def _look_ahead(self, ids: torch.Tensor, batch: StepBatch, ahead: int) -> None:
        """Sets the last rows of chunks to the known tokens that follow them."""
        if batch.chunks is not None and ahead < len(batch.chunks.ahead):
            rows, tokens = batch.chunks.ahead[ahead]
            ids[rows] = tokens


def _extended(selection: Selection, slots: torch.Tensor) -> Selection:
    """A selection of single rows [n, k], and for each one slot [n] more."""
    return tuple(None if chosen is None else torch.cat((slots[:, None].int(), chosen), dim=1) for chosen in selection)
