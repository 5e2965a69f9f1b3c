"""Where the weights of a push come from: named tensors in a stable order, one at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rollout.rendezvous import TensorInfo

# What wrappers (torch.compile, activation checkpointing) put into parameter names.
_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.")


class WeightSource(Protocol):
    """Named tensors. `distributed` sources are sharded: every rank must iterate them, and together."""

    @property
    def distributed(self) -> bool:
        """Whether iterating is a collective of the trainer's ranks."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""

    def infos(self) -> list[TensorInfo]:
        """What `tensors` will yield, in its order."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """The full, detached, contiguous tensors. Each may be freed once the next is asked for."""


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Detached, contiguous, and of a DTensor all of it: every rank must call this, and together."""
    detached = tensor.detach()
    return (detached.full_tensor() if isinstance(detached, DTensor) else detached).contiguous()


class StateDictSource:
    """The floating tensors of a mapping, in its order, as they are when they are sent."""

    def __init__(self, state_dict: dict[str, torch.Tensor]) -> None:
        self._tensors = {name: t for name, t in state_dict.items() if t.is_floating_point()}
        if not self._tensors:
            raise ValueError("a weight source needs at least one floating tensor, got none")

    @property
    def distributed(self) -> bool:
        return any(isinstance(t, DTensor) for t in self._tensors.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self._tensors.values())).device

    def infos(self) -> list[TensorInfo]:
        return [TensorInfo(name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]

    def tensors(self) -> Iterator[torch.Tensor]:
        for tensor in self._tensors.values():
            yield full(tensor)


class ModuleSource(StateDictSource):
    """A module's parameters and persistent floating buffers; a tied parameter is sent once, under its first name.

    Takes plain modules, DistributedDataParallel, torch.compile'd modules and FSDP2 (`fully_shard`).
    """

    def __init__(self, module: nn.Module) -> None:
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in named_tensors(module).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor
        super().__init__(found)


class StreamSource:
    """The (name, tensor) pairs of one push, from a trainer that hands over an iterator and no manifest.

    The first push takes all of it before it announces anything: that copies nothing unless the model is sharded, where
    the rank that sends then holds the whole of it once. Later pushes stream. The ranks gather by themselves. Without a
    `device` it is that of the first tensor.
    """

    distributed = False

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._infos: list[TensorInfo] | None = None
        self._pairs: Iterator[tuple[str, torch.Tensor]] = iter(())

    @property
    def device(self) -> torch.device:
        """Raises ValueError where it isn't known yet."""
        if self._device is None:
            raise ValueError("no tensor has come so far, so their device isn't known")
        return self._device

    def begin(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        """These are the next push's. Raises ValueError for none at the first."""
        if self._infos is None:
            held = list(pairs)
            if not held:
                raise ValueError("a weight source needs at least one tensor, got none")
            self._device = self._device or held[0][1].device
            self._infos, pairs = [_info(*pair) for pair in held], iter(held)
        self._pairs = pairs

    def infos(self) -> list[TensorInfo]:
        return self._infos or []

    def tensors(self) -> Iterator[torch.Tensor]:
        """One tensor at a time. Raises ValueError where they aren't those of the first push."""
        for known, pair in itertools.zip_longest(self.infos(), self._pairs):
            if known is None or pair is None or _info(*pair) != known:
                got = None if pair is None else _info(*pair)
                raise ValueError(f"the model's parameters changed since the first push: {known} was, {got} is")
            yield full(pair[1])


def _info(name: str, tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(name, tensor.dtype, tuple(tensor.shape))


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's state, tied names included, under the names that it has without wrappers."""
    return {plain_name(name): tensor for name, tensor in without_ddp(module).state_dict(keep_vars=True).items()}


def without_ddp(module: nn.Module) -> nn.Module:
    """What DistributedDataParallel wraps, or the module itself."""
    while isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module
    return module


def plain_name(name: str) -> str:
    """The name of a module or tensor without what torch.compile and activation checkpointing put into it."""
    for part in _WRAPPER_PARTS:
        name = f"{name}.".replace(part, "").removesuffix(".")
    return name
