"""Random faults of what is around a trainer: engines, their disk, other clients, other people's folders."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import time
from pathlib import Path

import psutil

from tests.support.fault_truth import Account
from tests.support.faulty_trainer import Spec, made
from tests.support.wait import eventually
from trainer_bridge.client import RolloutClient, RolloutError

RESTART_S = 240.0
SNAPSHOT_LIMIT = 4 << 20
"""Bytes that an engine with a full disk may write into one file: its log, and not the weights."""
RESUMED_AS = re.compile(r"snapshot of epoch (\d+) \('.*'\) as epoch (\d+)")


class ServerFaults:
    """Faults of the server with this process, of which `client` is a client."""

    def __init__(self, account: Account, client: RolloutClient, pid: int, folder: Path, *, kills_engines: bool) -> None:
        self._account, self._client, self._folder = account, client, folder
        self._server = psutil.Process(pid)
        self._kills_engines = kills_engines

    def go_on(self) -> None:
        """One after the other, until the run is over."""
        choose = random.Random(f"{self._account.seed} server")
        usual = [self._stops_engine, self._fills_disk, self._stray_call, self._pauses, self._aborts_all]
        usual += [self._pushes_folder, self._pushes_folder, self._hung_file, self._hung_file]
        next_kill = time.monotonic() + choose.uniform(30, 60)
        while not self._account.over.wait(choose.uniform(0.2, 2.0)):
            if self._kills_engines and time.monotonic() > next_kill:
                self._kills(choose)
                next_kill = time.monotonic() + choose.uniform(40, 80)
            else:
                choose.choice(usual)(choose)

    def _engine_processes(self) -> list[psutil.Process]:
        return [child for child in self._server.children() if self._is_engine(child)]

    @staticmethod
    def _is_engine(process: psutil.Process) -> bool:
        try:
            return any("spawn_main" in part for part in process.cmdline())
        except psutil.Error:  # it ends just now
            return False

    def _kills(self, choose: random.Random) -> None:
        old = self._engine_processes()
        killed = old if self._account.engines > 1 and choose.random() < 0.3 else [choose.choice(old)]
        self._account.did("server", f"SIGKILL to {len(killed)} of {len(old)} engines", fault="engine kill")
        for process in killed:
            self._account.engine_kills.append(time.monotonic())
            process.kill()

        def whole() -> bool:
            if len(set(self._engine_processes()) - set(killed)) < self._account.engines:
                return False
            try:
                return len(self._client.weight_info()["ranks"]) == self._account.engines
            except RolloutError:
                return False

        eventually(whole, RESTART_S)
        self._account.engine_kills.append(time.monotonic())
        restarted = str(self._client.weight_info()["restarted"])
        self._account.did("server", f"whole again: {restarted}")
        for kept, now in RESUMED_AS.findall(restarted):
            self._account.truth.resumed(int(kept), int(now))

    def _stops_engine(self, choose: random.Random) -> None:
        engine, seconds = choose.choice(self._engine_processes()), choose.uniform(0.1, 2)
        self._account.did("server", f"SIGSTOP to an engine for {seconds:.1f} s", fault="engine stop")
        engine.suspend()
        try:
            time.sleep(seconds)
        finally:
            engine.resume()

    def _fills_disk(self, choose: random.Random) -> None:
        """No snapshot can be written for some time."""
        self._account.did("server", "the disk of the snapshots is full", fault="engine's disk full")
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        limited = self._engine_processes()
        for engine in limited:
            resource.prlimit(engine.pid, resource.RLIMIT_FSIZE, (SNAPSHOT_LIMIT, most))
        self._account.over.wait(choose.uniform(0.5, 4))
        for engine in limited:
            resource.prlimit(engine.pid, resource.RLIMIT_FSIZE, (most, most))

    def _stray_call(self, choose: random.Random) -> None:
        method = choose.choice(["finish", "abort"])
        self._account.did("server", f"a stray {method}_weight_update", fault="stray call")
        with contextlib.suppress(RolloutError):
            self._client.post(f"/{method}_weight_update", {"weight_version": "stray"} if method == "finish" else {})

    def _pauses(self, choose: random.Random) -> None:
        self._account.did("server", "a pause", fault="pause")
        with contextlib.suppress(RolloutError):
            self._client.pause("keep")
        self._account.over.wait(choose.uniform(0.1, 1))
        self._resume()

    def _resume(self) -> None:
        def resumed() -> bool:
            try:
                self._client.resume()
            except RolloutError:
                return False
            return True

        eventually(resumed, RESTART_S)

    def _aborts_all(self, choose: random.Random) -> None:
        self._account.did("server", "all requests are aborted", fault="abort of all requests")
        with contextlib.suppress(RolloutError):
            self._client.abort_all()

    def _pushes_folder(self, choose: random.Random) -> None:
        """Somebody else's whole update in one call, now and then of a file that is cut off."""
        spec, folder = Spec(self._account.new_seed()), self._folder / "somebody"
        made(spec).save_pretrained(folder)
        cut_off = choose.random() < 0.3
        if cut_off:
            os.truncate(folder / "model.safetensors", choose.randrange(5 << 20))
        update_id = f"folder {spec.seed}"
        what = "a folder whose file is cut off" if cut_off else f"a folder of {spec}"
        self._account.did("server", what, fault="cut-off file" if cut_off else None)
        began = time.monotonic()
        epoch: int | None = None
        try:
            body = {"weight_dir": str(folder), "update_id": update_id}
            epoch = self._client.post("/update_weights", body)["epoch"]
        except RolloutError as error:
            self._account.did("server", f"the folder: {error}")
            with contextlib.suppress(RolloutError):
                epoch = self._client.weight_info()["committed_updates"].get(update_id)
        self._account.figures.pushes["folder refused" if epoch is None else "folder committed"] += 1
        if epoch is not None:
            if cut_off:
                self._account.truth.violated(f"a folder whose file is cut off was committed as epoch {epoch}")
            self._account.did("server", f"the folder is epoch {epoch}, after {time.monotonic() - began:.2f} s")
            self._account.truth.committed_folder(epoch, spec)

    def _hung_file(self, choose: random.Random) -> None:
        """A folder in which something never ends: the file itself, the index, or what the index names."""
        folder = self._folder / f"hung {len(self._account.operations)}"
        folder.mkdir()
        kind = choose.choice(["file", "index", "named", "folder"])
        name = {"index": "model.safetensors.index.json", "named": "pipe"}.get(kind, "model.safetensors")
        os.mkfifo(folder / name)
        if kind == "named":
            index = {"weight_map": {"model.norm.weight": "pipe"}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        self._account.did("server", f"a FIFO as {kind}", fault="hung file")
        path = folder / name if kind == "folder" else folder
        with contextlib.suppress(RolloutError):
            epoch = self._client.post("/update_weights", {"weight_dir": str(path)})["epoch"]
            self._account.truth.violated(f"a FIFO was committed as epoch {epoch}")
