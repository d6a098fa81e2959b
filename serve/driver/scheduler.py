"""Continuous batching: which sequences run which tokens in the next step."""

import hashlib
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from configs.engine import PAGE_SIZE, EngineConfig
from serve.driver.batch import Batch
from serve.driver.drafts import DraftPolicy
from serve.driver.messages import AddRequest, EngineStats, RequestDelta
from serve.driver.outputs import accept, match_scores, to_signed64
from serve.driver.pages import PageManager, pages_for, root_digest
from serve.driver.sequence import Sequence
from serve.driver.waiting import Preparing, Turns, WaitingQueue
from workers.step import GrammarReady, PrepareGrammar, StepOutput, StepPlan

# Admission keeps back a page for each running sequence, but no more than this share of the cache, so that what was
# just admitted is not preempted by the next page another one needs.
HEADROOM_SHARE = 1 / 50


@dataclass(slots=True)
class Counters:
    """Monotonic since start."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    verifications: int = 0  # of sequences that held drafts
    draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)


class Scheduler:
    """Owns the sequences, their slots and pages. Plans may be asked for before the last one's output is known.

    A step's cost does not depend on how many sequences wait or how long any of them is.
    """

    def __init__(
        self,
        pages: PageManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        drafts: DraftPolicy | None = None,
        seed: int | None = None,
    ) -> None:
        self._pages = pages
        self._max_num_seqs = max_num_seqs
        self._max_rows = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._prefix_caching = enable_prefix_caching
        self._drafts = drafts or DraftPolicy(0, adaptive=False)
        self._seed = seed
        self._sequences: dict[str, Sequence] = {}  # all that are not finished
        self._turns = Turns()
        self._preparing = Preparing()
        self._waiting = WaitingQueue()
        self._running: dict[int, Sequence] = {}  # by slot, in order of admission
        self._free_slots = list(reversed(range(max_num_seqs)))
        self._freed_slots: list[int] = []  # since the last plan
        self._in_flight: deque[Batch] = deque()
        self._failures: list[RequestDelta] = []
        self._num_added = 0
        self._next_step = 0
        self._counters = Counters(accepted_per_position=[0] * self._drafts.max_drafts)
        self._last_step_seconds = 0.0
        self._last_step_rows = 0

    @classmethod
    def from_config(cls, config: EngineConfig, *, max_model_len: int, num_pages: int) -> "Scheduler":
        return cls(
            PageManager(num_pages),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            drafts=DraftPolicy(config.num_draft_tokens, adaptive=config.draft_policy == "adaptive"),
            seed=config.seed,
        )

    # ------------------------------------------------------------------------------------------ requests

    def add(self, request: AddRequest) -> None:
        """Queues a request. One that can never run fails: `take_failures` has its delta."""
        num_prompt = len(request.token_ids)
        if (first := self._sequences.get(request.request_id)) is not None:
            self._fail(first, f"request_id {request.request_id!r} was used for two requests at a time")
            return
        seq = Sequence(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt=num_prompt,
            max_len=min(num_prompt + request.params.max_tokens, self._max_model_len),
            params=request.params,
            stop_ids=frozenset(request.stop_ids),
            seed=self._choose_seed(request.params.seed),
            priority=request.priority,
            arrival=self._num_added,
            turn=self._turns.take(request.tenant, num_prompt + request.params.max_tokens),
            root_digest=root_digest(request.cache_salt),
        )
        self._num_added += 1
        self._sequences[seq.request_id] = seq
        if not 0 < num_prompt < self._max_model_len:
            self._fail(seq, f"a prompt must have 1 to {self._max_model_len - 1} tokens, this one has {num_prompt}")
        elif request.params.grammar:
            self._preparing.hold(seq)
        else:
            self._enqueue(seq)

    def take_preparations(self) -> list[PrepareGrammar]:
        """What the workers must be told of the requests added since the last call; each is answered to `prepared`."""
        return self._preparing.take_messages()

    def prepared(self, ready: GrammarReady) -> None:
        """The request of this key can run, or fails."""
        seq = self._preparing.release(ready.key)
        if seq is not None and ready.problem is None:
            self._enqueue(seq)
        elif seq is not None:
            self._fail(seq, ready.problem or "")

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drops requests wherever they are. Unknown ids are ignored; no delta follows."""
        for request_id in request_ids:
            if (seq := self._sequences.get(request_id)) is not None:
                self._finish(seq)

    def take_failures(self) -> list[RequestDelta]:
        """Last deltas of the requests that failed since the last call, for want of pages or by a bad request."""
        failures, self._failures = self._failures, []
        return failures

    # ------------------------------------------------------------------------------------------ planning

    @property
    def num_in_flight(self) -> int:
        """Plans whose output was not seen yet."""
        return len(self._in_flight)

    def schedule(self) -> StepPlan | None:
        """The next step's plan, which must then be sent; None when there is nothing to run before more is known."""
        batch = Batch(self._next_step, self._max_rows)
        preempted = self._plan_decodes(batch)
        for seq in self._running.values():
            if batch.budget and not seq.decoding:
                batch.add_chunk(seq, self._drafts.max_drafts)
        if not preempted:
            while batch.budget and self._admit_next(batch):
                pass
        if not batch.num_rows:
            return None
        for seq, _ in batch.prefilled.values():  # not before: no row may read what another of the same step writes
            self._register_pages(seq)
        freed, self._freed_slots = self._freed_slots, []
        self._in_flight.append(batch)
        self._next_step += 1
        return batch.plan(freed)

    def _plan_decodes(self, batch: Batch) -> bool:
        """Adds the decoding sequences; returns whether pages are so short that nobody may be admitted.

        Where pages lack even without drafts, the step waits for plans in flight that may make room (drafts are
        rejected, the only sequence ends) before a sequence gives up its own.
        """
        num_decoding = sum(seq.can_decode for seq in self._running.values())
        draft = self._drafts.choose(num_decoding) if num_decoding else self._drafts.chosen
        # Never so many that some sequences would have to sit out the next step.
        draft = min(draft, max(0, self._max_rows // max(num_decoding, 1) - 1))
        preempted = False
        while not self._try_decodes(batch, draft):
            is_alone = len(self._running) == 1
            if self._in_flight and (is_alone or any(sent.verify for sent in self._in_flight)):
                return True
            victim = max(self._running.values(), key=lambda seq: seq.order)
            if is_alone:
                self._fail(victim, self._no_room(len(victim.token_ids) + 1))
            else:
                self._preempt(victim)
                preempted = True
        return preempted

    def _try_decodes(self, batch: Batch, draft: int) -> bool:
        """Adds the decoding sequences if pages allow; drafts are dropped where pages or rows do not allow them."""
        ready = [seq for seq in self._running.values() if seq.can_decode]
        held = max((seq.num_drafts for seq in ready), default=0)
        for verify, make in dict.fromkeys(((held, draft), (0, draft), (0, 0))):
            rows = 1 + verify
            fitting = ready[: batch.budget // rows]
            growing = {seq: count for seq in fitting if (count := seq.pages_for_step(rows, make))}
            all_fit = len(fitting) == len(ready) or not verify
            if all_fit and sum(growing.values()) <= self._pages.num_available:
                batch.verify, batch.draft = verify, make
                for seq in fitting:
                    batch.add_decode(seq, self._pages.allocate(growing[seq]) if seq in growing else [])
                return True
        return False

    def _admit_next(self, batch: Batch) -> bool:
        """Moves the head of the queue to a slot, if there is one, and pages for all its tokens, and a head."""
        seq = self._waiting.peek()
        if seq is None or not self._free_slots:
            return False
        available = self._pages.num_available
        available -= min(len(self._running), int(self._pages.num_pages * HEADROOM_SHARE))
        if available < seq.pages_wanted:
            return False
        cached = self._cached_pages(seq)
        num_new = pages_for(len(seq.token_ids)) - len(cached)
        seq.pages_wanted = num_new + self._pages.count_idle(cached)
        if available < seq.pages_wanted:
            return False
        self._waiting.pop()
        self._turns.started(seq)
        self._pages.acquire(cached)
        seq.pages = cached + self._pages.allocate(num_new)
        seq.num_registered = len(cached)
        seq.num_computed = len(cached) * PAGE_SIZE
        seq.slot = self._free_slots.pop()
        self._running[seq.slot] = seq
        self._count_admission(seq)
        batch.admit(seq)
        batch.add_chunk(seq, self._drafts.max_drafts)
        return True

    def _cached_pages(self, seq: Sequence) -> list[int]:
        """Pages of the longest cached prefix that leaves at least one token to compute."""
        pages: list[int] = []
        if not self._prefix_caching or seq.needs_every_row:
            return pages
        for index in range((len(seq.token_ids) - 1) // PAGE_SIZE):
            page = self._pages.find(seq.digest(index))
            if page is None:
                break
            pages.append(page)
        return pages

    def _register_pages(self, seq: Sequence) -> None:
        """Makes findable the pages that plans sent so far fill with committed tokens."""
        if not self._prefix_caching:
            return
        num_full = min(seq.num_computed, len(seq.token_ids)) // PAGE_SIZE
        while seq.num_registered < num_full:
            self._pages.register(seq.pages[seq.num_registered], seq.digest(seq.num_registered))
            seq.num_registered += 1

    # ------------------------------------------------------------------------------------------ results

    def update(self, output: StepOutput) -> list[RequestDelta]:
        """Takes in the output of the oldest plan in flight.

        Raises RuntimeError when the output is not of that plan or does not have its shape: the workers are broken.
        """
        batch = self._in_flight.popleft() if self._in_flight else None
        if batch is None or batch.step != output.step:
            raise RuntimeError(f"a worker answered step {output.step}, expected {batch.step if batch else 'none'}")
        self._last_step_seconds, self._last_step_rows = output.seconds, batch.num_rows
        scores = match_scores(batch, output.prompt_scores)
        if not len(batch.sampled) == len(output.tokens) == len(output.logprobs):
            raise RuntimeError(
                f"step {output.step} sampled {len(batch.sampled)} sequences, a worker answered "
                f"{len(output.tokens)} token lists and {len(output.logprobs)} logprob lists"
            )
        deltas = []
        if not batch.has_chunks and batch.verify == batch.draft:
            self._drafts.observe(batch.num_decoding, batch.verify, output.seconds)
        for (seq, reserved, drafts), tokens, logprobs in zip(
            batch.sampled, output.tokens, output.logprobs, strict=True
        ):
            if not 1 <= len(tokens) <= 1 + drafts:
                raise RuntimeError(f"step {output.step}: {len(tokens)} tokens for a sequence with {drafts} drafts")
            seq.num_reserved -= reserved
            if seq.finished:  # a ghost: it ended after this plan was sent
                continue
            self._count_drafts(drafts, len(tokens) - 1)
            delta = accept(seq, tokens, logprobs, scores.pop(seq, []), drafts)
            deltas.append(delta)
            self._counters.generated_tokens += len(delta.token_ids)
            self._settle(seq, reserved - len(tokens), ended=delta.finish_reason is not None)
        for seq, rows in scores.items():
            deltas.append(accept(seq, [], [], rows, 0))
        return deltas

    def _settle(self, seq: Sequence, num_rejected: int, *, ended: bool) -> None:
        """After tokens were committed: pages become findable, and the sequence ends or may be admitted again."""
        if seq.slot is not None:
            seq.num_computed -= num_rejected
            self._register_pages(seq)
        if ended:
            self._finish(seq)
        elif seq.slot is None and not seq.num_reserved:
            self._enqueue(seq)

    # ------------------------------------------------------------------------------------------ moving sequences

    def _enqueue(self, seq: Sequence) -> None:
        num_positions = min(len(seq.token_ids) + 1, seq.max_len - 1)  # the last token is never computed
        if pages_for(num_positions) > self._pages.num_pages:
            self._fail(seq, self._no_room(num_positions))
            return
        seq.pages_wanted = 0
        self._waiting.push(seq)

    def _preempt(self, seq: Sequence) -> None:
        self._counters.preemptions += 1
        self._vacate(seq)
        if not seq.num_reserved:  # else when its tokens in flight have arrived
            self._enqueue(seq)

    def _fail(self, seq: Sequence, message: str) -> None:
        self._failures.append(RequestDelta(seq.request_id, [], finish_reason="error", error=message))
        self._finish(seq)

    def _finish(self, seq: Sequence) -> None:
        seq.finished = True
        del self._sequences[seq.request_id]
        self._preparing.discard(seq)
        self._waiting.discard(seq)
        self._vacate(seq)

    def _vacate(self, seq: Sequence) -> None:
        """Gives back slot and pages at once: plans run in order, so those in flight still find them unchanged."""
        if seq.slot is None:
            return
        del self._running[seq.slot]
        self._free_slots.append(seq.slot)
        self._freed_slots.append(seq.slot)
        self._pages.release(seq.pages)
        seq.slot = None
        seq.pages = []
        seq.num_computed = 0
        seq.num_drafts = 0
        seq.decoding = False

    # ------------------------------------------------------------------------------------------ figures

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._sequences) - len(self._running),
            pages_used=self._pages.num_held,
            pages_total=self._pages.num_pages,
            step_seconds=self._last_step_seconds,
            step_tokens=self._last_step_rows,
            preemptions=self._counters.preemptions,
            prefix_queries=self._counters.prefix_queries,
            prefix_hits=self._counters.prefix_hits,
            prompt_tokens=self._counters.prompt_tokens,
            generated_tokens=self._counters.generated_tokens,
            max_drafts=self._drafts.max_drafts,
            chosen_drafts=self._drafts.chosen,
            accept_length=self._drafts.accept_length,
            verifications=self._counters.verifications,
            draft_tokens=self._counters.draft_tokens,
            accepted_per_position=list(self._counters.accepted_per_position),
        )

    def check_integrity(self) -> None:
        """O(1), for when nothing is in flight. Raises RuntimeError when a request is stuck or something leaked."""
        unfinished = len(self._sequences) - len(self._preparing)
        if unfinished or self._waiting or self._running:
            raise RuntimeError(f"no step is in flight, yet {unfinished} requests are unfinished")
        if len(self._free_slots) != self._max_num_seqs or self._pages.num_held:
            raise RuntimeError(
                f"idle with {len(self._free_slots)} of {self._max_num_seqs} slots free "
                f"and {self._pages.num_held} pages held"
            )

    def _count_admission(self, seq: Sequence) -> None:
        if seq.num_cached is not None:
            return  # preempted before: its user and the counters know of the first time only
        seq.num_cached = seq.num_computed
        self._counters.prompt_tokens += seq.num_prompt
        if self._prefix_caching and not seq.needs_every_row:
            self._counters.prefix_queries += seq.num_prompt
            self._counters.prefix_hits += seq.num_cached

    def _count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        if not num_drafts:
            return
        self._drafts.verified(num_drafts, num_accepted)
        self._counters.verifications += 1
        self._counters.draft_tokens += num_drafts
        for position in range(num_accepted):
            self._counters.accepted_per_position[position] += 1

    def _choose_seed(self, seed: int | None) -> int:
        if seed is not None:
            return to_signed64(seed)
        if self._seed is None:
            return to_signed64(secrets.randbits(64))
        digest = hashlib.sha256(f"{self._seed}:{self._num_added}".encode()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)

    def _no_room(self, num_positions: int) -> str:
        return (
            f"the request needs {pages_for(num_positions)} KV cache pages of {PAGE_SIZE} tokens, the cache has "
            f"{self._pages.num_pages}: raise kv_cache_bytes (on a GPU: kv_cache_memory_fraction) or shorten the request"
        )
