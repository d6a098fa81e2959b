"""`shoal bench serve` against servers of known behaviour, over sockets; the offline kinds on the shipped model."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from serve.api.auth import ApiKeys
from serve.cli import main
from tests.api.conftest import Api
from tests.api.fake_engine import Script

FIRST_S, NEXT_S = 0.05, 0.02


def slow_server(seen: list[dict[str, Any]]) -> FastAPI:
    """Four parts of two tokens: the first after 50 ms, the others after 20. Prompts tell it to misbehave."""
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "slow"}]}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> StreamingResponse | JSONResponse:
        body = await request.json()
        seen.append({**body, "key": request.headers.get("authorization")})
        prompt = body["messages"][0]["content"]
        if prompt == "refuse":
            return JSONResponse({"error": {"message": "no such thing"}}, status_code=400)
        return StreamingResponse(stream(prompt), media_type="text/event-stream")

    async def stream(prompt: str) -> AsyncIterator[str]:
        def event(value: Any) -> str:
            return f"data: {json.dumps(value)}\n\n"

        yield event({"choices": [{"delta": {"role": "assistant"}}]})
        for i in range(4):
            await asyncio.sleep(NEXT_S if i else FIRST_S)
            yield event({"choices": [{"delta": {"content": "ab"}}]})
            if prompt == "break off":
                return
            if prompt == "fail":
                yield event({"error": {"message": "engine died"}})
                return
        yield event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 8}})
        yield "data: [DONE]\n\n"

    return app


@pytest.fixture
def serve() -> Iterator[Callable[[Any], str]]:
    """Runs an ASGI app and gives its address."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: Any) -> str:
        sock = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(10)


def bench(url: str, folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    out = ["--save-result", "--result-dir", str(folder), "--result-filename", "out.json"]
    status = main(["bench", "serve", "--base-url", url, *out, *flags])
    return status, json.loads((folder / "out.json").read_text())


def prompts(folder: Path, *texts: str) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(file)


def test_times_and_counts(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    flags = ["--endpoint", "/v1/chat/completions", "--num-prompts", "6", "--max-concurrency", "3", "--goodput"]
    flags += ["ttft:1000", "--metadata", "card=none", "--extra-body", '{"seed": 4}', "--num-warmups", "2"]
    status, result = bench(serve(slow_server(seen)), tmp_path, *flags)
    assert status == 0 and result["completed"] == 6 and result["failed"] == 0
    assert (result["model_id"], result["backend"], result["card"]) == ("slow", "openai-chat", "none")
    assert result["total_input_tokens"] == 66 and result["output_lens"] == [8] * 6
    assert len(seen) == 8 and seen[-1]["seed"] == 4 and {body["key"] for body in seen} == {"Bearer secret"}
    whole = FIRST_S + 3 * NEXT_S
    assert all(FIRST_S <= ttft < FIRST_S + 0.5 for ttft in result["ttfts"])
    assert all(len(itls) == 3 and min(itls) > NEXT_S * 0.5 for itls in result["itls"])
    assert result["duration"] >= 2 * whole  # six requests, three at a time
    assert result["median_tpot_ms"] >= 3 * NEXT_S / 7 * 1e3 * 0.9
    assert result["request_goodput"] == result["request_throughput"]


def test_failures_are_counted_and_told(serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(slow_server([]))
    file = prompts(tmp_path, "refuse", "break off", "fail", "good")
    flags = ["--endpoint", "/v1/chat/completions", "--dataset-path", file, "--num-prompts"]
    status, result = bench(url, tmp_path, *flags, "4")
    assert status == 0 and (result["completed"], result["failed"]) == (1, 3)
    assert [error[:8] for error in result["errors"]] == ["HTTP 400", "the stre", "in the s", ""]
    assert "1 failed: HTTP 400: " in (told := capsys.readouterr().err) and "no such thing" in told
    prompts(tmp_path, "refuse", "refuse")
    status, result = bench(url, tmp_path, *flags, "2")
    assert status == 1 and result["completed"] == 0
    shown = capsys.readouterr()
    assert "2 failed: HTTP 400: " in shown.err and "time to first token" not in shown.out


def test_a_server_that_wants_a_key(
    serve: Any, make_api: Callable[..., Api], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = serve(make_api(lambda call: Script([50, 51]), api_keys=ApiKeys(["sesame"])).app)
    flags = ["bench", "serve", "--base-url", url, "--num-prompts", "2", "--random-input-len", "4"]
    flags += ["--random-output-len", "4", "--vocab-size", "50"]
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main(flags) == 1
    assert "answers HTTP 401: " in (told := capsys.readouterr().err) and "OPENAI_API_KEY" in told
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    assert main(flags) == 0


def test_shoal_itself(serve: Any, make_api: Callable[..., Api], tmp_path: Path) -> None:
    """Token ids in, usage and text out."""
    api = make_api(lambda call: Script([5, 6, 7, 8]))
    flags = ["--num-prompts", "3", "--random-input-len", "9", "--random-output-len", "4", "--vocab-size", "50"]
    status, result = bench(serve(api.app), tmp_path, *flags, "--ignore-eos", "--request-rate", "200")
    assert status == 0 and result["input_lens"] == [9] * 3 and result["output_lens"] == [4] * 3
    assert [len(call.token_ids) for call in api.engine.calls] == [8, 9, 9, 9]  # the first one warms up
    assert all(call.params.ignore_eos and call.params.max_tokens == 4 for call in api.engine.calls[1:])


def test_offline(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    common = ["--model", str(tiny_model), "--device", "cpu", "--input-len", "4", "--output-json", str(out)]
    small = ["--output-len", "3", "--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "0"]
    assert main(["bench", "latency", *common, *small]) == 0
    result = json.loads(out.read_text())
    assert len(result["latencies"]) == 2 and result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 2)
    assert main(["bench", "latency", *common, "--output-len", "5000"]) == 1
    assert "--input-len 4 and --output-len 5000 exceed the model's context of 4096 tokens" in capsys.readouterr().err
    assert main(["bench", "throughput", *common, "--output-len", "3", "--num-prompts", "5"]) == 0
    result = json.loads(out.read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (5, 5 * 7)
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert "requests/s" in capsys.readouterr().out
