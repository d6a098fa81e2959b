"""/metrics after requests that ended in every way."""

import re

from serve.driver.messages import EngineStats
from tests.api.fake_engine import Script


def test_metrics_count_what_happened(make_api, bytes_of):
    api = make_api(lambda call: Script([*bytes_of("hello"), 1], fail_after=3 if call.params.seed == 0 else None))
    api.chat()
    api.complete(n=2, max_tokens=3)
    api.stream(stop="l")
    api.chat(seed=0)
    api.chat(temperature="hot")
    api.engine.stats = EngineStats(1, 2, 3, 4, 0.1, 5, 6, 7, 8, 9, 10)
    answer = api.request("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")

    def value(name, labels=""):
        return float(re.search(rf"^shoal_{name}{{{labels}model_name=\"tiny\"}} (.*)$", answer.text, re.MULTILINE)[1])

    assert value("request_success_total", 'finished_reason="stop",') == 2
    assert value("request_success_total", 'finished_reason="length",') == 2
    assert value("request_success_total", 'finished_reason="error",') == 1
    assert value("time_to_first_token_seconds_count") == 5
    assert value("e2e_request_latency_seconds_count") == 4
    assert value("inter_token_latency_seconds_count") == 5 + 2 + 2 + 2 + 1
    assert value("kv_cache_usage_perc") == 0.75
    assert value("generation_tokens_total") == 10
