"""The shipped model through Ray Serve on GPUs. Skipped where torch finds none."""

import socket
from pathlib import Path

import httpx
import pytest
import ray
import torch
from ray import serve as ray_serve

from serve.app import build
from serve.client import Client
from serve.llm import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = ["In the beginning God", "And the LORD said unto Moses,", "Blessed are the", "And David"]
APPLICATION = "shoal-gpu-test"


def test_text_over_http_and_handle_is_that_of_the_cpu(tiny_model: Path) -> None:
    tp = min(2, torch.cuda.device_count())
    with LLM(tiny_model, device="cpu") as llm:
        expected = [done.text for done in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40))]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(include_dashboard=False)
    try:
        ray_serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        engine = {"model": str(tiny_model), "device": "cuda", "dtype": "float32", "parallel": {"tp_size": tp}}
        ray_serve.run(build({"engine": engine}), name=APPLICATION, route_prefix="/")
        body = {"prompt": PROMPTS, "temperature": 0, "max_tokens": 40}
        over_http = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
        over_handle = Client(APPLICATION).complete(**body)
    finally:
        ray_serve.shutdown()
        ray.shutdown()
    for answer in (over_http, over_handle):
        assert [choice["text"] for choice in answer["choices"]] == expected
