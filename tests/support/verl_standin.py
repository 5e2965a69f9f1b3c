"""The classes of verl that the plugin derives from, made of recorded signatures: verl itself isn't installed here."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "peer_names.json").read_text())["verl"]
PLUGIN = "trainer_bridge.integrations.verl"


def _base(name: str, **more: Any) -> type:
    """A class of verl: what is abstract there is abstract here, what isn't says that it isn't there."""
    body: dict[str, Any] = dict(more)
    for method, signature in RECORDED[name].items():
        if method not in body:
            body[method] = _missing(method, "abstractmethod" in signature["decorators"])
    return type(name, (ABC,), body)


def _missing(name: str, is_abstract: bool) -> Any:
    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(name)

    return abstractmethod(missing) if is_abstract else missing


class _Replicas:
    found: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register(cls, name: str, loader: Any) -> None:
        cls.found[name] = loader


class _Engines:
    found: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def register(backend: str) -> Any:
        return lambda cls: _Engines.found.setdefault(backend, cls)


class TokenOutput(types.SimpleNamespace):
    """Its fields are the recorded ones, the lists and dictionaries as verl has them by default."""

    def __init__(self, **given: Any) -> None:
        assert given.keys() <= set(RECORDED["TokenOutput"])
        super().__init__(**dict.fromkeys(RECORDED["TokenOutput"]) | {"extra_fields": {}} | given)


def _keep_config(self: Any, config: Any, model_config: Any, device_mesh: Any) -> None:
    self.config = config


def _keep_rank(self: Any, replica_rank: int, config: Any, model_config: Any) -> None:
    self.replica_rank, self.config, self.name_suffix, self.max_concurrency = replica_rank, config, "", 1000


class _Group:
    """A worker group: what it was made with."""

    workers = ("worker",)

    def __init__(self, **made_with: Any) -> None:
        self.made_with = made_with


@contextlib.contextmanager
def plugin() -> Iterator[Any]:
    """The plugin's module, imported beside these stand-ins as verl imports it."""
    found: dict[str, dict[str, Any]] = {
        "verl.checkpoint_engine.base": {
            "CheckpointEngine": _base("CheckpointEngine"),
            "CheckpointEngineRegistry": _Engines,
        },
        "verl.single_controller.ray": {"RayResourcePool": lambda *args, **kw: (args, kw), "RayWorkerGroup": _Group},
        "verl.utils.device": {"get_device_name": lambda: "cpu"},
        "verl.workers.rollout.base": {
            "BaseRollout": _base("BaseRollout", __init__=_keep_config),
            "_ROLLOUT_REGISTRY": {},
        },
        "verl.workers.rollout.replica": {
            "RolloutMode": types.SimpleNamespace(STANDALONE="standalone"),
            "RolloutReplica": _base(
                "RolloutReplica", __init__=_keep_rank, get_ray_class_with_init_args=lambda self: "worker class"
            ),
            "RolloutReplicaRegistry": _Replicas,
            "TokenOutput": TokenOutput,
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, PLUGIN, raising=False)
        for path, names in found.items():
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                _module(patch, ".".join(parts[:end]))
            vars(sys.modules[path]).update(names)
        yield importlib.import_module(PLUGIN)
        sys.modules.pop(PLUGIN)


def _module(patch: pytest.MonkeyPatch, name: str) -> None:
    if isinstance(sys.modules.get(name), _Stand):
        return
    made: Any = _Stand(name)
    made.__path__ = []
    patch.setitem(sys.modules, name, made)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, made)


class _Stand(types.ModuleType):
    """Known by its class."""


def config(urls: list[str], **more: Any) -> Any:
    """What the plugin reads of verl's RolloutConfig."""
    engine = {"backend": "rollout", "engine_kwargs": {"rollout": {"urls": urls, "timeout_s": 20.0}}}
    settings: dict[str, Any] = {
        "checkpoint_engine": types.SimpleNamespace(**engine | more.pop("checkpoint_engine", {})),
        **dict.fromkeys(("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"), 1),
        "free_cache_engine": True,
        "enable_rollout_routing_replay": False,
        "prompt_length": 8,
        "response_length": 6,
        "repetition_penalty": 1.0,
        "ignore_eos": False,
        "full_determinism": False,
        "seed": 42,
    }
    return types.SimpleNamespace(**settings | more)
