"""The parameters that a model computes with: one live set of buffers, and sets beside it that may take its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.kernels.products import PackedWeight
from rollout.model.graphs import Graph

CommitMethod = Literal["flip", "copy"]


@dataclass(eq=False)
class ParameterSet:
    """One whole set of a model's parameters, and everything that was made of it.

    `tensors`: its buffers, by first module name. `packed`: the packed weights of its linear layers, in the order of
    `PackedWeights`. `graphs`: the CUDA graphs that read its buffers, by batch size.
    """

    tensors: dict[str, Tensor]
    packed: list[PackedWeight] = field(default_factory=list)
    graphs: dict[int, Graph] = field(default_factory=dict)


class ModelParameters:
    """A model's distinct parameters and persistent floating buffers, and the set of them that is live.

    `slots` are the model's own tensors, by first module name; `first` maps every module name (a tied parameter has
    several) to it; `buffers` names the slots that are no parameters. Of a parameter that is sharded (`sharded`, as
    DTensors), the slot is what this rank holds. `method` says what a commit does: "flip" points the slots to the other
    set, "copy" copies its values into the live one, whose addresses then never change. None: a copy on CUDA, where
    graphs have the addresses baked in, and elsewhere a flip.
    """

    def __init__(self, model: PreTrainedModel, method: CommitMethod | None = None) -> None:
        self.model = model
        self.method: CommitMethod = method or ("copy" if model.device.type == "cuda" else "flip")
        self.slots: dict[str, Tensor] = {}
        self.sharded: dict[str, Any] = {}
        self.first: dict[str, str] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        by_identity: dict[int, str] = {}
        stored = model.state_dict().keys()
        buffers = {n: b for n, b in model.named_buffers() if n in stored and b.is_floating_point()}
        for name, tensor in (parameters | buffers).items():
            self.first[name] = by_identity.setdefault(id(tensor), name)
            if self.first[name] == name:
                self.slots[name] = tensor
                if hasattr(tensor, "_local_tensor"):
                    self.sharded[name], self.slots[name] = tensor, tensor._local_tensor
        self.buffers = self.slots.keys() - parameters.keys()
        for tensor in self.slots.values():
            tensor.data = tensor.data.contiguous()
        self.live = ParameterSet({name: tensor.data for name, tensor in self.slots.items()})

    def new_set(self, *, on_host: bool = False) -> ParameterSet:
        """A set of buffers like the live ones, with nothing in them; those of CUDA parameters `on_host`, pinned."""
        pinned = on_host and self.model.device.type == "cuda"
        place: dict[str, Any] = {"device": "cpu", "pin_memory": True} if pinned else {}
        return ParameterSet({name: torch.empty_like(tensor, **place) for name, tensor in self.live.tensors.items()})

    def successor_in_place(self) -> ParameterSet:
        """A set over the live buffers themselves: what is made of their new values is not mixed with the old."""
        return ParameterSet(dict(self.live.tensors), graphs=self.live.graphs)

    def put_away(self, *, keep: bool) -> None:
        """Take the live set off the device, into host memory, or without `keep` only remember its shapes.

        On a CPU host memory is where it is. The model can't compute until `bring_back`.
        """
        device = "cpu" if keep else "meta"
        held = {
            name: tensor.to(device) if keep else torch.empty_like(tensor, device=device)
            for name, tensor in self.live.tensors.items()
        }
        for slot in self.slots.values():
            slot.data = slot.data.new_empty(0)
        self.live = ParameterSet(held)

    def bring_back(self) -> None:
        """Have the model compute with what was put away; where it was not kept, with anything at all.

        Nothing has changed where the memory doesn't suffice, for which torch raises a RuntimeError.
        """
        device = next(iter(self.slots.values())).device
        tensors = {
            name: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
            for name, tensor in self.live.tensors.items()
        }
        for name, slot in self.slots.items():
            slot.data = tensors[name]
        self.live = ParameterSet(tensors)

    def commit(self, staged: ParameterSet) -> ParameterSet | None:
        """Have the model compute with the values of `staged`, between two forward passes.

        Returns the set that is free now; None where `staged` lies over the live buffers.
        """
        live = self.live
        if all(staged.tensors[name] is tensor for name, tensor in live.tensors.items()):
            self.live = staged
            return None
        if self.method == "copy":
            torch._foreach_copy_(list(live.tensors.values()), [staged.tensors[name] for name in live.tensors])
            live.packed, staged.packed = staged.packed, []
            return staged
        for name, slot in self.slots.items():
            slot.data = staged.tensors[name]
        self.live = staged
        return live
