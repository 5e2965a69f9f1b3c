"""The parameters of one update while they are received: where each tensor goes, and whether the set is whole."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from rollout.model.parameters import ParameterSet
from rollout.rendezvous import TensorInfo
from rollout.weights.errors import AbandonedError, WeightUpdateError, listing
from rollout.weights.naming import NameMap, Style, Target
from rollout.weights.shares import Share

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
}
_CHUNK_BYTES = 64 << 20  # most that a digest copies at once


@dataclass(frozen=True)
class Incoming(TensorInfo):
    """One announced tensor, and where it goes."""

    target: Target = field(kw_only=True)


class Staging:
    """The set of parameters that one update fills (`into`), and what has been received of it.

    `live` is the set that serves meanwhile, which a partial or sparse update starts from; `prepare` is called with a
    set that is whole. `replaces_invalid`: the live weights were invalid when it began. `written`: something has come
    into the buffers. `allow_partial`: what is missing is taken from the live set, whether the update says so or not.
    `adapter`: the label of what this is instead of a set of parameters, and `enter` what its commit calls.
    """

    adapter: str | None = None

    def __init__(
        self,
        names: NameMap,
        into: ParameterSet,
        live: ParameterSet,
        prepare: Callable[[ParameterSet], None],
        *,
        in_place: bool,
        verify: bool,
        replaces_invalid: bool,
        allow_partial: bool,
    ) -> None:
        self.into, self._live = into, live
        self.in_place, self.replaces_invalid = in_place, replaces_invalid
        self.written = False
        self._names = names
        self._prepare, self._allow_partial = prepare, allow_partial
        self._filled: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._styles: dict[Style, str] = {}
        self._sums: dict[str, str] | None = {} if verify else None
        self._wholes: dict[str, tuple[torch.Tensor, int]] = {}
        self._writing = threading.Lock()
        self._closed = False

    def enter(self) -> None:
        """Let requests find the adapter that was received."""
        raise AssertionError("a set of parameters is entered by its store")

    def close(self) -> None:
        """No `place` writes after this returns, whatever its thread may still receive."""
        with self._writing:
            self._closed = True

    def resolve(
        self, names: list[str], dtype_names: list[str], shapes: list[list[int]], counts: list[int] | None = None
    ) -> list[Incoming]:
        """Where each announced tensor goes.

        Raises WeightUpdateError 400 that lists every unknown, repeated, mis-shaped or non-floating name, before
        anything is received.
        """
        if not len(names) == len(dtype_names) == len(shapes):
            told = f"{len(names)} names, {len(dtype_names)} dtype_names and {len(shapes)} shapes"
            raise WeightUpdateError(400, f"update_info lists {told}; they must be equally many")
        if counts is not None and len(counts) != len(names):
            raise WeightUpdateError(400, f"update_info lists {len(names)} names and {len(counts)} counts")
        problems: list[str] = []
        plan: list[Incoming] = []
        seen = set(self._filled)
        styles = dict(self._styles)
        for index, (name, dtype_name, shape) in enumerate(zip(names, dtype_names, shapes, strict=True)):
            target = self._names.targets.get(name)
            dtype = DTYPES.get(dtype_name.removeprefix("torch."))
            count = None if counts is None else counts[index]
            if target is None:
                problems.append(self._unknown(name))
            elif name in seen:
                problems.append(f"{name}: named twice in one update")
            elif tuple(shape) != target.size:
                problems.append(f"{name}: shape {list(shape)}, the model has {list(target.size)}")
            elif dtype is None:
                problems.append(f"{name}: dtype {dtype_name!r} is not one of {', '.join(DTYPES)}")
            elif count is not None and not 0 <= count <= math.prod(target.size):
                problems.append(f"{name}: count {count} is not in [0, {math.prod(target.size)}]")
            elif count is not None and self._sums is not None and not self._holds(target, dtype):
                problems.append(f"{name}: {dtype_name} is wider than the server's dtype: push it whole to verify it")
            elif count is not None and target.alias and self.in_place:
                problems.append(f"{name}: a sparse update in place must leave out the tied name of {target.slot}")
            else:
                plan.append(Incoming(name, dtype, target.size, count, target=target))
                if target.style is not None:
                    styles.setdefault(target.style, name)
            seen.add(name)
        if len(styles) > 1:
            both = f"{styles['module']} (a module name) and {styles['checkpoint']} (a checkpoint name)"
            problems.append(f"{both} in one update: send all parameters under one kind of name")
        if problems:
            raise WeightUpdateError(400, f"the update does not fit the model: {listing(problems)}")
        self._styles = styles
        return plan

    def _unknown(self, name: str) -> str:
        if name in self._names.unserved:
            return f"{name}: its checkpoint form is not a slice of a parameter; send module names (named_parameters())"
        return f"{name}: the model has no such parameter"

    def _holds(self, target: Target, wire: torch.dtype) -> bool:
        """Whether the parameter's dtype keeps every value of the wire's."""
        own = self.into.tensors[target.slot].dtype
        return wire == own or torch.finfo(wire).bits < torch.finfo(own).bits

    def direct(self, item: Incoming, device: torch.device) -> torch.Tensor | None:
        """The staged region itself, to receive into without a copy; None where a cast or a gather is needed, or it
        isn't on the `device` that is received on.

        Never in place: a receive that outlives its update must not write into what serves.
        """
        if item.target.alias or self.in_place or item.target.slot in self._names.shares:
            return None
        view = item.target.view(self.into.tensors[item.target.slot])
        return view if view.dtype == item.dtype and view.is_contiguous() and view.device.type == device.type else None

    def give_up(self, item: Incoming) -> None:
        """Replace the buffer of a `direct` region that a receive may still write to when the next update has it."""
        tensors, slot = self.into.tensors, item.target.slot
        if not self.in_place:
            tensors[slot] = torch.empty_like(tensors[slot], pin_memory=tensors[slot].is_pinned())

    def place(self, item: Incoming, received: torch.Tensor) -> None:
        """Take a received tensor (wire dtype, the target's shape); a no-op copy where it is the `direct` region."""
        target = item.target
        buffer = self.into.tensors[target.slot]
        share = self._names.shares.get(target.slot)
        if self._sums is not None:
            self._sums[target.name] = digest(received)
        if target.alias:
            self._aliases[target.name] = digest((received if share is None else share.cut(received)).to(buffer.dtype))
        elif share is not None:
            self._write(lambda: self._place_share(target, share, received))
        elif received.data_ptr() != (view := target.view(buffer)).data_ptr():
            self._write(lambda: view.copy_(received))
        self._filled.add(target.name)

    def _place_share(self, target: Target, share: Share, received: torch.Tensor) -> None:
        """Keep what this rank holds of a sharded parameter, once all regions of it have come."""
        buffer = self.into.tensors[target.slot]
        whole, due = received, 0
        if not share.is_whole(target.size, target.stride):
            fresh = torch.empty(share.shape, dtype=buffer.dtype, device=buffer.device), share.shape.numel()
            whole, due = self._wholes.pop(target.slot, fresh)
            target.view(whole).copy_(received)
            due -= received.numel()
        if due:
            self._wholes[target.slot] = whole, due
        else:
            buffer.copy_(share.cut(whole))

    def place_changes(self, item: Incoming, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Take a sparse tensor: the live one with `values` (count,) wire dtype at `indices` (count,), ascending.

        Raises WeightUpdateError 400 on indices that don't ascend within the tensor.
        """
        target = item.target
        size = math.prod(target.size)
        positions = indices.long()
        if len(positions) and not (
            positions[0] >= 0 and positions[-1] < size and bool((positions[1:] > positions[:-1]).all())
        ):
            raise WeightUpdateError(400, f"{target.name}: the changed indices must ascend within [0, {size})")
        live = target.view(self._live.tensors[target.slot])
        into = self.into.tensors[target.slot]
        staged = torch.empty_like(live, device=into.device) if target.alias else target.view(into)

        def change() -> None:
            if target.alias or not self.in_place:
                staged.copy_(live)
            if len(positions):
                where = torch.unravel_index(positions.to(staged.device), target.size)
                staged[where] = values.to(staged.device, staged.dtype)

        self._write(change)
        if self._sums is not None:
            self._sums[target.name] = digest(staged.to(item.dtype))
        if target.alias:
            self._aliases[target.name] = digest(staged)
        self._filled.add(target.name)

    def _write(self, work: Callable[[], object]) -> None:
        with self._writing:
            if self._closed:
                raise AbandonedError
            self.written = True
            work()

    def check(self, *, partial: bool, progress: Callable[[], None], checksums: dict[str, str] | None = None) -> None:
        """Make the set whole and ready to serve, or raise WeightUpdateError 400, naming what is wrong.

        A partial update is completed from the live set. `progress` is called now and then.
        """
        self._compare(checksums)
        style: Style = next(iter(self._styles), "module")
        required = self._names.required(style)
        self._complete(required, partial or self._allow_partial, progress)
        infinite = []
        for target in self._apart(required):
            if target.name in self._filled and not _finite(self._region(target, self.into.tensors)):
                infinite.append(target.name)
            progress()
        if infinite:
            raise WeightUpdateError(400, f"not every value is finite (in the server's dtype) in: {listing(infinite)}")
        for name, alias_digest in self._aliases.items():
            slot = self._names.targets[name].slot
            if digest(self.into.tensors[slot]) != alias_digest:
                raise WeightUpdateError(
                    400, f"{name} is tied to {slot} in this model, but other values came for it; untie neither or both"
                )
            progress()
        self._prepare(self.into)

    def _compare(self, checksums: dict[str, str] | None) -> None:
        received, sent = self._sums or {}, checksums or {}
        differing = sorted(n for n in received.keys() | sent.keys() if received.get(n) != sent.get(n))
        if differing:
            raise WeightUpdateError(
                400, f"what was received is not what the sender's checksums say in: {listing(differing)}. Push again"
            )

    def _complete(self, required: list[Target], partial: bool, progress: Callable[[], None]) -> None:
        missing = [t for t in required if t.name not in self._filled]
        # After a failed in-place update nothing of the live set may be relied on, optional buffers neither.
        lacking = [t.name for t in missing if self.replaces_invalid or t.slot not in self._names.optional]
        what = f"the update lacks {len(lacking)} of {len(required)} parameters: {listing(lacking)}. "
        if lacking and self.replaces_invalid:
            raise WeightUpdateError(400, what + "Send them all: the weights are invalid, nothing can be kept of them")
        if lacking and not partial:
            raise WeightUpdateError(
                400,
                what + 'Send them all, or start the update with {"partial": true} (or the server with '
                "--allow-partial-updates)",
            )
        if self._wholes:
            raise WeightUpdateError(
                400,
                "with tensor_parallel_size > 1 a parameter is replaced whole or not at all; only regions came of: "
                f"{listing(sorted(self._wholes))}",
            )
        if missing and not self.in_place:
            for target in self._apart(missing):
                self._region(target, self.into.tensors).copy_(self._region(target, self._live.tensors))
                progress()

    def _apart(self, targets: list[Target]) -> Iterator[Target]:
        """The targets; only the first of those that share a sharded parameter, which `_region` takes as one."""
        shared: set[str] = set()
        for target in targets:
            if target.slot not in shared:
                yield target
            if target.slot in self._names.shares:
                shared.add(target.slot)

    def _region(self, target: Target, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The target's part of a set of tensors; of a sharded parameter, all that this rank holds of it."""
        tensor = tensors[target.slot]
        return tensor if target.slot in self._names.shares else target.view(tensor)


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
