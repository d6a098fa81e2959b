import pytest

from configs.engine import PAGE_SIZE
from serve.driver.pages import PageManager, page_digest, pages_for, root_digest

ROOT = root_digest("")


def chain(*pages: list[int], salt: str = "") -> list[bytes]:
    digests, parent = [], root_digest(salt)
    for tokens in pages:
        parent = page_digest(parent, tokens)
        digests.append(parent)
    return digests


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (PAGE_SIZE, 1), (PAGE_SIZE + 1, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


def test_no_page_at_all_names_the_setting() -> None:
    with pytest.raises(ValueError, match="kv_cache_bytes"):
        PageManager(0)


def test_pages_are_given_once_and_come_back() -> None:
    pages = PageManager(4)
    first, second = pages.allocate(3), pages.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pages.num_available, pages.num_held) == (0, 4)
    with pytest.raises(RuntimeError, match="1 pages asked for, 0 available"):
        pages.allocate(1)
    pages.release(first)
    assert (pages.num_available, pages.num_held) == (3, 1)
    pages.release(second)
    pages.check_integrity()
    assert sorted(pages.allocate(4)) == [0, 1, 2, 3]


def test_a_digest_depends_on_all_tokens_before_it_and_on_the_salt() -> None:
    a, b = list(range(PAGE_SIZE)), list(range(1, PAGE_SIZE + 1))
    assert chain(a, b) == chain(a, b)
    digests = [chain(a, b)[1], chain(b, b)[1], chain(b)[0], chain(a, b, salt="x")[1], chain(a, b, salt="y")[1]]
    assert len(set(digests)) == 5
    assert {len(digest) for digest in digests} == {32}


def test_a_released_registered_page_is_found_until_it_is_evicted() -> None:
    pages = PageManager(2)
    (page,) = pages.allocate(1)
    pages.register(page, ROOT)
    pages.release([page])
    assert pages.find(ROOT) == page
    assert pages.num_available == 2
    assert pages.allocate(1) != [page], "free pages go before cached ones"
    assert pages.find(ROOT) == page
    assert pages.allocate(1) == [page]
    assert pages.find(ROOT) is None
    pages.check_integrity()


def test_a_shared_page_is_held_until_its_last_holder_leaves() -> None:
    pages = PageManager(1)
    held = pages.allocate(1)
    pages.register(held[0], ROOT)
    assert pages.count_idle(held) == 0
    pages.acquire(held)
    pages.release(held)
    assert pages.num_available == 0
    pages.release(held)
    assert pages.num_available == 1
    assert pages.count_idle(held) == 1
    pages.acquire(held)
    assert pages.num_available == 0
    pages.check_integrity()


def test_eviction_takes_the_least_recently_used_and_the_end_of_a_prefix_first() -> None:
    pages = PageManager(4)
    old, new = pages.allocate(2), pages.allocate(2)
    digests = {page: bytes([page]) for page in old + new}
    for page, digest in digests.items():
        pages.register(page, digest)
    pages.release(new)
    pages.release(old)
    pages.acquire(new)  # used again: now the most recent
    pages.release(new)
    assert [pages.allocate(1)[0] for _ in range(4)] == [old[1], old[0], new[1], new[0]]


def test_the_first_page_of_a_digest_stays_and_the_duplicate_is_freed() -> None:
    pages = PageManager(3)
    first, second = pages.allocate(2)
    pages.register(first, ROOT)
    pages.register(second, ROOT)
    pages.release([second])
    assert pages.find(ROOT) == first
    pages.release([first])
    assert pages.find(ROOT) == first
    pages.check_integrity()
    assert first not in pages.allocate(2)


def test_integrity_check_sees_a_page_in_two_states() -> None:
    pages = PageManager(2)
    held = pages.allocate(1)
    pages._free.append(held[0])
    with pytest.raises(RuntimeError, match="2 free, 0 idle and 1 held of 2"):
        pages.check_integrity()
