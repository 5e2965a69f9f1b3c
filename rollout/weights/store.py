"""The weights that serve: their epoch, label and validity, and what may replace them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rollout.config import WeightStaging
from rollout.model.parameters import ModelParameters, ParameterSet
from rollout.weights.bodies import StartBody
from rollout.weights.errors import WeightUpdateError
from rollout.weights.naming import NameMap, Target
from rollout.weights.staging import Staging, digest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


MOST_ABANDONED = 1
"""Sets of parameters that dropped updates may hold, beside the one that serves and the one for the next update."""


class WeightStore:
    """The live parameters of one model, already on its device and in its dtype, and the set beside them for an update.

    `epoch` counts commits, `label` is the caller's name of the live weights. `commit`, and `stage` in place, belong to
    the engine's thread, between two steps; all else may run beside decoding. Staging is a second set of parameters,
    on the device or the host, allocated at the first update; a commit frees a set for the next one. In place, the live
    buffers are themselves the staging: `valid` is False, and no forward pass may run, from then until a commit (or
    until the update is dropped, if it wrote nothing). `prepare` is called with each complete set before its commit.
    `asleep`: the live set is off its device (`sleep`); it can be read where it is valid, but not replaced.
    Of a sharded model it holds this rank's share; `mesh` is what whole parameters are gathered over.
    """

    def __init__(
        self,
        parameters: ModelParameters,
        *,
        allow_partial: bool = False,
        weight_staging: WeightStaging = "full",
        prepare: Callable[[ParameterSet], None] = lambda parameters: None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.parameters = parameters
        self.allow_partial = allow_partial
        self.weight_staging = weight_staging
        self._prepare = prepare
        self._mesh = mesh
        self.epoch = 0
        self.label = "default"
        self.valid = True
        self.asleep = False
        self.names = NameMap(parameters)
        self.on_unread: Callable[[], None] = lambda: None
        """Called, on any thread, when a reader of the live set has ended: a commit may have waited for it."""
        self.stage_adapter: Callable[[StartBody], Staging] | None = None
        self._spare: ParameterSet | None = None
        self._lent: list[ParameterSet] = []
        self._readers = 0
        self._lock = threading.Lock()
        self._unread = threading.Condition(self._lock)

    def stage(self, *, in_place: bool = False, verify: bool = False) -> Staging:
        """The buffers of one update. The caller owns them until `commit` or `release`.

        Raises WeightUpdateError 409 where the live set can't be given away because its checksums are being computed,
        and 503 as `check_room`.
        """
        parameters = self.parameters
        if not in_place:
            self.check_room()
        with self._lock:
            replaces_invalid = not self.valid
            if in_place:
                if self._readers:
                    raise WeightUpdateError(409, "weight_checker or a snapshot reads the weights: start again soon")
                self._spare, self.valid = None, False
            into, self._spare = self._spare, None
        if in_place:
            into = parameters.successor_in_place()
        elif into is None:
            into = parameters.new_set(on_host=self.weight_staging == "host")
        into.packed = []
        if not in_place:
            self._lent.append(into)
        return Staging(
            self.names,
            into,
            parameters.live,
            self._prepare,
            in_place=in_place,
            verify=verify,
            replaces_invalid=replaces_invalid,
            allow_partial=self.allow_partial,
        )

    def admit(self, body: StartBody, paused: bool) -> Staging | None:
        """Refuse an update that can't begin on what serves now; the live set, where it is received in place, and the
        staging of an adapter.

        Raises WeightUpdateError: 409 where it doesn't fit what serves, 400 where it can't be had of a sharded model.
        """
        if self.asleep:
            raise WeightUpdateError(409, "the weights are asleep: POST /wake_up?tags=weights before an update")
        if body.adapter is not None:
            if self.stage_adapter is None:
                raise WeightUpdateError(400, "adapters need a server that was started with --enable-lora", "adapter")
            return self.stage_adapter(body)
        if body.base_epoch is not None and body.base_epoch != self.epoch:
            raise WeightUpdateError(
                409, f"the changes are against epoch {body.base_epoch}, epoch {self.epoch} serves: push it whole"
            )
        if not self.valid and (body.partial or body.base_epoch is not None):
            raise WeightUpdateError(409, "the weights are invalid (weight_info says since when): push them whole")
        if self.names.shares and (body.base_epoch is not None or body.weight_staging == "in_place"):
            asked = "sparse changes (base_epoch)" if body.base_epoch is not None else "an update in place"
            raise WeightUpdateError(
                400, f"{asked} can't be had with tensor_parallel_size > 1: push it whole and staged"
            )
        if (body.weight_staging or self.weight_staging) != "in_place":
            self.check_room()
            return None
        if not paused:
            raise WeightUpdateError(
                409,
                "an update in place overwrites the weights that serve: POST /pause?mode=keep first and /resume after "
                'it, or start it with {"weight_staging": "full"}',
            )
        return self.stage(in_place=True, verify=body.verify)

    def check_room(self) -> None:
        """Raise WeightUpdateError 503 where dropped updates still hold two sets, which their trainers may write to."""
        if len(self._lent) > MOST_ABANDONED:
            raise WeightUpdateError(
                503,
                f"{len(self._lent)} sets of weights are held by updates that were dropped while their trainers sent: "
                "each is freed when its receive times out, or its trainer ends. Try again then",
            )

    def release(self, staging: Staging) -> None:
        """Take the buffers of a dropped update back. Only once nothing can write into them any more."""
        if staging.adapter is not None:
            return
        with self._lock:
            if not staging.in_place:
                self._lent.remove(staging.into)
                self._spare = None if self.asleep else staging.into
            elif not staging.written:
                self.valid = not staging.replaces_invalid

    def can_commit(self, staging: Staging) -> bool:
        """Whether a commit may happen now: one that overwrites the live set waits for those who read it."""
        return staging.adapter is not None or staging.in_place or self.parameters.method == "flip" or not self._readers

    def commit(self, staging: Staging, label: str | None, *, timeout_s: float = 0.0) -> None:
        """Make the staged parameters live: epoch + 1, and `label` where one is given. Call it between two steps.

        An adapter is entered under its own label, and the epoch stays.

        Raises TimeoutError where it may still not (`can_commit`) after so many seconds.
        """
        if staging.adapter is not None:
            staging.enter()
            return
        with self._unread:
            if not self._unread.wait_for(lambda: self.can_commit(staging), timeout_s):
                raise TimeoutError("the weights that serve are being read, and a commit would overwrite them")
            free = self.parameters.commit(staging.into)
            if not staging.in_place:
                self._lent.remove(staging.into)
            # A checksum under way may still read the set that was flipped away: it is freed once nobody does.
            self._spare = None if self._readers else free
            self.epoch += 1
            self.label = self.label if label is None else label
            self.valid = True

    def sleep(self, *, keep: bool) -> None:
        """Give the memory of all sets back, between two steps and while no update is open.

        The live one goes to host memory, or without `keep` is lost: the weights are invalid then, until a commit.
        """
        with self._lock:
            self._spare = None
            self.valid &= keep
            self.parameters.put_away(keep=self.valid)
            self.asleep = True

    def wake_up(self) -> None:
        """Take the memory again. Where that fails, with torch's RuntimeError, the weights are still asleep."""
        self.parameters.bring_back()
        if self.valid or self.parameters.method == "copy":  # else what flips in brings its own
            self._prepare(self.parameters.live)
        self.asleep = False

    @property
    def validity(self) -> str:
        return "valid" if self.valid else "invalid"

    @contextmanager
    def snapshot(self) -> Iterator[dict[str, torch.Tensor]]:
        """The live tensors by module name, kept from being overwritten while the context is open.

        Raises WeightUpdateError 409 while they are invalid.
        """
        with self._lock:
            if not self.valid:
                raise WeightUpdateError(409, "the weights are invalid until an update completes")
            self._readers += 1
            tensors = self.parameters.live.tensors
        try:
            yield tensors
        finally:
            with self._unread:
                self._readers -= 1
                self._unread.notify_all()
            self.on_unread()

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
