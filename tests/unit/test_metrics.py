"""What a scrape shows."""

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve import metrics
from serve.driver.messages import EngineStats
from serve.metrics import EngineMetrics, SequenceTimer

STATS = EngineStats(
    running=3, waiting=4, pages_used=25, pages_total=100, step_seconds=0.01, step_tokens=7, preemptions=2,
    prefix_queries=50, prefix_hits=20, prompt_tokens=60, generated_tokens=70,
)  # fmt: skip


def scrape(engine_metrics, stats=None):
    """{(sample name, its labels but model_name): value}"""
    samples = {}
    for family in text_string_to_metric_families(engine_metrics.render(stats).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            samples[sample.name, *labels.values()] = sample.value
    return samples


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(metrics.time, "monotonic", lambda: Clock.now)
    return Clock


def test_engine_numbers():
    samples = scrape(EngineMetrics("tiny"), STATS)
    assert samples["shoal_num_requests_running",] == 3
    assert samples["shoal_num_requests_waiting",] == 4
    assert samples["shoal_kv_cache_usage_perc",] == 0.25
    assert samples["shoal_num_preemptions_total",] == 2
    assert samples["shoal_prefix_cache_queries_total",] == 50
    assert samples["shoal_prefix_cache_hits_total",] == 20
    assert samples["shoal_prompt_tokens_total",] == 60
    assert samples["shoal_generation_tokens_total",] == 70


def test_before_the_first_step():
    samples = scrape(EngineMetrics("tiny"))
    assert ("shoal_num_requests_running",) not in samples
    assert samples["shoal_time_to_first_token_seconds_count",] == 0
    assert samples["shoal_request_success_total", "stop"] == 0


def test_names_are_valid_for_ray():
    assert not any(":" in name for name, *_ in scrape(EngineMetrics("tiny"), STATS))


def test_latencies_of_a_sequence(clock):
    engine_metrics = EngineMetrics("tiny")
    timer = SequenceTimer(engine_metrics)
    for seconds, tokens in [(0.5, 0), (0.25, 1), (0.125, 1), (1.0, 4)]:
        clock.now += seconds
        timer.add_tokens(tokens)
    clock.now += 1
    timer.finish("length")
    timer.finish("abort")  # too late
    samples = scrape(engine_metrics)
    assert samples["shoal_time_to_first_token_seconds_count",] == 1
    assert samples["shoal_time_to_first_token_seconds_sum",] == 0.75
    assert samples["shoal_inter_token_latency_seconds_count",] == 5
    assert samples["shoal_inter_token_latency_seconds_sum",] == 1.125
    assert samples["shoal_inter_token_latency_seconds_bucket", "0.1"] == 0
    assert samples["shoal_inter_token_latency_seconds_bucket", "0.25"] == 5
    assert samples["shoal_request_time_per_output_token_seconds_sum",] == 0.225
    assert samples["shoal_e2e_request_latency_seconds_sum",] == 2.875
    assert samples["shoal_request_success_total", "length"] == 1
    assert samples["shoal_request_success_total", "abort"] == 0


def test_aborts_have_no_latency(clock):
    engine_metrics = EngineMetrics("tiny")
    SequenceTimer(engine_metrics).finish("abort")
    samples = scrape(engine_metrics)
    assert samples["shoal_request_success_total", "abort"] == 1
    assert samples["shoal_e2e_request_latency_seconds_count",] == 0


def test_speculation():
    stats = msgspec.structs.replace(
        STATS, max_drafts=3, chosen_drafts=2, accept_length=2.25, verifications=10, draft_tokens=25,
        accepted_per_position=[8, 4, 1],
    )  # fmt: skip
    samples = scrape(EngineMetrics("tiny"), stats)
    assert samples["shoal_spec_decode_num_drafts_total",] == 10
    assert samples["shoal_spec_decode_num_draft_tokens_total",] == 25
    assert samples["shoal_spec_decode_num_accepted_tokens_total",] == 13
    positions = [samples["shoal_spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(3)]
    assert positions == [8, 4, 1]
    assert samples["shoal_spec_decode_accept_length",] == 2.25
    assert samples["shoal_spec_decode_chosen_draft_tokens",] == 2


def test_no_speculation_no_figures_of_it():
    assert not [name for name, *_ in scrape(EngineMetrics("tiny"), STATS) if "spec_decode" in name]
