"""Checkpoints by difference: read and applied version by version, and whole whenever the server is killed."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from rollout.weights import pulling
from rollout.weights.errors import WeightUpdateError
from rollout.weights.pull import pull
from rollout.weights.pulling import pull_aside
from tests.support import tiny_models
from tests.support.slime_deltas import changed, publish, read

INDEX = "model.safetensors.index.json"
KILLED = 77


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process has written is there without it; it takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of several files, with an index."""
    folder = tmp_path_factory.mktemp("base")
    model = AutoModelForCausalLM.from_pretrained(tiny_models.build("llama", folder / "one"))
    model.save_pretrained(folder / "several", max_shard_size="60KB")
    assert len(list((folder / "several").glob("*.safetensors"))) > 2
    return folder / "several"


class Published:
    """Versions of it, and what each holds."""

    def __init__(self, base: Path, folder: Path, encodings: list[str]) -> None:
        self.base, self.source, self.local = base, folder / "source", folder / "local"
        self.states = [read(base)]
        self.source.mkdir()
        for version, encoding in enumerate(encodings, start=1):
            new = changed(self.states[-1], version)
            if encoding == "full":
                self.copy_of(version, new)
            else:
                publish(self.source, version, self.states[-1], new, encoding)
            self.states.append(new)

    def copy_of(self, version: int, state: dict[str, np.ndarray]) -> None:
        """A whole checkpoint, as one file without an index."""
        import safetensors.torch
        import torch

        tensors = AutoModelForCausalLM.from_pretrained(self.base).state_dict()
        values = {name: torch.from_numpy(state[name].view(np.float32).copy()) for name in state}
        tensors = {name: values[name].view(tensors[name].shape) for name in values}
        folder = self.source / f"weight_v{version:06d}"
        folder.mkdir()
        safetensors.torch.save_file(tensors, folder / "model.safetensors")

    def pull(self, version: int, progress: Callable[[], None] = lambda: None) -> None:
        pull(str(self.local), str(self.base), str(self.source), version, progress)

    def pull_aside(self, version: int, timeout_s: float) -> None:
        """As a server does for a request."""
        asyncio.run(pull_aside(str(self.local), str(self.base), str(self.source), version, timeout_s=timeout_s))

    @property
    def version(self) -> int | None:
        """Whose state the folder holds, to the byte; None where it holds none."""
        if not (self.local / INDEX).exists():
            return None
        held = read(self.local)
        matching = [
            version
            for version, state in enumerate(self.states)
            if held.keys() == state.keys() and all(np.array_equal(held[name], state[name]) for name in state)
        ]
        assert len(matching) == 1, "half of something"
        assert json.loads((self.local / INDEX).read_text())["metadata"]["version"] == matching[0]
        return matching[0]


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_deltas_are_applied_one_by_one_or_several_at_once(base: Path, tmp_path: Path, encoding: str) -> None:
    published = Published(base, tmp_path, [encoding] * 4)
    for version in (0, 1, 1, 4):
        published.pull(version)
        assert published.version == version
    listed = set(json.loads((published.local / INDEX).read_text())["weight_map"].values())
    assert {file.name for file in published.local.glob("*.safetensors")} == listed
    assert read(base).keys() == published.states[0].keys()
    assert all(np.array_equal(read(base)[name], array) for name, array in published.states[0].items())
    assert AutoModelForCausalLM.from_pretrained(published.local).config.model_type == "llama"


def test_a_whole_version_needs_none_before_it(base: Path, tmp_path: Path) -> None:
    published = Published(base, tmp_path, ["xor", "full", "xor"])
    shutil.rmtree(published.source / "weight_v000001")
    published.pull(3)
    assert published.version == 3
    published.pull(2)  # a trainer that begins anew
    assert published.version == 2
    published.pull(0)
    assert published.version == 0


