"""benchmarks/decode.py on the tiny preset: what it measures, and what it refuses."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from decode import Course, main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["decode.py", *arguments, "--device", "cpu"])
    main()


def test_only_steps_of_all_together_count() -> None:
    """The second sequence starts when the first has had three steps; two steps, three arrivals, are seen then."""
    course = Course(batch=2, steps=2)
    for tokens in (1, 1, 1):
        course.add(0, tokens)
    course.add(1, 1)
    assert not course.together(0) and not course.together(1)
    for step, tokens in enumerate((1, 2, 3)):
        assert not course.is_over
        course.add(0, tokens)
        course.add(1, 10 + step)
    assert course.is_over
    assert [arrival.tokens for arrival in course.together(0)] == [1, 2, 3]
    assert [arrival.tokens for arrival in course.together(1)] == [10, 11, 12]
    assert all(a.at < b.at for a, b in pairwise(course.together(0)))


@pytest.mark.slow
def test_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts take more steps to read (4 x 200 rows, 64 a step) than are measured."""
    file = tmp_path / "figures.json"
    settings = ("--set", "max_num_batched_tokens=64")
    cases = ("--batch", "1", "4", "--context", "200", "--drafts", "0", "2", "--steps", "2")
    run(monkeypatch, "tiny", *cases, "--json", str(file), *settings)
    figures = json.loads(file.read_text())
    assert set(figures) == {"model", "date", "card", "commit", "torch", "starts", "rows"}
    assert [(start["drafts"], start["start_s"] > 0) for start in figures["starts"]] == [(0, True), (2, True)]
    keys = ("drafts", "context", "batch", "steps")
    assert [tuple(row[key] for key in keys) for row in figures["rows"]] == [
        (drafts, 200, batch, 2) for drafts in (0, 2) for batch in (1, 4)
    ]
    for row in figures["rows"]:
        assert 0 < row["step_ms"] <= row["p99_ms"] < row["whole_s"] * 1e3
        assert row["of_floor"] == row["floor_ms"] / row["step_ms"]
        assert 1 <= row["tokens_a_step"] <= 1 + row["drafts"]
    assert "start with 2 drafts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "--steps 0: give 1 or more"),
        (("--batch", "1", "0"), "--batch 0: give 1 or more"),
        (("--drafts", "-1"), "--drafts -1: give 0 or more"),
        (("--context", "5000"), r"max_model_len \(\d+\) exceeds 4096"),
        (("--set", "attention_backend=triton"), "write NAME=VALUE with the value as JSON"),
        (("--set", "kv_cache_byte=1"), "kv_cache_byte"),
    ],
)
def test_what_cannot_work_is_said_before_a_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, "tiny", *arguments)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("kv_cache_bytes=300000",),
            r"--batch 8 --context 100: needs \d+ pages of the cache, which has \d+: take fewer",
        ),
        (("max_model_len=102",), r"--batch 1 --context 100 --steps 5: sequences may become 115 long, max_model_len is"),
    ],
)
def test_what_the_engine_cannot_hold(monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, "tiny", "--batch", "1", "8", "--context", "100", "--steps", "5", "--set", *settings)
