"""Weights from a trainer in the engine's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rollout.weights.bodies import Announcement
from rollout.weights.errors import AbandonedError
from rollout.weights.staging import Incoming, Staging
from rollout.weights.transport import Transport


class LocalTransport(Transport):
    """Copies the floating tensors of a state dict, by name, as they are when each is reached."""

    name = "local"
    peer = "this process"

    def __init__(self, tensors: Mapping[str, torch.Tensor], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_floating_point()}
        self._interrupted = threading.Event()

    def describe(self, info: Announcement) -> Announcement:
        """All of them."""
        return Announcement(
            names=list(self._tensors),
            dtype_names=[str(tensor.dtype).removeprefix("torch.") for tensor in self._tensors.values()],
            shapes=[list(tensor.shape) for tensor in self._tensors.values()],
        )

    def receive(
        self, info: Announcement, plan: list[Incoming], staging: Staging, progress: Callable[[int], Any]
    ) -> None:
        """Copy each tensor into its staged region."""
        for item in plan:
            if self._interrupted.is_set():
                raise AbandonedError
            tensor = self._tensors[item.target.name]
            staging.place(item, tensor)
            progress(tensor.nbytes)

    def interrupt(self) -> None:
        """End a `receive` at its next tensor."""
        self._interrupted.set()
