"""Stop strings do not depend on how the text is cut, and no part of one that matches is ever shown."""

import random

import pytest

from serve.stop import StopChecker


def run(stops, parts, include=False):
    checker = StopChecker(tuple(stops), include)
    shown = []
    for part in parts:
        shown.append(checker.add(part))
        if checker.matched:
            return shown, True
    return [*shown, checker.flush()], False


def test_without_stops_text_passes():
    assert run([], ["a", "", "bc"]) == (["a", "", "bc", ""], False)


def test_a_beginning_is_held_back_and_given_when_it_does_not_match():
    assert run(["DEF"], ["ABC ", "DE", "X"]) == (["ABC ", "", "DEX", ""], False)
    assert run(["DEF"], ["ABC D", "E"]) == (["ABC ", "", "DE"], False)


def test_a_match_over_pieces():
    assert run(["DEFGHIJ"], ["ABC D", "EFG", "HIJ K"]) == (["ABC ", "", ""], True)
    assert run(["DEFGHIJ"], ["ABC D", "EFG", "HIJ K"], include=True) == (["ABC ", "", "DEFGHIJ"], True)


def test_nothing_comes_after_a_match():
    checker = StopChecker(("x",))
    assert [checker.add("ax"), checker.add("more"), checker.flush()] == ["a", "", ""]


def test_only_the_end_that_could_begin_a_stop_is_held():
    assert run(["aab"], ["aaaa"])[0] == ["aa", "aa"]
    assert run(["\n\nHuman:", "\n\nUser:"], ["hi\n", "\nthere"])[0] == ["hi", "\n\nthere", ""]


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["world", "hello"], "say hello world", "say "),
        (["c", "bcd"], "abcd", "ab"),  # "c" is complete first
        (["bc", "abc"], "xabc", "x"),  # both end together: the longer
        (["ab", "abc"], "abc", ""),
        (["🔥"], "a🔥b", "a"),
        (["aa"], "baaa", "b"),
    ],
)
def test_which_match_wins(stops, text, shown):
    for cut in (1, 2, 3, len(text)):
        parts, matched = run(stops, [text[i : i + cut] for i in range(0, len(text), cut)])
        assert ("".join(parts), matched) == (shown, True)


def test_cuts_do_not_matter():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(2000):
        text = "".join(rng.choices("abc", k=rng.randrange(1, 25)))
        stops = ["".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))]
        include = rng.random() < 0.5
        expected = run(stops, list(text), include)
        parts, rest = [], text
        while rest:
            size = rng.randrange(1, 6)
            parts.append(rest[:size])
            rest = rest[size:]
        shown, matched = run(stops, parts, include)
        assert ("".join(shown), matched) == ("".join(expected[0]), expected[1])
        assert matched == any(stop in text for stop in stops)
        if matched and not include:
            assert not any(stop in "".join(shown) for stop in stops)
