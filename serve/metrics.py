"""Prometheus metrics of one engine. Names are vLLM's with the prefix `shoal_` (Ray cannot export a colon)."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.driver.messages import EngineStats

# The floors are low enough for cache hits (first token) and for several tokens a step (between tokens).
TTFT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
ITL_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
E2E_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)


_REASONS = ("stop", "tool_calls", "length", "abort", "error")  # why sequences end


class EngineMetrics:
    """Latencies are observed by the front end; the engine's own numbers are read when scraped."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._stats = _StatsCollector(model_name)
        self.registry.register(self._stats)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"shoal_{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token of a sequence.", TTFT_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds",
            "Between tokens of a sequence; tokens of one step share its time.",
            ITL_BUCKETS,
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "A sequence's mean time a token after its first.", ITL_BUCKETS
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token of a sequence.", E2E_BUCKETS
        )
        success = Counter(
            "shoal_request_success",
            "Sequences that ended, by reason (stop, tool_calls, length, abort, error).",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._finished = {r: success.labels(model_name, r) for r in _REASONS}

        text = "Requests refused because the server was full."
        refused = Counter("shoal_request_refused", text, ["model_name"], registry=self.registry)
        self.refused = refused.labels(model_name)

    def count_finished(self, reason: str) -> None:
        self._finished[reason].inc()

    def render(self, stats: EngineStats | None) -> bytes:
        """The text format, with the engine's numbers as of now (none before its first step)."""
        self._stats.stats = stats
        return generate_latest(self.registry)


class SequenceTimer:
    """Observes one sequence's latencies. Seconds of the monotonic clock, from construction on."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._start = self._first = self._last = time.monotonic()
        self._tokens = 0
        self._finished = False

    def add_tokens(self, count: int) -> None:
        if not count:
            return
        now = time.monotonic()
        if not self._tokens:
            self._first = now
            self._metrics.time_to_first_token.observe(now - self._start)
        else:
            for _ in range(count):
                self._metrics.inter_token_latency.observe((now - self._last) / count)
        self._last = now
        self._tokens += count

    def finish(self, reason: str) -> None:
        """Only the first call counts."""
        if self._finished:
            return
        self._finished = True
        self._metrics.count_finished(reason)
        if reason in ("stop", "tool_calls", "length"):
            self._metrics.e2e_latency.observe(time.monotonic() - self._start)
            if self._tokens > 1:
                self._metrics.time_per_output_token.observe((self._last - self._first) / (self._tokens - 1))


class _StatsCollector(Collector):
    """EngineStats as gauges and counters."""

    def __init__(self, model_name: str) -> None:
        self.stats: EngineStats | None = None
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        if (stats := self.stats) is None:
            return
        used = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        yield self._gauge("num_requests_running", "Sequences in slots.", stats.running)
        yield self._gauge("num_requests_waiting", "Sequences not yet admitted.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV pages that sequences hold (1 = all).", used)
        yield self._counter("num_preemptions", "Sequences put back because pages ran out.", stats.preemptions)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits)
        yield self._counter("prompt_tokens", "Prompt tokens of admitted sequences.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        if stats.max_drafts:
            yield from self._speculation(stats)

    def _speculation(self, stats: EngineStats) -> Iterator[Metric]:
        accepted = stats.accepted_per_position
        yield self._counter("spec_decode_num_drafts", "Verifications of a sequence's drafts.", stats.verifications)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens drafted and verified.", stats.draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", sum(accepted))
        by_position = CounterMetricFamily(
            "shoal_spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their place among a step's drafts (0 = the first).",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(accepted):
            by_position.add_metric([self._model_name, str(position)], count)
        yield by_position
        yield self._gauge(
            "spec_decode_accept_length",
            "Mean tokens of a recent verification, its bonus included.",
            stats.accept_length,
        )
        yield self._gauge("spec_decode_chosen_draft_tokens", "Drafts of the latest step.", stats.chosen_drafts)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"shoal_{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"shoal_{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
