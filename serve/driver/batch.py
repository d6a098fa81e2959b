"""One step: what is composed into its plan, and the record its output is matched against."""

from dataclasses import dataclass, field
from typing import NamedTuple

from serve.driver.sequence import Sequence
from workers.step import Admission, PrefillChunk, StepPlan


class Sampled(NamedTuple):
    """A sequence whose tokens a step delivers."""

    seq: Sequence
    reserved: int  # tokens at most
    num_drafts: int  # of them drafts that the sequence really holds


@dataclass(slots=True, eq=False)
class Batch:
    """The sequences of one step, first while rows are added within a budget, then while the plan is in flight.

    Slots may be given away while a plan is in flight, so its output is matched to sequences here, never by slot
    tables. Every row added moves its sequence to the state it has once the plan was sent.
    """

    step: int
    budget: int  # rows that still fit
    draft: int = 0  # drafts that each sampled sequence makes for its next step
    verify: int = 0  # drafts that each decoding sequence runs
    num_rows: int = 0
    num_decoding: int = 0
    sampled: list[Sampled] = field(default_factory=list)  # in output order
    prefilled: dict[int, tuple[Sequence, bool]] = field(default_factory=dict)  # by slot; whether its scores are news
    _decode: list[int] = field(default_factory=list)
    _admitted: list[Admission] = field(default_factory=list)
    _new_pages: list[tuple[int, list[int]]] = field(default_factory=list)
    _chunks: list[PrefillChunk] = field(default_factory=list)

    def add_decode(self, seq: Sequence, new_pages: list[int]) -> None:
        """Runs the last token of a sequence and `verify` drafts. Decodes come before chunks."""
        assert seq.slot is not None
        assert not self._chunks, "outputs are matched by order: decodes first"
        rows = 1 + self.verify
        if new_pages:
            seq.pages += new_pages
            self._new_pages.append((seq.slot, new_pages))
        self._decode.append(seq.slot)
        self._sample(seq, rows)
        self.num_decoding += 1
        seq.num_computed += rows
        self._spend(rows)

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunks)

    def add_chunk(self, seq: Sequence, lookahead: int) -> None:
        """As many of the sequence's uncomputed committed tokens as the budget holds, and up to `lookahead` of those
        that follow, which MTP modules need."""
        assert seq.slot is not None
        start = seq.num_computed
        end = min(len(seq.token_ids), start + self.budget)
        is_news = seq.num_scored <= start < seq.num_prompt
        if start < seq.num_scored:  # computed before a preemption: cut where news begin, so that none is told twice
            end = min(end, seq.num_scored)
        elif seq.needs_every_row:
            seq.num_scored = min(end, seq.num_prompt)
        sample = end == len(seq.token_ids)
        following = seq.token_ids[end : end + lookahead]
        self._chunks.append(PrefillChunk(seq.slot, start, seq.token_ids[start:end], sample, following))
        self.prefilled[seq.slot] = (seq, is_news)
        seq.num_computed = end
        if sample:
            self._sample(seq, 1)
            seq.decoding = True
        self._spend(end - start)

    def admit(self, seq: Sequence) -> None:
        """The sequence enters its slot; its first chunk follows."""
        assert seq.slot is not None
        self._admitted.append(
            Admission(
                slot=seq.slot,
                seed=seq.seed,
                params=seq.params,
                num_prompt=seq.num_prompt,
                num_computed=seq.num_computed,
                pages=list(seq.pages),
                stop_ids=sorted(seq.stop_ids),
                history=list(seq.token_ids) if seq.params.needs_history else [],
            )
        )

    def plan(self, freed: list[int]) -> StepPlan:
        return StepPlan(
            self.step,
            freed,
            self._admitted,
            self._new_pages,
            self._decode,
            self._chunks,
            self.verify,
            self.draft,
        )

    def _sample(self, seq: Sequence, reserved: int) -> None:
        self.sampled.append(Sampled(seq, reserved, min(seq.num_drafts, reserved - 1)))
        seq.num_reserved += reserved
        seq.num_drafts = self.draft

    def _spend(self, rows: int) -> None:
        self.budget -= rows
        self.num_rows += rows
