"""The queue of sequences that hold no slot."""

import heapq

from serve.driver.sequence import Sequence
from workers.step import PrepareGrammar

_MANY_TENANTS = 1000


class Turns:
    """Start-time fair queuing of tenants (Goyal et al. 1996): a sequence's turn comes after as much work as its tenant
    asked for before, counted from where those in slots are now. Of one tenant alone the turns are those of arrival, and
    one that was idle has saved up nothing."""

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str, int] = {}  # by tenant that asked for more than had its turn

    def take(self, tenant: str, work: int) -> int:
        """The turn of a sequence that may take `work` tokens."""
        turn = max(self._now, self._ends.get(tenant, 0))
        self._ends[tenant] = turn + work
        return turn

    def started(self, seq: Sequence) -> None:
        """A sequence got a slot."""
        self._now = max(self._now, seq.turn)
        if len(self._ends) > _MANY_TENANTS:
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}


class WaitingQueue:
    """A heap by `Sequence.order` with removal from anywhere in amortised O(1)."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._num_dead = 0  # entries whose sequence was discarded

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    def push(self, seq: Sequence) -> None:
        seq.queued = True
        heapq.heappush(self._heap, (seq.order, seq))

    def peek(self) -> Sequence | None:
        """The next sequence, without taking it."""
        while self._heap and not self._heap[0][1].queued:
            heapq.heappop(self._heap)
            self._num_dead -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Takes the next sequence. Raises IndexError when there is none."""
        if self.peek() is None:
            raise IndexError("no sequence waits")
        seq = heapq.heappop(self._heap)[1]
        seq.queued = False
        return seq

    def discard(self, seq: Sequence) -> None:
        """Removes a sequence that will not come back; does nothing if it is not queued."""
        if not seq.queued:
            return
        seq.queued = False
        self._num_dead += 1
        if 2 * self._num_dead > len(self._heap):  # else an abort storm behind a blocked head would hold its memory
            self._heap = [entry for entry in self._heap if entry[1].queued]
            heapq.heapify(self._heap)
            self._num_dead = 0


class Preparing:
    """Sequences whose grammar a worker compiles; only then do they wait like the others."""

    def __init__(self) -> None:
        self._held: dict[int, Sequence] = {}  # by arrival
        self._messages: list[PrepareGrammar] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, seq: Sequence) -> None:
        self._held[seq.arrival] = seq
        self._messages.append(PrepareGrammar(seq.arrival, seq.params.grammar))

    def take_messages(self) -> list[PrepareGrammar]:
        """What the workers must be told of the sequences held since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def release(self, key: int) -> Sequence | None:
        """The sequence whose grammar was answered for; None if it has left."""
        return self._held.pop(key, None)

    def discard(self, seq: Sequence) -> None:
        """Whether it is held or not."""
        self._held.pop(seq.arrival, None)
