"""Sleep: weights and KV cache give their memory back, so that a trainer can have it, and take it again, in parts.

Levels and tags are those of vLLM's sleep mode.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Collection

import torch

from rollout.engine.scheduler import Scheduler
from rollout.messages import SLEEP_TAGS
from rollout.model.runner import ModelRunner
from rollout.weights.store import WeightStore


class Sleeper:
    """What of one engine is asleep: some of SLEEP_TAGS, since `sleep` of this `level`; 0 while it is awake.

    On the engine's thread, between two steps. While anything is asleep no step may run. CUDA graphs go with what they
    have the addresses of, and are captured anew: a storage that was given back to the driver gets another address.
    """

    def __init__(self, runner: ModelRunner, store: WeightStore, scheduler: Scheduler) -> None:
        self._runner, self._store, self._scheduler = runner, store, scheduler
        self.asleep: set[str] = set()
        self.level = 0

    def sleep(self, level: int) -> None:
        """Level 1: the weights go to host memory. Level 2: they are lost, and invalid until an update commits.

        The cache is lost at both, so what runs is computed again; no update may be open. Asleep already, it sleeps as
        deep as the deeper of both levels. Raises torch's RuntimeError, and is awake, where the host has no memory.
        """
        self._store.sleep(keep=level == 1)
        self._scheduler.commit(self._scheduler.epoch, "recompute")
        self._scheduler.kv.reset_prefixes()
        self._runner.drop_cache()
        self.level = max(level, self.level if "weights" in self.asleep else 0)
        self.asleep = set(SLEEP_TAGS)
        self._give_back()

    def wake_up(self, tags: Collection[str]) -> None:
        """Take back the memory of these parts; of what is awake nothing changes.

        Raises torch's RuntimeError where it doesn't suffice: what that was for is still asleep.
        """
        try:
            if "weights" in self.asleep.intersection(tags):
                self._store.wake_up()
                self.asleep.remove("weights")
            if "kv_cache" in self.asleep.intersection(tags):
                self._runner.backend.allocate()
                self.asleep.remove("kv_cache")
        except RuntimeError:
            if "kv_cache" in self.asleep:
                self._runner.backend.free()
            self._give_back()
            raise
        if self.level and not self.asleep:
            self._runner.capture()
            self.level = 0

    def _give_back(self) -> None:
        """Let the system have what torch and the C library would keep for themselves."""
        gc.collect()
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()
        elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc has it
            trim(0)
