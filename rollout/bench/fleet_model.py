"""What `rollout bench --simulate` assumes of a fleet, and the closed forms that follow from it.

Imported with the command line, as its fields are flags, so it imports nothing slow.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from rollout.config import flag

Topology = Literal["chain", "binomial", "star", "relays"]
PresetName = Literal["smollm2-cpu", "8b-gpu"]
_NOT_NEGATIVE = (
    *("tokens_cv", "max_lag", "train_seconds", "train_us_per_token", "hop_seconds", "call_seconds", "check_seconds"),
    *("check_cv", "recompute_seconds", "server_us_per_token", "server_us_per_request", "restart_seconds"),
)
_SHARES = ("pushed_share", "receive_speed")


@dataclass(frozen=True)
class FleetModel:
    """Equal engines, one trainer, and how they are connected. Times in seconds, lengths in tokens, sizes in bytes.

    Defaults: measured on SmolLM2-135M and two CPU cores (docs/performance.md, docs/weight-updates.md) where the help
    doesn't say "assumed". Raises ValueError, naming the field, on values that can't be.
    """

    streams: int = flag(64, "Let one engine generate this many sequences at once.")
    single_tokens_per_second: float = flag(49.2, "Let an engine sample this many tokens/s for one sequence.")
    loaded_tokens_per_second: float = flag(
        710.0, "Let an engine sample this many tokens/s for --loaded-streams sequences together."
    )
    loaded_streams: int = flag(64, "Say for how many sequences --loaded-tokens-per-second was measured.")
    mean_tokens: float = flag(128.0, "Let answers have this mean length.")
    tokens_cv: float = flag(0.5, "Let lengths (lognormal) have this standard deviation over their mean; assumed.")
    prompts_per_step: int = flag(256, "Let the trainer take this many groups for a step; assumed.")
    n: int = flag(8, "Sample this many answers for a group.")
    max_lag: int = flag(
        3, "Allow this many pushes between sampling a token and training on it; 0: in turn. The demo's value."
    )
    train_seconds: float = flag(1.0, "Let a step of the trainer take this much, whatever its batch; assumed.")
    train_us_per_token: float = flag(
        10.0, "Let a step take this many microseconds more for each token of its batch; assumed."
    )
    push_every: int = flag(1, "Push after this many steps of the trainer.")
    overlap_push: bool = flag(False, "Let the trainer go on while it pushes (it needs a copy of the weights for that).")
    weight_bytes: float = flag(269e6, "Let the weights have this many bytes.")
    pushed_share: float = flag(1.0, "Push this share of the bytes: below 1 for sparse pushes.")
    topology: Topology = flag(
        "binomial",
        "Broadcast so. binomial: as gloo. chain: as NCCL. star: the trainer sends to each. relays: engines resend.",
    )
    link_bytes_per_second: float = flag(154e6, "Let one end send this much to another.")
    hop_seconds: float = flag(1e-4, "Let one transfer have this latency; assumed.")
    slice_bytes: float = flag(
        float(1 << 20), "Let a chain or a tree of relays forward this many bytes at a time; assumed."
    )
    fan_out: int = flag(2, "Let a relay send to this many engines.")
    call_seconds: float = flag(0.01, "Let the control calls of a push take this much; assumed.")
    check_seconds: float = flag(0.05, "Let an engine take this much, on average, to check what it received; assumed.")
    check_cv: float = flag(
        0.3, "Let that (lognormal) have this standard deviation over its mean; the slowest counts; assumed."
    )
    receive_speed: float = flag(0.71, "Let an engine keep this share of its speed while it receives.")
    recompute_seconds: float = flag(
        0.0, "Let a commit stop generation for this long; under `keep` it is nothing but a step."
    )
    servers: int = flag(1, "Run this many server processes; each is one core.")
    server_us_per_token: float = flag(
        18.9, "Let a server process take this much CPU time a token; 48.2 where answers are streamed."
    )
    server_us_per_request: float = flag(
        0.0, "Let it take this much CPU time a request (of n answers), where that isn't in it: routing."
    )
    mtbf_hours: float | None = flag(None, "Let an engine fail after this much time on average. Default: none fails.")
    restart_seconds: float = flag(
        6.3, "Let a failed engine take this much to serve again: a start (4.6 s) and the weights over one link."
    )

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, float | int) or isinstance(value, bool):
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and name not in _NOT_NEGATIVE):
                wanted = "0 or more" if name in _NOT_NEGATIVE else "more than 0"
                raise ValueError(f"{name} is {value}, but must be finite and {wanted}")
            if name in _SHARES and value > 1:
                raise ValueError(f"{name} is {value}, but is a share of 1")
        if self.loaded_tokens_per_second < self.single_tokens_per_second:
            raise ValueError(
                f"loaded_tokens_per_second is {self.loaded_tokens_per_second}, less than one sequence's "
                f"{self.single_tokens_per_second} (single_tokens_per_second)"
            )
        if self.loaded_tokens_per_second > self.loaded_streams * self.single_tokens_per_second:
            raise ValueError(
                f"loaded_tokens_per_second is {self.loaded_tokens_per_second}, more than {self.loaded_streams} "
                f"sequences of {self.single_tokens_per_second} tokens/s each (loaded_streams, single_tokens_per_second)"
            )

    # -- engines

    def token_seconds(self, streams: float) -> float:
        """A step of an engine that generates so many sequences: linear through the two measured points."""
        alone = 1 / self.single_tokens_per_second
        if self.loaded_streams == 1:
            return alone * max(1.0, streams)
        loaded = self.loaded_streams / self.loaded_tokens_per_second
        return alone + (loaded - alone) / (self.loaded_streams - 1) * max(0.0, streams - 1)

    def tokens_per_second(self, engines: float, streams: float) -> float:
        """Of a fleet with so many sequences in all, spread evenly."""
        return streams / self.token_seconds(streams / engines)

    @property
    def batch_tokens(self) -> float:
        """Mean tokens of one step of the trainer."""
        return self.prompts_per_step * self.n * self.mean_tokens

    def batch_seconds(self, tokens: float) -> float:
        """The trainer's step on so many tokens."""
        return self.train_seconds + tokens * self.train_us_per_token * 1e-6

    # -- a push

    def broadcast_seconds(self, engines: int) -> float:
        """One copy of the weights from the trainer to each engine. See docs/scaling.md for the formulas."""
        size, link, hop = self.weight_bytes * self.pushed_share, self.link_bytes_per_second, self.hop_seconds
        slices = math.ceil(size / self.slice_bytes)
        one = size / slices / link + hop
        match self.topology:
            case "star":
                return engines * (size / link + hop)
            case "binomial":
                return math.ceil(math.log2(engines + 1)) * (size / link + hop)
            case "chain":
                return (slices + engines - 1) * one
            case "relays":
                width = min(self.fan_out, engines)
                return (slices + self.relay_depth(engines) - 1) * width * one

    def relay_depth(self, engines: int) -> int:
        """Levels of a tree below the trainer that holds so many engines."""
        depth = held = 0
        while held < engines:
            depth += 1
            held += self.fan_out**depth
        return depth

    def slowest_check(self, engines: int) -> float:
        """The check of the slowest engine, about: the lognormal's quantile at Blom's plotting position of the last."""
        mean, deviation = lognormal(self.check_seconds, self.check_cv)
        return math.exp(mean + deviation * NormalDist().inv_cdf((engines - 0.375) / (engines + 0.25)))

    def push_seconds(self, engines: int, check_seconds: float | None = None) -> float:
        """From the trainer's first call to the commit at the next step of the fullest engine."""
        check = self.slowest_check(engines) if check_seconds is None else check_seconds
        return self.call_seconds + self.broadcast_seconds(engines) + check + self.token_seconds(self.streams)

    # -- walls

    def walls(self, engines: int) -> dict[str, float]:
        """Tokens/s that each part would allow if the others took no time."""
        push, train = self.push_seconds(engines), self.batch_seconds(self.batch_tokens)
        return {
            "engines": self.tokens_per_second(engines, engines * self.streams),
            "lag": self.lag_wall(engines, train * (self.push_every + 1) / 2 + push),
            "ingress": self.ingress_tokens_per_second,
            "trainer": self.batch_tokens / train if train else math.inf,
            "broadcast": self.push_every * self.batch_tokens / push,
        }

    def wall(self, engines: int) -> tuple[str, float]:
        """The lowest, and its tokens/s. Trainer and pushes take turns unless they overlap: the longer names it."""
        walls = self.walls(engines)
        trainer, broadcast = walls.pop("trainer"), walls.pop("broadcast")
        longer = "trainer" if trainer <= broadcast else "broadcast"
        walls[longer] = min(trainer, broadcast) if self.overlap_push else 1 / (1 / trainer + 1 / broadcast)
        name = min(walls, key=walls.__getitem__)
        return name, walls[name]

    @property
    def ingress_tokens_per_second(self) -> float:
        """What the server processes carry, each one core."""
        cost = self.server_us_per_token + self.server_us_per_request / (self.n * self.mean_tokens)
        return self.servers * 1e6 / cost if cost else math.inf

    @property
    def most_begun(self) -> int:
        """Answers that may be begun and not yet under pushed weights: what bounds the lag."""
        return (self.max_lag + 1) * self.push_every * self.prompts_per_step * self.n

    def lag_wall(self, engines: int, after: float) -> float:
        """Little's law: `most_begun` answers generate, or spend at least `after` seconds in the trainer and a push."""

        def needed(streams: float) -> float:
            return streams + self.tokens_per_second(engines, streams) / self.mean_tokens * after

        low, high = 0.0, float(engines * self.streams)
        if needed(high) <= self.most_begun:
            return self.tokens_per_second(engines, high)
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if needed(middle) <= self.most_begun else (low, middle)
        return self.tokens_per_second(engines, low)

    def failure_loss(self, engines: int) -> float:
        """Expected share of an engine's time that failures take: its restarts, and the work that is done again."""
        if self.mtbf_hours is None:
            return 0.0
        streams = min(self.streams, self.most_begun / engines)
        age = self.mean_tokens * (1 + self.tokens_cv**2) / 2 * self.token_seconds(streams)
        return min(1.0, (self.restart_seconds + age) / (self.mtbf_hours * 3600 + self.restart_seconds))


