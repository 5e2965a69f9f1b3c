"""What Prometheus scrapes at /metrics: vLLM's names where it has them, `rollout:` for what it doesn't count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

# Of staleness, in versions: +Inf follows.
_BEHIND = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)

_COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens of the requests taken, once a request."),
    "vllm:generation_tokens": ("sampled_tokens", "Tokens sampled."),
    "vllm:num_preemptions": ("preemptions", "Sequences preempted for want of KV-cache blocks."),
    "vllm:prefix_cache_queries": ("prefix_query_tokens", "Tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("prefix_hit_tokens", "Tokens found in the prefix cache."),
}
_GAUGES = {
    "vllm:num_requests_running": ("running", "Sequences in the running batch."),
    "vllm:num_requests_waiting": ("waiting", "Sequences that wait to run."),
    "rollout:weight_epoch": ("epoch", "Commits since the engine started: the epoch that serves."),
}


class Metrics:
    """The series of one server. All but the refusals are read off the engine at each scrape."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._registry = CollectorRegistry(auto_describe=True)
        self._refusals = Counter(
            "rollout:weight_call_refusals",
            "Control calls of weight updates that were answered with an error.",
            ["model_name", "call", "status"],
            registry=self._registry,
        )

    def refused(self, call: str, status: int) -> None:
        """Count a weight call that was answered with this HTTP error."""
        self._refusals.labels(self._model, call, str(status)).inc()

    def render(self, stats: dict[str, Any]) -> bytes:
        """The exposition text, from the engine's `stats`."""
        return generate_latest(_Families([*self._registry.collect(), *self._read(stats)]))

    def _read(self, stats: dict[str, Any]) -> Iterator[Metric]:
        for name, (key, help) in _COUNTERS.items():
            yield self._one(CounterMetricFamily(name, help, labels=["model_name"]), stats.get(key, 0))
        for name, (key, help) in _GAUGES.items():
            yield self._one(GaugeMetricFamily(name, help, labels=["model_name"]), stats[key])
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of blocks in use, 0 to 1.", labels=["model_name"])
        yield self._one(usage, 1 - stats["free_blocks"] / stats["num_blocks"])
        yield self._finished(stats)
        yield from self._updates(stats["weight_updates"])
        yield self._staleness({int(behind): count for behind, count in stats["staleness"].items()})

    def _one(self, family: CounterMetricFamily | GaugeMetricFamily, value: float) -> Metric:
        family.add_metric([self._model], value)
        return family

    def _finished(self, stats: dict[str, Any]) -> Metric:
        labels = ["model_name", "finished_reason"]
        family = CounterMetricFamily("vllm:request_success", "Choices that have ended.", labels=labels)
        for reason in ("stop", "length", "abort"):
            family.add_metric([self._model, reason], stats.get(f"finished_{reason}", 0))
        return family

    def _updates(self, totals: dict[str, dict[str, float]]) -> Iterator[Metric]:
        for name, key, help in (
            ("rollout:weight_updates", "updates", "Weight updates that have ended."),
            ("rollout:weight_update_bytes", "bytes", "Bytes received for them."),
            ("rollout:weight_update_seconds", "seconds", "Seconds from their start to their end."),
        ):
            family = CounterMetricFamily(name, help, labels=["model_name", "result"])
            for result, numbers in totals.items():
                family.add_metric([self._model, result], numbers[key])
            yield family

    def _staleness(self, counts: dict[int, int]) -> Metric:
        family = HistogramMetricFamily(
            "rollout:token_staleness",
            "Tokens of choices that have ended, by how many versions their weights were behind the serving ones then.",
            labels=["model_name"],
        )
        buckets = [(str(float(top)), float(sum(n for b, n in counts.items() if b <= top))) for top in _BEHIND]
        buckets.append(("+Inf", float(sum(counts.values()))))
        family.add_metric([self._model], buckets, sum(behind * count for behind, count in counts.items()))
        return family


class _Families:
    """What generate_latest asks for its metrics."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
