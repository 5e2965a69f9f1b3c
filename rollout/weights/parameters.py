"""The parameters that serve, and the flip to the ones that were received."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from rollout.config import WeightStaging
from rollout.weights.errors import WeightUpdateError
from rollout.weights.naming import NameMap, Target
from rollout.weights.staging import Staging, digest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class WeightStore:
    """Live and staged parameters of one model, which is already on its device and in its dtype.

    `epoch` counts commits, `label` is the caller's name of the live weights. `commit`, and `stage` in place, belong to
    the engine's thread, between two steps; all else may run beside decoding. Staging is a second set of parameters,
    allocated at the first update; a commit makes the old live set the next staging. In place, the live set is itself
    the staging: `valid` is False, and no forward pass may run, from then until a commit (or until the update is
    dropped, if it wrote nothing). `prepare` is called with each complete set, by module name, before it is committed.
    Of a sharded model it holds this rank's share; `mesh` is what whole parameters are gathered over.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        allow_partial: bool = False,
        weight_staging: WeightStaging = "full",
        prepare: Callable[[dict[str, torch.Tensor]], None] = lambda buffers: None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.allow_partial = allow_partial
        self.weight_staging = weight_staging
        self.prepare = prepare
        self._mesh = mesh
        self.epoch = 0
        self.label = "default"
        self.valid = True
        self.names = NameMap(model)
        for tensor in self.names.slots.values():
            tensor.data = tensor.data.contiguous()
        self._spare: dict[str, torch.Tensor] | None = None
        self._readers = 0
        self._lock = threading.Lock()

    def live(self) -> dict[str, torch.Tensor]:
        """The parameters that serve, by their first module name."""
        return {name: tensor.data for name, tensor in self.names.slots.items()}

    def stage(self, *, in_place: bool = False, verify: bool = False) -> Staging:
        """The buffers of one update. The caller owns them until `commit` or `release`.

        Raises WeightUpdateError 409 where the live set can't be given away because its checksums are being computed.
        """
        with self._lock:
            heals = not self.valid
            if in_place:
                if self._readers:
                    raise WeightUpdateError(409, "weight_checker or a snapshot reads the weights: start again soon")
                self._spare, self.valid = None, False
                return Staging(self, self.live(), in_place=True, verify=verify, heals=heals)
            buffers, self._spare = self._spare, None
        if buffers is None:
            buffers = {name: torch.empty_like(tensor) for name, tensor in self.live().items()}
        return Staging(self, buffers, in_place=False, verify=verify, heals=heals)

    def release(self, staging: Staging) -> None:
        """Take the buffers of a dropped update back. Only once nothing can write into them any more."""
        with self._lock:
            if not staging.in_place:
                self._spare = staging.buffers
            elif not staging.written:
                self.valid = not staging.heals

    def commit(self, staging: Staging, label: str | None) -> None:
        """Make the staged parameters live: epoch + 1, and `label` where one is given. Call it between two steps."""
        buffers = staging.buffers
        with self._lock:
            if not staging.in_place:
                for name, tensor in self.names.slots.items():
                    live = tensor.data
                    tensor.data = buffers[name]
                    buffers[name] = live
                # A checksum under way still reads the old set: leave it to the garbage collector then.
                self._spare = None if self._readers else buffers
            self.epoch += 1
            self.label = self.label if label is None else label
            self.valid = True

    @contextmanager
    def snapshot(self) -> Iterator[dict[str, torch.Tensor]]:
        """The live tensors by module name, kept from being overwritten while the context is open.

        Raises WeightUpdateError 409 while they are invalid.
        """
        with self._lock:
            if not self.valid:
                raise WeightUpdateError(409, "the weights are invalid until an update completes")
            self._readers += 1
            tensors = self.live()
        try:
            yield tensors
        finally:
            with self._lock:
                self._readers -= 1

    def checksums(self) -> dict[str, str]:
        """sha256 (hex) of the stored bytes of each live tensor, by the name that `save_pretrained` would give it.

        A parameter whose checkpoint form is not a slice of it is digested whole, under its module name.
        """
        with self.snapshot() as tensors:
            return self.digest(tensors)

    def digest(self, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
        """The checksums of a set from `snapshot`; where the model is sharded, while all ranks `gather` it."""
        targets: dict[str, list[Target]] = {}
        for target in self.names.required("checkpoint"):
            targets.setdefault(target.slot, []).append(target)
        return {t.name: digest(t.view(whole)) for slot, whole in self.gather(tensors) for t in targets[slot]}

    def gather(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a set from `snapshot`, by module name; one that is sharded comes whole, and on the CPU.

        All ranks of a sharded model iterate together.
        """
        for slot in sorted(tensors):
            share = self.names.shares.get(slot)
            if share is None:
                yield slot, tensors[slot]
            else:
                assert self._mesh is not None
                yield slot, share.whole(tensors[slot], self._mesh)
