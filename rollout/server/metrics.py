"""What Prometheus scrapes at /metrics: vLLM's names where it has them, `rollout:` for what it doesn't count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from rollout.messages import LATENCY_BUCKETS, EngineReady
from rollout.server.latency import Histograms, buckets

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)

# vLLM's: `engine` is the data-parallel rank.
_LABELS = ["model_name", "engine"]
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
    """The series of one server. All but refusals and latencies are read off the engine at each scrape.

    `cache` are settings of the KV cache, which become labels, beside what `model` and the engine say of it.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str, model: EngineReady, cache: Mapping[str, object]) -> None:
        self._model, self._facts, self._cache = model_name, model, cache
        self._registry = CollectorRegistry(auto_describe=True)
        self._refusals = Counter(
            "rollout:weight_call_refusals",
            "Control calls of weight updates that were answered with an error.",
            ["model_name", "call", "status"],
            registry=self._registry,
        )
        self.histograms = Histograms()

    def refused(self, call: str, status: int) -> None:
        """Count a weight call that was answered with this HTTP error."""
        self._refusals.labels(self._model, call, str(status)).inc()

    def render(self, stats: dict[int, dict[str, Any]], restarts: dict[int, int]) -> bytes:
        """The exposition text, from the `stats` of the engines that live and the `restarts` of all, by rank."""
        families = [*self._registry.collect(), *self._read(stats), *self._life(stats, restarts)]
        families += self.histograms.families(self._model, _LABELS, restarts)
        return generate_latest(_Families(families))

    def _read(self, stats: dict[int, dict[str, Any]]) -> Iterator[Metric]:
        for name, (key, help) in _COUNTERS.items():
            yield self._each(
                CounterMetricFamily(name, help, labels=_LABELS), {r: s.get(key, 0) for r, s in stats.items()}
            )
        for name, (key, help) in _GAUGES.items():
            yield self._each(GaugeMetricFamily(name, help, labels=_LABELS), {r: s[key] for r, s in stats.items()})
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of blocks in use, 0 to 1.", labels=_LABELS)
        yield self._each(usage, {r: 1 - s["free_blocks"] / s["num_blocks"] for r, s in stats.items()})
        yield from self._waiting(stats)
        yield self._sleep(stats)
        yield self._finished(stats)
        yield from self._updates(stats)
        yield self._staleness(stats)

    def _waiting(self, stats: dict[int, dict[str, Any]]) -> Iterator[Metric]:
        help = (
            "Sequences that wait: for seats, tokens or blocks (capacity), or for an engine that is halted (deferred)."
        )
        reasons = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", help, labels=[*_LABELS, "reason"])
        help = "Seconds that requests waited before they were first scheduled."
        queue = HistogramMetricFamily("vllm:request_queue_time_seconds", help, labels=_LABELS)
        help = "The KV cache, in the labels; always 1."
        sizes = ("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency")
        cache = GaugeMetricFamily("vllm:cache_config_info", help, labels=[*_LABELS, *sizes, *self._cache])
        for rank, counted in stats.items():
            labels = [self._model, str(rank)]
            for reason, halted in (("capacity", False), ("deferred", True)):
                reasons.add_metric([*labels, reason], counted["waiting"] * (counted["halted"] == halted))
            queue.add_metric(labels, buckets(LATENCY_BUCKETS, counted["waits"]), counted["waited_s"])
            block, blocks = self._facts.block_size, counted["num_blocks"]
            told = (block, blocks, block * blocks, block * blocks / self._facts.max_model_len, *self._cache.values())
            cache.add_metric([*labels, *map(str, told)], 1)
        yield from (reasons, queue, cache)

    def _life(self, stats: dict[int, dict[str, Any]], restarts: dict[int, int]) -> Iterator[Metric]:
        up = GaugeMetricFamily("rollout:engine_up", "1 while the engine serves, else 0.", labels=_LABELS)
        yield self._each(up, {rank: float(rank in stats) for rank in restarts})
        again = CounterMetricFamily("rollout:engine_restarts", "Engines that died and were replaced.", labels=_LABELS)
        yield self._each(again, restarts)

    def _each(self, family: Family, values: Mapping[int, float]) -> Family:
        for rank, value in values.items():
            family.add_metric([self._model, str(rank)], value)
        return family

    def _sleep(self, stats: dict[int, dict[str, Any]]) -> Metric:
        help = "1 for the state that the engine is in: awake, or asleep at level 1 (weights_offloaded) or 2."
        family = GaugeMetricFamily("vllm:engine_sleep_state", help, labels=[*_LABELS, "sleep_state"])
        for rank, counted in stats.items():
            for level, state in enumerate(("awake", "weights_offloaded", "discard_all")):
                family.add_metric([self._model, str(rank), state], counted.get("sleep_level", 0) == level)
        return family

    def _finished(self, stats: dict[int, dict[str, Any]]) -> Metric:
        labels = [*_LABELS, "finished_reason"]
        family = CounterMetricFamily("vllm:request_success", "Choices that have ended.", labels=labels)
        for rank, counted in stats.items():
            for reason in ("stop", "length", "abort", "error"):
                family.add_metric([self._model, str(rank), reason], counted.get(f"finished_{reason}", 0))
        return family

    def _updates(self, stats: dict[int, dict[str, Any]]) -> Iterator[Metric]:
        for name, key, help in (
            ("rollout:weight_updates", "updates", "Weight updates that have ended."),
            ("rollout:weight_update_bytes", "bytes", "Bytes received for them."),
            ("rollout:weight_update_seconds", "seconds", "Seconds from their start to their end."),
        ):
            family = CounterMetricFamily(name, help, labels=[*_LABELS, "result"])
            for rank, counted in stats.items():
                for result, numbers in counted["weight_updates"].items():
                    family.add_metric([self._model, str(rank), result], numbers[key])
            yield family

    def _staleness(self, stats: dict[int, dict[str, Any]]) -> Metric:
        family = HistogramMetricFamily(
            "rollout:token_staleness",
            "Tokens of choices that have ended, by how many versions their weights were behind the serving ones then.",
            labels=_LABELS,
        )
        for rank, counted in stats.items():
            counts = {int(behind): count for behind, count in counted["staleness"].items()}
            buckets = [(str(float(top)), float(sum(n for b, n in counts.items() if b <= top))) for top in _BEHIND]
            buckets.append(("+Inf", float(sum(counts.values()))))
            total = sum(behind * count for behind, count in counts.items())
            family.add_metric([self._model, str(rank)], buckets, total)
        return family


class _Families:
    """What generate_latest asks for its metrics."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
