"""The engine's state of one request."""

from dataclasses import dataclass, field

from configs.engine import PAGE_SIZE
from serve.driver.pages import page_digest, pages_for
from workers.step import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """A request from `add` to its end. It is waiting (slot is None), running, or finished.

    Tokens are *committed* once the host knows them (`token_ids`) and *reserved* while a plan in flight may still
    deliver them (`num_reserved`). A running sequence is prefilling until a chunk that samples has been planned;
    from then on the device has its last token and it decodes, though the host may not know that token yet.
    """

    request_id: str
    token_ids: list[int]  # prompt, then committed output
    num_prompt: int
    max_len: int  # prompt and output tokens at most; num_prompt < max_len
    params: SamplingParams
    stop_ids: frozenset[int]
    seed: int  # signed 64 bit
    priority: int
    arrival: int
    turn: int  # see `Turns`
    root_digest: bytes

    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0  # positions whose KV is computed, or will be by the plans sent
    num_reserved: int = 0  # output tokens that plans in flight may deliver
    num_drafts: int = 0  # drafts that its slot holds, or will hold after the plans sent
    decoding: bool = False
    finished: bool = False
    queued: bool = False  # kept by WaitingQueue
    pages_wanted: int = 0  # available pages without which the last try to admit it could not succeed
    num_registered: int = 0  # while running: leading pages known to the prefix cache
    num_cached: int | None = None  # prompt tokens found cached at first admission
    num_scored: int = 0  # prompt rows whose scores were delivered, or will be by the plans sent
    started: bool = False  # a delta was sent
    _digests: list[bytes] = field(default_factory=list)  # of leading full pages, made when first asked for

    @property
    def order(self) -> tuple[int, int, int]:
        """Who runs first: lower priority value, then whose tenant's turn it is, then earlier arrival."""
        return self.priority, self.turn, self.arrival

    @property
    def can_decode(self) -> bool:
        """Whether another token may be planned; never past `max_len`, counting what is in flight."""
        return self.decoding and len(self.token_ids) + self.num_reserved < self.max_len

    def pages_for_step(self, rows: int, draft: int) -> int:
        """Pages to add so that `rows` more positions can be run, and `draft` drafts made: all but the first of them
        write a position more. A sequence's last token is never run, and what is past it needs no page."""
        positions = self.num_computed + rows + max(0, draft - 1)
        return max(0, pages_for(min(positions, self.max_len - 1)) - len(self.pages))

    @property
    def needs_every_row(self) -> bool:
        """Whether prompt rows must be computed even if their KV is cached."""
        return self.params.prompt_logits or self.params.prompt_logprobs is not None

    def digest(self, page_index: int) -> bytes:
        """Digest of a leading full page of committed tokens."""
        digests = self._digests
        while len(digests) <= page_index:
            start = len(digests) * PAGE_SIZE
            parent = digests[-1] if digests else self.root_digest
            digests.append(page_digest(parent, self.token_ids[start : start + PAGE_SIZE]))
        return digests[page_index]
