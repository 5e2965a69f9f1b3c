"""Rollouts on disk, with all that it takes to sample them again: one JSON object a line.

A record is `{"request", "weights", "server", "choices"}`:

- `request`: `{"token_ids", "sampling_params"}` as posted, the `seed` among them: a request that leaves the seed to the
  server can't be sampled again, so the recorder draws one (see `record`).
- `weights`: `{"model", "version", "epoch", "checksum"}` of the weights that sampled the first token of choice 0:
  the model that the server was started with, its label and epoch, and what `checksum` gave, null if it wasn't asked.
- `server`: what `/weight_info` said of the arithmetic: `{"dtype", "logprobs_mode", "batch_invariant"}`.
- `choices`: of each its `token_ids`, `logprobs`, `sampling_mask`, `finish_reason`, `stop_reason`, and its spans as
  `weight_versions`, the wire's own names throughout.

JSON's numbers hold a float32 exactly, so logprobs come back with every bit.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer_bridge.client import Choice, Generation, RolloutClient, Span

SERVER_FACTS = ("dtype", "logprobs_mode", "batch_invariant")


@dataclass(frozen=True)
class Record:
    """One request and what came of it; see the module's docstring for the parts."""

    request: dict[str, Any]
    weights: dict[str, Any]
    server: dict[str, Any]
    choices: list[Choice]

    @property
    def seed(self) -> int | None:
        """Of the request; None for a greedy one."""
        seed: int | None = self.request["sampling_params"].get("seed")
        return seed


@dataclass(frozen=True)
class ReplayedChoice:
    """A recorded choice beside the same one sampled again.

    The first `tokens` of it were sampled by the record's weights and are compared, the `skipped` ones after them by
    weights that were pushed later. `first_difference` is the index of the first differing id, None for equal ids; up to
    there, `differing_logprobs` have other bits, by at most `largest_gap`.
    """

    index: int
    tokens: int
    skipped: int
    first_difference: int | None
    differing_logprobs: int
    largest_gap: float

    @property
    def same(self) -> bool:
        return self.first_difference is None and not self.differing_logprobs


def record(
    prompt_token_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    choices: Sequence[Choice],
    *,
    model: str | Path,
    info: Mapping[str, Any],
    checksum: str | None = None,
) -> Record:
    """The record of a finished request. `model` is what the server was started with, `info` its `/weight_info`.

    Raises ValueError for a request without a seed that isn't greedy: draw one (63 bits) for each request and send it.
    """
    params = dict(sampling_params)
    if params.get("seed") is None and params.get("temperature") != 0:
        raise ValueError("a request without a seed can't be sampled again: draw 63 bits for it and send them as `seed`")
    params["n"] = len(choices)
    first = next((span for choice in choices for span in choice.spans), None)
    weights = {
        "model": str(model),
        "version": first.version if first else None,
        "epoch": first.epoch if first else None,
        "checksum": checksum,
    }
    server = {name: info.get(name) for name in SERVER_FACTS}
    return Record({"token_ids": list(prompt_token_ids), "sampling_params": params}, weights, server, list(choices))


def checksum(client: RolloutClient) -> str:
    """One sha256 (hex) for the weights a server has now: over sorted lines `name sha256`, from `/weight_checker`."""
    sums: dict[str, str] = client.post("/weight_checker", {"action": "checksum"})["checksums"]
    return hashlib.sha256("".join(f"{name} {sums[name]}\n" for name in sorted(sums)).encode()).hexdigest()


def to_json(item: Record) -> str:
    """One line, without its end."""
    return json.dumps({**asdict(item), "choices": [_choice_json(choice) for choice in item.choices]}, allow_nan=False)


def append(path: str | Path, item: Record) -> None:
    """Add a line to the file: all of it or, with an OSError (a full disk), nothing.

    Where a writer that was killed left half a line, the record begins a line of its own. Processes of one machine may
    append to one file.
    """
    line = (to_json(item) + "\n").encode()
    with open(path, "a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            line = b"\n" + line
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            os.truncate(file.fileno(), end)
            raise


def read(path: str | Path) -> Iterator[Record]:
    """The records of a file. Raises ValueError, naming the line, for one that isn't a record."""
    with open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield _from_json(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(f"{path}, line {number} is no rollout record: {error!r}") from error


def compare(item: Record, again: Generation) -> list[ReplayedChoice]:
    """Each recorded choice beside the same request's new answer."""
    return [_compare(item, old, again.choices[old.index]) for old in item.choices]


def _compare(item: Record, old: Choice, new: Choice) -> ReplayedChoice:
    of_weights = (item.weights["version"], item.weights["epoch"])
    leading = old.spans[:1]
    tokens = leading[0].end if leading and (leading[0].version, leading[0].epoch) == of_weights else 0
    whole = tokens == len(old.token_ids) and old.finish_reason != "abort"
    ids, new_ids = old.token_ids[:tokens], new.token_ids if whole else new.token_ids[:tokens]
    pairs = enumerate(zip(ids, new_ids, strict=False))
    first = next((at for at, (a, b) in pairs if a != b), None)
    if first is None and len(ids) != len(new_ids):
        first = min(len(ids), len(new_ids))
    end = tokens if first is None else first
    gaps = [abs(a - b) for a, b in zip((old.logprobs or [])[:end], (new.logprobs or [])[:end], strict=True)]
    return ReplayedChoice(
        old.index, tokens, len(old.token_ids) - tokens, first, sum(gap != 0 for gap in gaps), max(gaps, default=0.0)
    )


def _choice_json(choice: Choice) -> dict[str, Any]:
    fields = asdict(choice)
    fields["weight_versions"] = fields.pop("spans")
    return fields


def _from_json(fields: dict[str, Any]) -> Record:
    request, weights, server = fields["request"], fields["weights"], fields["server"]
    missing = [
        f"{part}.{name}"
        for part, names in {
            "request": ("token_ids", "sampling_params"),
            "weights": ("model", "version", "epoch"),
        }.items()
        for name in names
        if name not in fields[part]
    ]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    choices = []
    for choice in fields["choices"]:
        spans = [Span(**span) for span in choice["weight_versions"]]
        rest = {name: value for name, value in choice.items() if name != "weight_versions"}
        choices.append(Choice(spans=spans, **rest))
    return Record(request, weights, server, choices)
