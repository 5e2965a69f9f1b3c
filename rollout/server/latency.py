"""How long requests and their tokens took, as /metrics tells it: histograms under vLLM's names and with its buckets."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from prometheus_client.core import HistogramMetricFamily

from rollout.messages import LATENCY_BUCKETS
from rollout.outputs import TokenOutput

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_NEXT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_SIZES = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))

FIRST, NEXT, WHOLE = (
    f"vllm:{name}_seconds" for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
)
PROMPT, GENERATED, CHOICES = (f"vllm:request_{name}" for name in ("prompt_tokens", "generation_tokens", "params_n"))

_BUCKETS: dict[str, tuple[Sequence[float], str]] = {
    FIRST: (_FIRST, "Seconds from a request's admission to its first token."),
    NEXT: (_NEXT, "Seconds between two tokens of a choice."),
    WHOLE: (LATENCY_BUCKETS, "Seconds from a request's admission to its end."),
    PROMPT: (_SIZES, "Prompt tokens of a request."),
    GENERATED: (_SIZES, "Tokens of all choices of a request."),
    CHOICES: ((1.0, 2.0, 5.0, 10.0, 20.0), "How many choices a request asked for (n)."),
}


class Histograms:
    """Counts by name and engine; a value costs no more than a look into its buckets."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], list[int]] = {}
        self._sums: Counter[tuple[str, int]] = Counter()

    def observe(self, name: str, rank: int, value: float, times: int = 1) -> None:
        """Note that this value came `times` times."""
        tops = _BUCKETS[name][0]
        counts = self._counts.setdefault((name, rank), [0] * (len(tops) + 1))
        counts[bisect_left(tops, value)] += times
        self._sums[name, rank] += value * times  # type: ignore[assignment]

    def observe_all(self, name: str, rank: int, values: np.ndarray, times: np.ndarray) -> None:
        """Note that each of these values came so many times, (values,) each."""
        tops = _BUCKETS[name][0]
        found = np.bincount(np.searchsorted(tops, values), weights=times, minlength=len(tops) + 1)
        before = self._counts.get((name, rank), [0] * (len(tops) + 1))
        self._counts[name, rank] = [count + int(more) for count, more in zip(before, found, strict=True)]
        self._sums[name, rank] += float(values @ times)  # type: ignore[assignment]

    def families(self, model: str, labels: Sequence[str], ranks: Iterable[int]) -> Iterator[HistogramMetricFamily]:
        """What Prometheus is told; of an engine without any value zeros."""
        ranks = list(ranks)
        for name, (tops, help) in _BUCKETS.items():
            family = HistogramMetricFamily(name, help, labels=labels)
            for rank in ranks:
                counts = self._counts.get((name, rank), [0] * (len(tops) + 1))
                family.add_metric([model, str(rank)], buckets(tops, counts), self._sums[name, rank])
            yield family


def buckets(tops: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Counts by bucket, the last one beyond all tops, as Prometheus wants them: cumulative."""
    total, found = 0, []
    for top, count in zip([*map(str, tops), "+Inf"], counts, strict=True):
        total += count
        found.append((top, float(total)))
    return found


class RequestTiming(msgspec.Struct, omit_defaults=True):
    """How long one choice took, in vLLM's fields: milliseconds from its scheduling to its first token, from there to
    its last, before it was scheduled, and between two tokens; tokens a second since it was scheduled."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None


class RequestClock:
    """The times of one request, from now on."""

    def __init__(self, histograms: Histograms) -> None:
        self._histograms = histograms
        self._began = time.monotonic()
        self._waited = 0.0
        self.first: float | None = None
        """When the first token came."""

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def read_first(self, rank: int, output: TokenOutput) -> None:
        """Note that engine `rank` has just brought the first output."""
        self.first, self._waited = time.monotonic(), output.waited_s or 0.0
        self._histograms.observe(FIRST, rank, self.first - self._began)

    def timing(self, times: Sequence[float]) -> RequestTiming:
        """What is known of a request whose only choice has tokens that came at these times."""
        if self.first is None or not times:
            return RequestTiming()
        scheduled, last = self._began + self._waited, times[-1]
        timing = RequestTiming(
            time_to_first_token_ms=1000 * max(0.0, self.first - scheduled),
            generation_time_ms=1000 * max(0.0, last - self.first),
            queue_time_ms=1000 * self._waited,
        )
        if len(times) > 1:
            timing.mean_itl_ms = 1000 * max(0.0, last - self.first) / (len(times) - 1)
        if last > scheduled:
            timing.tokens_per_second = len(times) / (last - scheduled)
        return timing

    def end(self, rank: int, prompt_tokens: int, choices: Sequence[Sequence[float]]) -> None:
        """Note that the request has ended, whose tokens came at these times, by choice. Tokens of a choice that came
        together share the time since the one before them; those that came with the first one have none."""
        self._histograms.observe(WHOLE, rank, self.seconds)
        for times in choices:
            came, counts = np.unique(np.asarray(times), return_counts=True)
            gaps = np.diff(came, prepend=came[:1]) / counts
            counts[:1] -= 1
            self._histograms.observe_all(NEXT, rank, gaps, counts)
        for name, count in ((PROMPT, prompt_tokens), (GENERATED, sum(map(len, choices))), (CHOICES, len(choices))):
            self._histograms.observe(name, rank, count)
