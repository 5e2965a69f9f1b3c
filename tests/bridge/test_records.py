"""Records and checkpoints on disks that are full, or that a killed process has written to."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 (the child uses it)

from trainer_bridge.client import Choice, Span
from trainer_bridge.loop import checkpoint, records


def item(seed: int, tokens: int = 3) -> records.Record:
    ids = list(range(tokens))
    choice = Choice(
        index=0,
        token_ids=ids,
        logprobs=[-1.0] * tokens,
        spans=[Span(0, tokens, "default", 0, "current")],
        finish_reason="length",
        stop_reason=None,
        sampling_mask=None,
    )
    return records.record([1], {"seed": seed}, [choice], model="m", info={})


def in_child(code: str, *arguments: str) -> str:
    """What a script prints that has the names of this module."""
    run = subprocess.run(
        [sys.executable, "-c", f"from tests.bridge.test_records import *\n{code}", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def on_a_disk_with_room_for(nbytes: int) -> None:
    """This process can write no file beyond so many bytes: to it, that is a full disk (EFBIG)."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


def test_a_record_on_a_full_disk_leaves_no_half_line_and_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records.append(path, item(1))
    room = path.stat().st_size + 100
    code = f"""
on_a_disk_with_room_for({room})
try:
    records.append({str(path)!r}, item(2, tokens=1000))
except OSError as error:
    print("raised", error.errno)
"""
    assert in_child(code) == "raised 27\n"
    assert [r.seed for r in records.read(path)] == [1]
    records.append(path, item(3))
    assert [r.seed for r in records.read(path)] == [1, 3]


def test_a_record_after_half_a_line_of_a_killed_writer_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records.append(path, item(1))
    with open(path, "a") as file:
        file.write(records.to_json(item(2))[:50])
    records.append(path, item(3))
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert lines[2] == records.to_json(item(3))
    with pytest.raises(ValueError, match="line 2 is no rollout record"):
        list(records.read(path))


def test_records_of_several_writers_at_once_are_all_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write of theirs takes a part of the line, as a system may have it."""
    path = tmp_path / "records.jsonl"

    class Short(io.FileIO):
        def write(self, data: Any) -> int:
            time.sleep(0.001)  # for the others
            return super().write(data[:10_000])

    monkeypatch.setattr(records, "open", lambda path, mode, **_: Short(path, "a+"), raising=False)
    threads = [threading.Thread(target=lambda n=n: records.append(path, item(n, tokens=5000))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert sorted(r.seed for r in records.read(path)) == list(range(8))


def test_a_checkpoints_name_is_on_the_disk_when_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename is lost with the machine's power until its folder is synced."""
    path, log = tmp_path / "state.pt", []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        log.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    checkpoint.save(path, {"step": 1})
    assert log == [(f"{path}.tmp", False), (str(tmp_path), True)]
    assert checkpoint.load(path) == {"step": 1}


def test_a_checkpoint_on_a_full_disk_leaves_the_last_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    checkpoint.save(path, {"step": 1})
    code = f"""
on_a_disk_with_room_for(10_000)
try:
    checkpoint.save({str(path)!r}, {{"step": torch.zeros(100_000)}})
except (OSError, RuntimeError) as error:
    print("raised")
"""
    assert in_child(code) == "raised\n"
    assert checkpoint.load(path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]
