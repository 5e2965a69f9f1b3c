"""An adapter while it is received: which layers its tensors belong to, and whether it is whole."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from rollout.kernels.lora import LoraWeight
from rollout.lora.layers import Adapter, LoraLayers, embedding_part
from rollout.lora.peft_config import PeftConfig
from rollout.weights.errors import AbandonedError, WeightUpdateError, listing
from rollout.weights.naming import Target
from rollout.weights.staging import DTYPES, Incoming, Staging, digest

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<kind>embedding_)?(?P<part>[AB])(?:\.weight)?")
_COPY = re.compile(r"(?:base_model\.model\.)?(.+)\.base_layer\.weight")
"""What PEFT saves beside the adapter of an embedding or head: the base's own weight (`save_embedding_layers`)."""
_WHY = {
    "lora_magnitude_vector": "use_dora isn't served",
    "modules_to_save": "modules_to_save aren't served",
    "base_layer": "target_parameters aren't served",
    "bias": "biases aren't served",
}


class AdapterStaging(Staging):
    """The tensors of one adapter, under PEFT's names; made to an `Adapter` once they are all there.

    `made` is called, on the thread that received it, once it is checked; `enter` for its commit. Raises
    WeightUpdateError 400, naming every tensor at fault, for what fits no layer, has another shape or rank than
    it should, more than `max_rank`, or isn't finite.
    """

    def __init__(
        self,
        label: str,
        layers: LoraLayers,
        config: PeftConfig,
        *,
        max_rank: int,
        embed_scale: float,
        verify: bool = False,
        made: Callable[[AdapterStaging], None] = lambda staging: None,
        enter: Callable[[AdapterStaging], None] = lambda staging: None,
    ) -> None:
        config.check()
        self.adapter = label
        self._made, self._enter = made, enter
        self.layers, self.config, self._max_rank, self._embed_scale = layers, config, max_rank, embed_scale
        if (most := max(config.ranks)) > max_rank:
            raise WeightUpdateError(400, f"LoRA rank {most} is greater than max_lora_rank {max_rank}.", "lora_path.r")
        self.in_place, self.replaces_invalid = False, False
        self.written = False
        self.tensors: dict[str, Tensor] = {}
        self._found: dict[int, dict[str, str]] = {}
        self._sums: dict[str, str] | None = {} if verify else None
        self._writing = threading.Lock()
        self._closed = False

    def resolve(
        self, names: list[str], dtype_names: list[str], shapes: list[list[int]], counts: list[int] | None = None
    ) -> list[Incoming]:
        """Where each announced tensor goes, as `Staging.resolve`."""
        if not len(names) == len(dtype_names) == len(shapes):
            told = f"{len(names)} names, {len(dtype_names)} dtype_names and {len(shapes)} shapes"
            raise WeightUpdateError(400, f"update_info lists {told}; they must be equally many")
        if counts is not None:
            raise WeightUpdateError(400, "an adapter is sent whole: leave counts out")
        problems, plan = [], []
        seen = set[str]()
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
            dtype = DTYPES.get(dtype_name.removeprefix("torch."))
            problem = "named twice" if name in seen else self._problem(name, shape)
            seen.add(name)
            if dtype is None:
                problem = problem or f"dtype {dtype_name!r} is not one of {', '.join(DTYPES)}"
            if problem is not None or dtype is None:
                problems.append(f"{name}: {problem}")
                continue
            size = tuple(shape)
            target = Target(name, name, size, (size[1], 1), 0, None, False)
            plan.append(Incoming(name, dtype, size, None, target=target))
        if problems:
            raise WeightUpdateError(400, f"the adapter does not fit the model: {listing(problems)}")
        return plan

    def _problem(self, name: str, shape: list[int]) -> str | None:
        """What is wrong with a tensor; what isn't is noted."""
        match = _NAME.fullmatch(name)
        if (copy := self._copied(name)) is not None:
            size = list(copy.shape)
            return None if shape == size else f"shape {shape}, the layer has {size}"
        if match is None:
            return next((why for word, why in _WHY.items() if word in name), "this is no tensor of a LoRA adapter")
        layer, part = match["layer"], match["part"]
        number = self.layers.names.get(layer)
        if number is None:
            return f"the model has no linear layer or embedding {layer!r}"
        embeds = number in self.layers.embeddings
        if embeds != bool(match["kind"]):
            return f"{layer} is {'an embedding' if embeds else 'a linear layer'}"
        outputs, inputs = self.layers.weights[number].shape
        if embeds:
            outputs, inputs = inputs, outputs
        if len(shape) != 2 or shape[1 if part == "A" else 0] != (inputs if part == "A" else outputs):
            wanted = f"[rank, {inputs}]" if part == "A" else f"[{outputs}, rank]"
            return f"shape {shape}, the layer needs {wanted}"
        rank = shape[0 if part == "A" else 1]
        if rank not in self.config.ranks:
            return f"rank {rank}, adapter_config.json says {sorted(self.config.ranks)}"
        if self._found.setdefault(number, {}).setdefault(part, name) != name or name in self.tensors:
            return "named twice"
        return None

    def _copied(self, name: str) -> Tensor | None:
        """The base's weight, of which this name is a copy."""
        match = _COPY.fullmatch(name)
        number = None if match is None else self.layers.names.get(match[1])
        return None if number is None else self.layers.weights[number]

    def direct(self, item: Incoming, device: torch.device) -> Tensor | None:
        """Nothing is received into what serves."""
        return None

    def give_up(self, item: Incoming) -> None:
        """There is no buffer to replace."""

    def place(self, item: Incoming, received: Tensor) -> None:
        """Take a received tensor (wire dtype, the target's shape), which is copied."""
        if self._sums is not None:
            self._sums[item.name] = digest(received)
        if (base := self._copied(item.name)) is not None:
            if not torch.equal(received.view(base.shape).to(base), base.data):
                raise WeightUpdateError(
                    400,
                    f"{item.name} isn't the weight that serves: save the adapter with save_embedding_layers=False, or "
                    "push the base as well",
                )
            return
        copied = received.view(item.target.size).clone()
        with self._writing:
            if self._closed:
                raise AbandonedError
            self.tensors[item.name] = copied

    def place_changes(self, item: Incoming, indices: Tensor, values: Tensor) -> None:
        """Never: `resolve` refuses counts."""
        raise AssertionError

    def check(self, *, partial: bool, progress: Callable[[], None], checksums: dict[str, str] | None = None) -> None:
        """Raise WeightUpdateError 400 unless the adapter is whole, finite, and what the checksums say."""
        if checksums is not None:
            self._compare(checksums)
        problems = [
            f"{next(iter(parts.values()))}: its other half (lora_{'B' if 'A' in parts else 'A'}) is missing"
            for parts in self._found.values()
            if len(parts) == 1
        ]
        for parts in self._found.values():
            if len(parts) == 2 and self.tensors[parts["A"]].shape[0] != self.tensors[parts["B"]].shape[1]:
                problems.append(f"{parts['A']}: A and B have other ranks")
        problems += self._missing()
        problems += [f"{name}: not every value is finite" for name, t in self.tensors.items() if not t.isfinite().all()]
        if problems:
            raise WeightUpdateError(400, f"the adapter is not whole: {listing(problems)}")
        self._made(self)
        progress()

    def enter(self) -> None:
        """Its commit."""
        self._enter(self)

    def _missing(self) -> list[str]:
        """The targets that adapter_config.json names and that no tensor is for."""
        names = {name for name, number in self.layers.names.items() if number in self._found}
        targets = self.config.target_modules
        if not names:
            return ["it has no tensors"]
        if targets == "all-linear":
            wanted = self.layers.names.keys() - {self.layers.head} - self._embedding_names() - names
            return [f"{name}: no tensor, and target_modules is 'all-linear'" for name in sorted(wanted)]
        if not isinstance(targets, list):
            return []  # an expression, by which PEFT chose what is here
        last = {name.rpartition(".")[2] for name in names}
        return [
            f"{target}: no tensor, and target_modules names it"
            for target in targets
            if target not in last and not any(name == target or name.endswith(f".{target}") for name in names)
        ]

    def _embedding_names(self) -> set[str]:
        return {name for name, number in self.layers.names.items() if number in self.layers.embeddings}

    def make(self) -> Adapter:
        """The checked adapter, on the model's device."""
        parts: list[LoraWeight | None] = [None] * len(self.layers.names)
        tokens: dict[int, Tensor] = {}
        scale_of = self.config.scales()  # here, on the thread that receives: 4096 patterns take long to compile
        for name, number in self.layers.names.items():
            if number not in self._found:
                continue
            a, b = (self.tensors[self._found[number][part]].to(self.layers.device) for part in "AB")
            scale = scale_of(name, a.shape[0])
            if number in self.layers.embeddings:
                tokens[number] = a.float().T.contiguous()
                parts[number] = embedding_part(b, scale * self._embed_scale)
            else:
                parts[number] = LoraWeight.of(a, b, scale)
        assert self.adapter is not None
        return Adapter.of(self.adapter, parts, tokens)
