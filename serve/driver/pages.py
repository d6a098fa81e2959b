"""KV cache pages: who holds them, and which of them hold a known prefix."""

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence as AbstractSequence

from configs.engine import PAGE_SIZE

DIGEST_ROOT = b"shoal prefix\0"


def pages_for(num_tokens: int) -> int:
    """Pages that hold `num_tokens` positions."""
    return -(-num_tokens // PAGE_SIZE)


def root_digest(salt: str) -> bytes:
    """Start of the hash chain of every sequence with this salt; different salts never share a page."""
    return hashlib.sha256(DIGEST_ROOT + salt.encode()).digest()


def page_digest(parent: bytes, token_ids: list[int]) -> bytes:
    """Digest of a full page: of its own tokens and, through `parent`, of everything before them."""
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


class PageManager:
    """Hands out pages 0 .. num_pages - 1, counts their holders, and keeps full pages findable by digest.

    A page is in exactly one of three states: free (no content), held (by one sequence or, if registered, by several),
    or idle (registered, held by nobody: findable until evicted, least recently used first). Every operation is O(1)
    a page.

    Raises ValueError when there is no page at all.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(
                f"the KV cache has room for {num_pages} pages of {PAGE_SIZE} tokens: raise kv_cache_bytes "
                "(on a GPU: kv_cache_memory_fraction)"
            )
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._idle: dict[int, None] = {}  # in order of last use
        self._holders = [0] * num_pages
        self._digests: list[bytes | None] = [None] * num_pages  # of registered pages
        self._by_digest: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int]:
        """`count` pages of unknown content, evicting idle ones when free ones run out.

        Raises RuntimeError when fewer than `count` are available: callers look first.
        """
        if count > self.num_available:
            raise RuntimeError(f"{count} pages asked for, {self.num_available} available")
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def find(self, digest: bytes) -> int | None:
        """The page registered under a digest."""
        return self._by_digest.get(digest)

    def count_idle(self, pages: AbstractSequence[int]) -> int:
        """How many of these registered pages would leave the available ones if acquired."""
        return sum(not self._holders[page] for page in pages)

    def acquire(self, pages: AbstractSequence[int]) -> None:
        """Adds a holder to registered pages."""
        for page in pages:
            if not self._holders[page]:
                del self._idle[page]
            self._holders[page] += 1

    def release(self, pages: AbstractSequence[int]) -> None:
        """Takes a holder from each page of a sequence, given in order of position."""
        for page in reversed(pages):  # so that the end of a prefix is evicted before its beginning
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if self._digests[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def register(self, page: int, digest: bytes) -> None:
        """Makes a held page findable. The first page under a digest stays; a duplicate remains private."""
        if digest not in self._by_digest:
            self._by_digest[digest] = page
            self._digests[page] = digest

    def _evict(self) -> int:
        page = next(iter(self._idle))
        del self._idle[page]
        digest = self._digests[page]
        assert digest is not None
        del self._by_digest[digest]
        self._digests[page] = None
        return page

    def check_integrity(self) -> None:
        """O(pages). Raises RuntimeError when a page is in no state or in two, or an index disagrees with another."""
        free, idle = set(self._free), set(self._idle)
        held = {page for page, holders in enumerate(self._holders) if holders > 0}
        if len(free) != len(self._free) or len(free) + len(idle) + len(held) != self.num_pages:
            raise RuntimeError(f"{len(self._free)} free, {len(idle)} idle and {len(held)} held of {self.num_pages}")
        if free | idle | held != set(range(self.num_pages)) or min(self._holders) < 0:
            raise RuntimeError("a page is in two states")
        registered = {page: digest for page, digest in enumerate(self._digests) if digest is not None}
        if registered != {page: digest for digest, page in self._by_digest.items()}:
            raise RuntimeError("the digest index disagrees with the pages")
        if not idle <= registered.keys() or free & registered.keys():
            raise RuntimeError("an idle page is not registered, or a free one is")
