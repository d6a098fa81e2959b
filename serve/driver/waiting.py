"""The queue of sequences that hold no slot."""

import heapq

from serve.driver.sequence import Sequence
from workers.step import PrepareGrammar


class WaitingQueue:
    """A heap by (priority, arrival) with removal from anywhere in amortised O(1)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._num_dead = 0  # entries whose sequence was discarded

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    def push(self, seq: Sequence) -> None:
        seq.queued = True
        heapq.heappush(self._heap, (*seq.order, seq))

    def peek(self) -> Sequence | None:
        """The next sequence, without taking it."""
        while self._heap and not self._heap[0][2].queued:
            heapq.heappop(self._heap)
            self._num_dead -= 1
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        """Takes the next sequence. Raises IndexError when there is none."""
        if self.peek() is None:
            raise IndexError("no sequence waits")
        seq = heapq.heappop(self._heap)[2]
        seq.queued = False
        return seq

    def discard(self, seq: Sequence) -> None:
        """Removes a sequence that will not come back; does nothing if it is not queued."""
        if not seq.queued:
            return
        seq.queued = False
        self._num_dead += 1
        if 2 * self._num_dead > len(self._heap):  # else an abort storm behind a blocked head would hold its memory
            self._heap = [entry for entry in self._heap if entry[2].queued]
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
