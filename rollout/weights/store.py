"""The parameters that serve, the ones being received, and the flip between the two."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rollout.weights.errors import WeightUpdateError
from rollout.weights.naming import NameMap, Style, Target

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
}
_CHUNK_BYTES = 64 << 20  # most that a digest copies at once
_LISTED = 8  # names spelled out in a message


@dataclass(frozen=True)
class Incoming:
    """One announced tensor: where it goes, and the dtype it has on the wire."""

    target: Target
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return math.prod(self.target.size) * self.dtype.itemsize


class WeightStore:
    """Live and staged parameters of one model, which is already on its device and in its dtype.

    `epoch` counts commits, `label` is the caller's name of the live weights. `commit` belongs to the engine's thread,
    between two steps; all else may run beside decoding. Staging is a second set of parameters, allocated at the first
    update; a commit makes the old live set the next staging.
    """

    def __init__(self, model: PreTrainedModel, *, allow_partial: bool = False, weight_staging: str = "full") -> None:
        if weight_staging != "full":
            raise ValueError(f"weight_staging {weight_staging!r} is not implemented yet; use 'full'")
        self.allow_partial = allow_partial
        self.epoch = 0
        self.label = "default"
        self.names = NameMap(model)
        for tensor in self.names.slots.values():
            tensor.data = tensor.data.contiguous()
        self._spare: dict[str, torch.Tensor] | None = None
        self._readers = 0
        self._lock = threading.Lock()

    def stage(self) -> Staging:
        """A set of buffers for one update. The caller owns it until `commit` or `release`."""
        with self._lock:
            buffers, self._spare = self._spare, None
        if buffers is None:
            buffers = {name: torch.empty_like(tensor.data) for name, tensor in self.names.slots.items()}
        return Staging(self, buffers)

    def release(self, staging: Staging) -> None:
        """Take the buffers of a dropped update back. Only once nothing can write into them any more."""
        with self._lock:
            self._spare = staging.buffers

    def commit(self, staging: Staging, label: str | None) -> None:
        """Make the staged parameters live: epoch + 1, and `label` where one is given. Call it between two steps."""
        buffers = staging.buffers
        with self._lock:
            for name, tensor in self.names.slots.items():
                live = tensor.data
                tensor.data = buffers[name]
                buffers[name] = live
            self.epoch += 1
            self.label = self.label if label is None else label
            # A checksum under way still reads the old set: leave it to the garbage collector then.
            self._spare = None if self._readers else buffers

    @contextmanager
    def snapshot(self) -> Iterator[dict[str, torch.Tensor]]:
        """The live tensors by module name, kept from being overwritten while the context is open."""
        with self._lock:
            self._readers += 1
            tensors = {name: tensor.data for name, tensor in self.names.slots.items()}
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
            return {t.name: digest(t.view(tensors[t.slot])) for t in self.names.required("checkpoint")}


class Staging:
    """The buffers of one update, and what has been received into them."""

    def __init__(self, store: WeightStore, buffers: dict[str, torch.Tensor]) -> None:
        self.buffers = buffers
        self._store = store
        self._names = store.names
        self._filled: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._styles: dict[Style, str] = {}

    def resolve(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> list[Incoming]:
        """Where each announced tensor goes.

        Raises WeightUpdateError 400 that lists every unknown, repeated, mis-shaped or non-floating name, before
        anything is received.
        """
        if not len(names) == len(dtype_names) == len(shapes):
            counts = f"{len(names)} names, {len(dtype_names)} dtype_names and {len(shapes)} shapes"
            raise WeightUpdateError(400, f"update_info lists {counts}; they must be equally many")
        problems: list[str] = []
        plan: list[Incoming] = []
        seen = set(self._filled)
        styles = dict(self._styles)
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
            target = self._names.targets.get(name)
            dtype = DTYPES.get(dtype_name.removeprefix("torch."))
            if target is None:
                problems.append(self._unknown(name))
            elif name in seen:
                problems.append(f"{name}: named twice in one update")
            elif tuple(shape) != target.size:
                problems.append(f"{name}: shape {list(shape)}, the model has {list(target.size)}")
            elif dtype is None:
                problems.append(f"{name}: dtype {dtype_name!r} is not one of {', '.join(DTYPES)}")
            else:
                plan.append(Incoming(target, dtype))
                if target.style is not None:
                    styles.setdefault(target.style, name)
            seen.add(name)
        if len(styles) > 1:
            both = f"{styles['module']} (a module name) and {styles['checkpoint']} (a checkpoint name)"
            problems.append(f"{both} in one update: send all parameters under one kind of name")
        if problems:
            raise WeightUpdateError(400, f"the update does not fit the model: {_listing(problems)}")
        self._styles = styles
        return plan

    def _unknown(self, name: str) -> str:
        if name in self._names.unserved:
            return f"{name}: its checkpoint form is not a slice of a parameter; send module names (named_parameters())"
        return f"{name}: the model has no such parameter"

    def direct(self, item: Incoming) -> torch.Tensor | None:
        """The staged region itself, to receive into without a copy; None where a cast or a gather is needed."""
        if item.target.alias:
            return None
        view = item.target.view(self.buffers[item.target.slot])
        return view if view.dtype == item.dtype and view.is_contiguous() else None

    def place(self, item: Incoming, received: torch.Tensor) -> None:
        """Take a received tensor (wire dtype, the target's shape); a no-op copy where it is the `direct` region."""
        target = item.target
        buffer = self.buffers[target.slot]
        if target.alias:
            self._aliases[target.name] = digest(received.to(buffer.dtype))
        elif received.data_ptr() != (view := target.view(buffer)).data_ptr():
            view.copy_(received)
        self._filled.add(target.name)

    def check(self, *, partial: bool, progress: Callable[[], None]) -> None:
        """Make the set whole, or raise WeightUpdateError 400 that names the missing, differing or non-finite tensors.

        A partial update is completed from the live set. `progress` is called now and then.
        """
        style: Style = next(iter(self._styles), "module")
        required = self._names.required(style)
        missing = [t for t in required if t.name not in self._filled]
        lacking = [t.name for t in missing if t.slot not in self._names.optional]
        if lacking and not (partial or self._store.allow_partial):
            raise WeightUpdateError(
                400,
                f"the update lacks {len(lacking)} of {len(required)} parameters: {_listing(lacking)}. Send them all, "
                'or start the update with {"partial": true} (or the server with --allow-partial-updates)',
            )
        with self._store.snapshot() as live:
            for target in missing:
                target.view(self.buffers[target.slot]).copy_(target.view(live[target.slot]))
                progress()
        infinite = []
        for target in required:
            if target.name in self._filled and not _finite(target.view(self.buffers[target.slot])):
                infinite.append(target.name)
            progress()
        if infinite:
            raise WeightUpdateError(400, f"not every value is finite (in the server's dtype) in: {_listing(infinite)}")
        for name, alias_digest in self._aliases.items():
            slot = self._names.targets[name].slot
            if digest(self.buffers[slot]) != alias_digest:
                raise WeightUpdateError(
                    400, f"{name} is tied to {slot} in this model, but other values came for it; untie neither or both"
                )
            progress()


def digest(tensor: torch.Tensor) -> str:
    """sha256 (hex) of a tensor's elements in row-major order, as stored; copies at most 64 MiB at once."""
    sha = hashlib.sha256()
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    rows = max(1, _CHUNK_BYTES // max(1, tensor[:1].nbytes)) if tensor.dim() else 1
    for piece in tensor.split(rows) if tensor.dim() else (tensor,):
        sha.update(piece.contiguous().view(-1).view(torch.uint8).cpu().numpy())  # type: ignore[arg-type]
    return sha.hexdigest()


def _finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite. Both extremes are NaN if any value is: no temporary of the tensor's size."""
    return tensor.numel() == 0 or all(math.isfinite(v.item()) for v in tensor.aminmax())


def _listing(entries: list[str]) -> str:
    more = f"; and {len(entries) - _LISTED} more" if len(entries) > _LISTED else ""
    return "; ".join(entries[:_LISTED]) + more