def _break(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads(file.read_text())
    change(index["metadata"])
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "fault", ["cut", "flipped", "checksum", "base", "compression", "encoding", "missing", "foreign"]
)
def test_what_is_wrong_with_a_version_leaves_the_one_before(base: Path, tmp_path: Path, fault: str) -> None:
    published = Published(base, tmp_path, ["xor", "overwrite"])
    published.pull(1)
    folder = published.source / "weight_v000002"
    file = folder / "model-00000-of-00002.safetensors"
    data = file.read_bytes()
    match fault:
        case "cut":
            file.write_bytes(data[:-5])
        case "flipped":
            file.write_bytes(data[:-3] + bytes([data[-3] ^ 255]) + data[-2:])
        case "checksum":
            place = data.index(b'"__metadata__":{"') + len(b'"__metadata__":{"')
            end = data.index(b'":"', place) + 3
            file.write_bytes(data[:end] + (b"0" if data[end : end + 1] != b"0" else b"1") + data[end + 1 :])
        case "missing":
            shutil.rmtree(folder)
        case "foreign":
            publish(tmp_path / "other", 2, {"no.such": np.zeros(4, np.uint8)}, {"no.such": np.ones(4, np.uint8)}, "xor")
            shutil.copy(tmp_path / "other" / "weight_v000002" / file.name, file)
        case "base":
            _break(folder / INDEX, lambda metadata: metadata.update(base_version="000000"))
        case "compression":
            _break(folder / INDEX, lambda metadata: metadata.update(compression_format="lz4"))
        case "encoding":
            _break(folder / INDEX, lambda metadata: metadata.update(delta_encoding="sum"))
    with pytest.raises(ValueError, match="weight_v000002"):
        published.pull(2)
    assert published.version == 1


def test_a_folder_of_somebody_elses_is_not_written_to(base: Path, tmp_path: Path) -> None:
    published = Published(base, tmp_path, [])
    published.local.mkdir()
    (published.local / "config.json").write_text("mine")
    with pytest.raises(ValueError, match="no pull has written"):
        published.pull(0)
    assert [file.name for file in published.local.iterdir()] == ["config.json"]


def test_a_pull_that_hangs_ends_and_leaves_the_folder_to_the_next(base: Path, tmp_path: Path) -> None:
    """It used to keep its request and a thread of the server for as long as the disk hung."""
    published = Published(base, tmp_path, ["xor"])
    published.pull_aside(0, 60)
    with (published.local / ".weight_sync" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a pull does that a dead mount holds
        with pytest.raises(WeightUpdateError, match="no further for 3 s") as refusal:
            published.pull_aside(1, 3)
        assert refusal.value.status == 503
    assert published.version == 0
    published.pull_aside(1, 60)
    assert published.version == 1
    with pytest.raises(WeightUpdateError, match="weight_v000002 is not there") as refusal:
        published.pull_aside(2, 60)
    assert refusal.value.status == 400


def test_pulls_that_are_asked_for_at_once_are_bounded(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of them used to pass while the first process was being started."""
    monkeypatch.setattr(pulling, "_MOST", 1)
    monkeypatch.setattr(pulling, "_processes", [])
    published = Published(base, tmp_path, [])
    asked = (str(published.local), str(base), str(published.source), 0)

    async def at_once() -> list[Any]:
        return await asyncio.gather(*(pull_aside(*asked, timeout_s=60) for _ in range(3)), return_exceptions=True)

    first, *others = asyncio.run(at_once())
    assert first is None
    assert [refusal.status for refusal in others] == [503, 503]
    assert published.version == 0


@pytest.mark.parametrize("file", [INDEX, "model-00000-of-00002.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_refused(base: Path, tmp_path: Path, file: str) -> None:
    """To open it would wait for ever for somebody to write."""
    published = Published(base, tmp_path, ["xor"])
    published.pull(0)
    pipe = published.source / "weight_v000001" / file
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(WeightUpdateError, match="not a regular file") as refusal:
        published.pull_aside(1, 60)
    assert refusal.value.status == 400
    assert published.version == 0


def _killed_at(point: int, work: Callable[[Callable[[], None]], None]) -> bool:
    """Do the work in a process that is gone at this point of what it does to files, also between two pieces of one;
    whether it got there."""
    child = os.fork()
    if child == 0:
        left = point

        def count() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(KILLED)

        events = ("open", "os.rename", "os.remove")
        sys.addaudithook(lambda event, _: count() if event in events else None)
        try:
            work(count)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED


@pytest.mark.parametrize(("encodings", "before"), [(["xor", "overwrite"], 1), (["xor", "full"], 1), ([], None)])
def test_killed_anywhere_it_is_one_version_or_the_other(
    base: Path, tmp_path: Path, encodings: list[str], before: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.weights.pull._PIECE_BYTES", 25_000)
    published = Published(base, tmp_path, encodings)
    after, point, seen = len(encodings), 0, set()
    while True:
        shutil.rmtree(published.local, ignore_errors=True)
        if before is not None:
            published.pull(before)
        killed = _killed_at(point, lambda count: published.pull(after, count))
        seen.add(published.version)
        assert published.version in (before, after)
        published.pull(after)  # it is told again
        assert published.version == after
        if not killed:
            break
        point += 1
    assert seen == {before, after}
    assert point > 10
