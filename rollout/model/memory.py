"""How much of a GPU's memory the KV cache may have: what the engine's share leaves after all else that it will need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.config import WeightStaging
from rollout.rendezvous import DEFAULT_BUFFER_BYTES

GRAPH_BYTES = 8 << 20
"""What one captured graph takes of its own, at most; their temporaries lie in one pool."""
SAMPLER_COPIES = 6
"""float32 arrays of the size of the logits that the filters have at the same time, at most: a sort's values, its
indices (twice as wide), weights, their sums and a mask."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes of one device. `total` and `free` as the driver says; `held` is what this process has taken already, with
    its parameters; the rest is still to come: `staging` at the first weight update, `landing` while what it brings is
    received, `step` while a step of the most tokens is computed and sampled, `graphs` with their pool. `pinned` is what
    staging on the host would take there, where `host_free` is left.
    """

    total: int
    free: int
    held: int
    staging: int
    landing: int
    step: int
    graphs: int
    pinned: int
    host_free: int

    def left(self, utilization: float) -> int:
        """What the cache may have, within a share `utilization` of the whole device."""
        to_come = self.staging + self.landing + self.step + self.graphs
        return min(int(self.total * utilization) - self.held, self.free) - to_come

    def check(self, cache_bytes: int, asked_for: str) -> None:
        """Raise ValueError, with what would help, where a cache of this size can't stay beside all else."""
        self._check(cache_bytes, self.left(1.0), asked_for)

    def blocks(self, block_bytes: int, least: int, utilization: float) -> int:
        """How many blocks fit in the share. Raises ValueError, with what would help, if they are fewer than `least`."""
        left = self.left(utilization)
        self._check(least * block_bytes, left, f"one sequence of --max-model-len ({least} blocks)", utilization)
        return left // block_bytes

    def _check(self, needed: int, left: int, what: str, utilization: float = 1.0) -> None:
        if needed <= left:
            return
        remedies = {
            "--gpu-memory-utilization nearer to 1": needed <= self.left(1.0) and utilization < 1,
            "--weight-staging host": self.pinned <= self.host_free and left < needed <= left + self.staging,
            "--weight-staging in_place": left < needed <= left + self.staging,
            "--enforce-eager": self.graphs > 0 and needed <= left + self.graphs,
            "a smaller --max-num-batched-tokens and --max-num-seqs": needed <= left + self.step // 2,
            "a smaller cache or --max-model-len": left > needed // 100,
            "--tensor-parallel-size 2": needed // 2 <= left + (self.held + self.staging) // 2,
        }
        working = [remedy for remedy, works in remedies.items() if works] or ["a larger device"]
        raise ValueError(
            f"{what} needs a KV cache of {_gib(needed)}, {_gib(max(left, 0))} are left. The device has "
            f"{_gib(self.total)}, {_gib(self.free)} of it free; {utilization:.0%} of it are for this engine, which "
            f"holds {_gib(self.held)} and needs {_gib(self.staging + self.landing)} to receive weights, "
            f"{_gib(self.step)} for a step and {_gib(self.graphs)} for CUDA graphs. "
            f"What would help: {', '.join(working)}"
        )


@dataclass(frozen=True)
class ReceivedBytes:
    """What weight updates take beside the live parameters, in bytes, as `MemoryNeeds` names it."""

    staging: int
    landing: int
    pinned: int

    @classmethod
    def of(cls, held: Iterable[Tensor], wholes: Iterable[Tensor], weight_staging: WeightStaging) -> ReceivedBytes:
        """For this rank's parameters `held`, of which `wholes` arrive: one at a time, or packed in buffers."""
        sizes, arriving = [p.nbytes for p in held], [p.nbytes for p in wholes]
        return cls(
            staging=sum(sizes) * (weight_staging == "full"),
            landing=max(*arriving, min(DEFAULT_BUFFER_BYTES, sum(arriving))),
            pinned=sum(1 << (size - 1).bit_length() for size in sizes),  # torch rounds pinned memory up like this
        )

    def check_host(self, free: int) -> None:
        """Raise ValueError where the host has too little memory left for a set of parameters."""
        if self.pinned > free:
            raise ValueError(
                f"weight_staging host takes {_gib(self.pinned)} of pinned host memory, {_gib(free)} are left: receive "
                "weights with --weight-staging in_place, or full on a larger device"
            )


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """The most memory that `work` has at once beside what there was before."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