def lognormal(mean: float, cv: float) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm, of a lognormal with this mean and deviation over mean."""
    variance = math.log1p(cv**2)
    return (math.log(mean) - variance / 2 if mean else -math.inf), math.sqrt(variance)


PRESETS: dict[PresetName, dict[str, Any]] = {
    "smollm2-cpu": {},
    "8b-gpu": {
        "streams": 256,
        "single_tokens_per_second": 130.0,
        "loaded_tokens_per_second": 10_000.0,
        "loaded_streams": 256,
        "mean_tokens": 2000.0,
        "tokens_cv": 0.8,
        "prompts_per_step": 512,
        "n": 16,
        "train_seconds": 5.0,
        "train_us_per_token": 2.5,
        "weight_bytes": 16e9,
        "topology": "chain",
        "link_bytes_per_second": 25e9,
        "hop_seconds": 2e-5,
        "check_seconds": 0.1,
        "receive_speed": 0.9,
        "mtbf_hours": 50_000.0,
        "restart_seconds": 60.0,
    },
}
"""smollm2-cpu: the defaults. 8b-gpu: all assumed, none measured; docs/scaling.md says where each comes from."""


def measured(file: Path) -> dict[str, Any]:
    """Fields of a FleetModel from what `rollout bench load`, `http` or `push` wrote with --json; of loads, the fastest.

    Raises ValueError where the file holds no such figures, OSError where it can't be read.
    """
    found: dict[str, Any] = {}
    try:
        figures = json.loads(file.read_text())
        for load in figures.get("loads", ()):
            speed, streams = load["servers"][0]["tokens_per_second"]["median"], load["requests"] * load["n"]
            if streams == 1:
                found["single_tokens_per_second"] = speed
            elif speed > found.get("loaded_tokens_per_second", 0.0):
                found |= {"loaded_tokens_per_second": speed, "loaded_streams": streams}
        for cost in figures.get("costs", ()):
            if cost["load"] == "json":
                found["server_us_per_token"] = cost["server"]["median"]
        for push in figures.get("pushes", ()):
            if push["kv_policy"] == "keep":
                found["weight_bytes"] = push["push_bytes"]
                found["link_bytes_per_second"] = push["push_bytes"] / push["push_seconds"]
                found["receive_speed"] = min(1.0, push["throughput_during"] / push["throughput_before"])
    except (ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{file} isn't what `rollout bench` writes with --json: {error!r}") from None
    if not found:
        raise ValueError(f"{file} has no figures of `rollout bench load`, `http` or `push`")
    return found
