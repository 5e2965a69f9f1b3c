"""How long requests and their tokens took, as /metrics tells it: histograms under vLLM's names and with its buckets."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec
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
        self._last: dict[int, float] = {}
        self._first = 0.0
        self._waited = 0.0

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def read(self, rank: int, outputs: Sequence[TokenOutput]) -> None:
        """Note the times of these outputs of engine `rank`, which have just come. Tokens of a choice that come together
        share the time since the one before them; those that come with the first one have none."""
        now = time.monotonic()
        if not self._last:
            self._first, self._waited = now, outputs[0].waited_s or 0.0
            self._histograms.observe(FIRST, rank, now - self._began)
        for index, count in Counter(output.index for output in outputs if output.token_id is not None).items():
            last = self._last.get(index)
            if gaps := count - (last is None):
                self._histograms.observe(NEXT, rank, 0.0 if last is None else (now - last) / count, gaps)
            self._last[index] = now

    def timing(self, tokens: int) -> RequestTiming:
        """What is known of a request whose only choice has so many tokens."""
        if not self._last:
            return RequestTiming()
        scheduled, last = self._began + self._waited, max(self._last.values(), default=self._first)
        timing = RequestTiming(
            time_to_first_token_ms=1000 * max(0.0, self._first - scheduled),
            generation_time_ms=1000 * (last - self._first),
            queue_time_ms=1000 * self._waited,
        )
        if tokens > 1:
            timing.mean_itl_ms = 1000 * (last - self._first) / (tokens - 1)
        if last > scheduled:
            timing.tokens_per_second = tokens / (last - scheduled)
        return timing

    def end(self, rank: int, prompt_tokens: int, completion_tokens: int, n: int) -> None:
        """Note that the request has ended, with so many tokens."""
        self._histograms.observe(WHOLE, rank, self.seconds)
        for name, count in ((PROMPT, prompt_tokens), (GENERATED, completion_tokens), (CHOICES, n)):
            self._histograms.observe(name, rank, count)
