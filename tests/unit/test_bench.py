"""Figures of `shoal bench serve` from records made by hand, arrivals, and prompts."""

import math
from pathlib import Path

import numpy as np
import pytest

from configs.base import ConfigError
from serve.bench.load import arrivals, random_prompts, random_words, read_prompts
from serve.bench.requests import BenchRequest, Endpoint, Record
from serve.bench.summary import details, header, summarise, table
from serve.cli import main

RECORDS = [
    Record(start=0.0, ttft=0.1, latency=0.5, itls=[0.1, 0.3], input_tokens=10, output_tokens=5),
    Record(start=1.0, ttft=0.2, latency=0.2, itls=[], input_tokens=20, output_tokens=1),
    Record(start=2.0, error="HTTP 500: no"),
]


def test_figures() -> None:
    result = summarise(RECORDS, 2.0, [50, 99], {"ttft": 150.0, "tpot": 100.0})
    assert (result["completed"], result["failed"], result["duration"]) == (2, 1, 2.0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 6)
    assert (result["request_throughput"], result["request_goodput"]) == (1.0, 0.5)
    assert (result["output_throughput"], result["total_token_throughput"]) == (3.0, 18.0)
    samples = {"ttft": [100, 200], "tpot": [100], "itl": [100, 300], "e2el": [500, 200]}
    for name, values in samples.items():
        assert result[f"mean_{name}_ms"] == pytest.approx(np.mean(values))
        assert result[f"median_{name}_ms"] == pytest.approx(np.median(values))
        assert result[f"std_{name}_ms"] == pytest.approx(np.std(values))
        assert result[f"p99_{name}_ms"] == pytest.approx(np.percentile(values, 99))
    assert all(type(value) in (int, float) for value in result.values())
    assert "2 done, 1 failed" in table(result, ["ttft"], [50, 99])
    lists = details(RECORDS)
    assert lists["itls"] == [[0.1, 0.3], [], []] and lists["errors"] == ["", "", "HTTP 500: no"]


def test_nothing_completed() -> None:
    result = summarise(RECORDS[2:], 1.0, [99], {})
    assert (result["completed"], result["mean_ttft_ms"], result["request_goodput"]) == (0, 0.0, None)


def test_header_names_the_backend() -> None:
    assert header("m", 3, math.inf, None, "/v1/completions")["backend"] == "openai"
    chat = header("m", 3, 2.5, 8, "/v1/chat/completions")
    assert (chat["backend"], chat["request_rate"], chat["max_concurrency"]) == ("openai-chat", 2.5, 8)


def test_arrivals() -> None:
    assert arrivals(3, math.inf, 1) == [0.0] * 3
    times = arrivals(4000, 20.0, 1)
    assert times == arrivals(4000, 20.0, 1) != arrivals(4000, 20.0, 2)
    gaps = np.diff([0.0, *times])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.05, rel=0.05) and gaps.std() == pytest.approx(0.05, rel=0.1)  # exponential


def test_prompts(tmp_path: Path) -> None:
    made = random_prompts(3, 5, 7, 100, seed=1)
    assert made == random_prompts(3, 5, 7, 100, seed=1) != random_prompts(3, 5, 7, 100, seed=2)
    assert all(len(r.prompt) == 5 and r.output_len == 7 and max(r.prompt) < 100 for r in made)
    assert [len(str(r.prompt).split()) for r in random_words(2, 6, 1, 0)] == [6, 6]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "output_len": 3}\n')
    assert read_prompts(file, 3, 9) == [BenchRequest("a", 9), BenchRequest("b", 3), BenchRequest("a", 9)]
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ConfigError, match=r"prompts.jsonl, line 2: must be JSON like"):
        read_prompts(file, 1, 1)


def test_bodies() -> None:
    plain = Endpoint("http://a/", "/v1/completions", "m", {"seed": 3}, ignore_eos=True)
    assert plain.url == "http://a/v1/completions"
    body = plain.body(BenchRequest([1, 2], 5))
    assert body["prompt"] == [1, 2] and body["max_tokens"] == 5 and body["seed"] == 3 and body["ignore_eos"] is True
    chat = Endpoint("http://a", "/v1/chat/completions", "m", {"temperature": 1}).body(BenchRequest("hi", 5))
    assert chat["messages"] == [{"role": "user", "content": "hi"}] and chat["temperature"] == 1
    assert "ignore_eos" not in chat and chat["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--goodput", "itl:5"], "--goodput itl:5: metrics are ttft, tpot and e2el"),
        (["--goodput", "ttft"], "--goodput ttft: write NAME:VALUE"),
        (["--metric-percentiles", "90,x"], "--metric-percentiles 90,x: write numbers"),
        (["--metric-percentiles", "101"], "percentiles are 0 to 100"),
        (["--percentile-metrics", "ttft,xyz"], "--percentile-metrics xyz: choose from"),
        (["--metadata", "a"], "--metadata a: write NAME=VALUE"),
        (["--base-url", "127.0.0.1:9"], "--base-url 127.0.0.1:9: write it with http:// or https://"),
        (["--base-url", "http://127.0.0.1:9"], "is the server up at --base-url"),
        (["--dataset-path", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--num-prompts", "1", *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--request-rate", "0"], ["--num-prompts", "0"], ["--extra-body", "[1]"]])
def test_impossible_flags(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", *flags])
