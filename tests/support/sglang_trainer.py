"""A trainer that speaks SGLang's dialect as slime and AReaL do: their bodies, their order, their rendezvous."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from transformers import PreTrainedModel

Tensors = Mapping[str, torch.Tensor]
_numbers = itertools.count()


def init_process_group(port: int, world_size: int, name: str, timeout_s: float) -> Any:
    """Rank 0 of a gloo group that is not the default one, as SGLang's `init_custom_process_group` makes it."""
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d.Backend("gloo"),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def lengthen(path: Path, limit: int = 16_000) -> Path:
    """Have a tiny model's folder take so many tokens, so that no request ends before it is aborted."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": limit}))
    return path


def parts(model: PreTrainedModel, count: int = 3) -> list[Tensors]:
    """The model's parameters in so many chunks."""
    named = list(model.named_parameters())
    size = -(-len(named) // count)
    return [dict(named[start : start + size]) for start in range(0, len(named), size)]


class SglangTrainer:
    """Calls `url`; `join` first. Answers that are no success are raised as httpx.HTTPStatusError."""

    def __init__(self, url: str, group: str | None = None, timeout_s: float = 30.0) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
        self.name = group or f"group-{next(_numbers)}"  # torch wants each name once in a process
        self.timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(1)
        self.group: Any = None

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's JSON."""
        answer = self.http.post(path, json=body or {})
        answer.raise_for_status()
        return answer.json()

    def join(self) -> None:
        """Meet the server in a new group."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        world_size = self.http.get("/server_info").json()["num_gpus"] + 1
        body = {"master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": world_size}
        joining = self._pool.submit(
            self.post, "/init_weights_update_group", body | {"group_name": self.name, "backend": "gloo"}
        )
        self.group = init_process_group(port, world_size, self.name, self.timeout_s)
        assert joining.result(self.timeout_s)["success"]

    def join_again(self) -> None:
        """Meet it under another name: torch keeps the old one."""
        self.http.post("/destroy_weights_update_group", json={"group_name": self.name})
        self.name = f"group-{next(_numbers)}"
        self.join()

    def send(self, tensors: Tensors, version: str | None = None, **more: Any) -> Any:
        """One chunk: the call, and beside it the broadcasts that it announces."""
        body: dict[str, Any] = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": self.name,
            "flush_cache": False,
        }
        if version is not None:
            body["weight_version"] = version
        calling = self._pool.submit(self.post, "/update_weights_from_distributed", body | more)
        works = [dist.broadcast(t.detach(), 0, group=self.group, async_op=True) for t in tensors.values()]
        try:
            return calling.result(self.timeout_s)
        finally:
            for work in works:
                try:
                    work.wait()
                except RuntimeError:  # refused: nobody takes it
                    break

    def push(self, model: PreTrainedModel, version: str | None, chunks: int = 3) -> None:
        """A whole update as both trainers make it."""
        self.post("/pause_generation")
        assert self.http.get("/flush_cache").status_code == 200
        for tensors in parts(model, chunks):
            assert self.send(tensors, version)["success"]
        self.post("/continue_generation")

    def close(self) -> None:
        """Leave."""
        self._pool.shutdown()
        self.http.close()
        if self.group is not None:
            dist.destroy_process_group(self.group)
