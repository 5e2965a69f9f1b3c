"""The adapters of an engine: loaded on threads, entered between two steps, found by the requests that name them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from rollout.config import EngineConfig
from rollout.engine.request import ScheduledSequence
from rollout.engine.scheduler import Scheduler
from rollout.lora.folder import parse_config, read_adapter, write_adapter
from rollout.lora.layers import Adapter, LoraLayers
from rollout.lora.peft_config import PeftConfig
from rollout.lora.staging import AdapterStaging
from rollout.messages import AddRequest
from rollout.model.runner import ModelRunner
from rollout.outputs import TokenOutput
from rollout.sampling.sampler import end_without_token
from rollout.weights.bodies import StartBody
from rollout.weights.errors import WeightUpdateError, as_update_error
from rollout.weights.store import WeightStore

_MOST_LOADS = 4
"""Loads at once: each may hang in a disk until its timeout."""


def without_adapter(message: AddRequest) -> list[TokenOutput]:
    """What ends each choice of a request whose adapter isn't loaded."""
    ends = [TokenOutput(message.request_id, index) for index in range(message.sampling_params.n)]
    for output in ends:
        end_without_token(output, f"adapter {message.adapter} is not loaded")
    return ends


class Adapters:
    """Versions of adapters by label; each is immutable, and lives on in the requests that run on it when it is dropped.

    `call` takes control calls and answers with futures: `load_adapter` reads, checks and keeps aside, on a thread;
    `commit_adapter` lets requests find it; `drop_adapter` forgets it, in either state. All but the reading happens on
    the engine's thread.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner, scheduler: Scheduler, store: WeightStore) -> None:
        scheduler.max_loras, store.stage_adapter = config.max_loras, self._stage_push
        self._config, self._runner = config, runner
        self.layers = LoraLayers(runner.model, exact=config.batch_invariant)
        self._embed_scale = self.layers.embed_scale(runner.model)
        self._loaded: dict[str, Adapter] = {}
        self._staged: dict[str, Adapter] = {}
        self._lock = threading.Lock()
        self._loading: set[str] = set()
        self._methods: dict[str, Callable[[dict[str, Any], Future[dict[str, Any]]], None]] = {
            "load_adapter": self._load,
            "commit_adapter": self._commit,
            "drop_adapter": self._drop,
        }

    @property
    def methods(self) -> frozenset[str]:
        return frozenset(self._methods)

    def __getitem__(self, label: str) -> Adapter:
        """Raises KeyError for one that isn't loaded."""
        return self._loaded[label]

    def __contains__(self, label: str) -> bool:
        return label in self._loaded

    def begin(self, scheduled: list[ScheduledSequence]) -> None:
        """Put a step's sequences in order of their adapters, and say what rows the model's layers get."""

        def number(item: ScheduledSequence) -> int:
            adapter = item.sequence.request.adapter
            return 0 if adapter is None else adapter.number

        adapters: list[Adapter] = []
        rows, head_rows = [0], [0]
        scheduled.sort(key=number)
        if scheduled[-1].sequence.request.adapter is not None:
            for _, group in groupby(scheduled, number):
                items = list(group)
                adapter = items[0].sequence.request.adapter
                counts = sum([item.count for item in items]), sum([item.num_head_rows for item in items])
                if adapter is None:
                    rows[0], head_rows[0] = counts
                else:
                    adapters.append(adapter)
                    rows.append(counts[0])
                    head_rows.append(counts[1])
        self.layers.begin(adapters, rows, head_rows)
        self._runner.adapted = bool(adapters)

    def call(self, method: str, params: dict[str, Any]) -> Future[dict[str, Any]]:
        """Start a control call. The future holds its answer, or a WeightUpdateError."""
        answer: Future[dict[str, Any]] = Future()
        try:
            self._methods[method](params, answer)
        except Exception as error:
            answer.set_exception(as_update_error(error))
        return answer

    def _load(self, params: dict[str, Any], answer: Future[dict[str, Any]]) -> None:
        """`path` → kept aside as `label`; its copy goes to the folder `keep_in`, where that is given."""
        label = params["label"]
        with self._lock:
            if len(self._loading) >= _MOST_LOADS:
                raise WeightUpdateError(503, f"{len(self._loading)} adapters are being loaded: try again soon")
            if label in self._loading or label in self._staged or label in self._loaded:
                raise WeightUpdateError(409, f"adapter {label} is here already")
            self._loading.add(label)
        arguments = (label, params["path"], params.get("keep_in"), answer)
        threading.Thread(target=self._read, args=arguments, name="adapter-load", daemon=True).start()

    def _read(self, label: str, path: str, keep_in: str | None, answer: Future[dict[str, Any]]) -> None:
        made: list[Adapter] = []

        def make(staging: AdapterStaging) -> None:
            if keep_in is not None:
                write_adapter(staging, Path(keep_in))
            made.append(staging.make())

        try:
            read_adapter(
                path,
                lambda peft: self._staging(label, peft, made=make),
                timeout_s=self._config.weight_update_timeout_s,
            )
        except Exception as error:
            with self._lock:
                self._loading.discard(label)
            answer.set_exception(as_update_error(error))
            return
        with self._lock:
            if label in self._loading:  # else it was dropped meanwhile
                self._loading.discard(label)
                self._staged[label] = made[0]
        answer.set_result({"label": label, "bytes": made[0].nbytes})

    def _staging(self, label: str, peft: PeftConfig, **more: Any) -> AdapterStaging:
        rank = self._config.max_lora_rank
        return AdapterStaging(label, self.layers, peft, max_rank=rank, embed_scale=self._embed_scale, **more)

    def _stage_push(self, body: StartBody) -> AdapterStaging:
        """Where the adapter that a trainer's update brings is received. Raises WeightUpdateError 400."""
        label, made = body.adapter, dict[str, Adapter]()
        assert label is not None
        if label in self._loaded:
            raise WeightUpdateError(409, f"adapter {label} is here already")

        def make(staging: AdapterStaging) -> None:
            if body.keep_in is not None:
                write_adapter(staging, Path(body.keep_in))
            made[label] = staging.make()

        config = parse_config(msgspec.json.encode(body.lora_config))
        return self._staging(label, config, verify=body.verify, made=make, enter=lambda _: self._loaded.update(made))

    def _commit(self, params: dict[str, Any], answer: Future[dict[str, Any]]) -> None:
        label = params["label"]
        with self._lock:
            adapter = self._staged.pop(label, None)
        if adapter is None:
            raise WeightUpdateError(409, f"adapter {label} is not loaded: it can't be committed")
        self._loaded[label] = adapter
        answer.set_result({"label": label})

    def _drop(self, params: dict[str, Any], answer: Future[dict[str, Any]]) -> None:
        label = params["label"]
        with self._lock:
            self._loading.discard(label)
            self._staged.pop(label, None)
        self._loaded.pop(label, None)
        answer.set_result({"label": label})
