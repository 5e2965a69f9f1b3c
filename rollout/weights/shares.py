"""One rank's share of a parameter: cut from the whole one that a trainer sends, and put together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.distributed.sharding_utils import DtensorShardOperation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Share:
    """How transformers' plan deals out one parameter, a DTensor; `shape` is the whole one's.

    Raises ValueError where what transformers would cut from it isn't of the shape that the model holds.
    """

    def __init__(self, name: str, parameter: Any) -> None:
        self.shape = parameter.shape
        self._stride = torch.empty(self.shape, device="meta").stride()
        self._placements = parameter.placements
        self._operation: Any = DtensorShardOperation(parameter)
        cut = self.cut(torch.empty(self.shape, device="meta")).shape
        held = parameter._local_tensor.shape
        if cut != held:
            raise ValueError(f"{name} {list(self.shape)}: this rank holds {list(held)}, its cut is {list(cut)}")

    def is_whole(self, size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
        """Whether a region of the (contiguous) parameter, in elements, is all of it as it lies."""
        return size == self.shape and stride == self._stride

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's share of a tensor of the parameter's whole shape; it may be a view."""
        share: torch.Tensor = self._operation.shard_tensor(whole)
        return share

    def whole(self, share: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The whole tensor, on the CPU. All ranks of the (gloo) mesh call it together, in one order."""
        from torch.distributed.tensor import DTensor

        dealt = DTensor.from_local(
            share.cpu(), mesh, self._placements, run_check=False, shape=self.shape, stride=self._stride
        )
        return dealt.full_tensor()
