"""The weights that serve, for another engine: it receives them as it would a trainer's."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from typing import Any

import torch

from rollout.rendezvous import gloo_group, host_store
from rollout.weights.receiver import beside_decoding
from rollout.weights.store import WeightStore

logger = logging.getLogger(__name__)


def offer_weights(store: WeightStore, timeout_s: float, world_size: int, address: str) -> dict[str, Any]:
    """Broadcast the live parameters, once, to the other `world_size` - 1 ranks of a gloo group that meets at `address`,
    which is this machine's, and the returned port.

    Returns at once, with what a receiver announces of them (module names, dtypes, shapes) and their epoch and label;
    the rest happens on a thread, each wait of it within `timeout_s` seconds. Meanwhile they can't be overwritten, as
    with a checksum. Raises WeightUpdateError 409 while they are invalid.
    """
    with ExitStack() as failing:
        tensors = failing.enter_context(store.snapshot())
        rendezvous = host_store(address, world_size, timeout_s)
        answer = {
            "port": rendezvous.port,
            "names": sorted(tensors),
            "dtype_names": [str(tensors[name].dtype).removeprefix("torch.") for name in sorted(tensors)],
            "shapes": [list(store.names.shape(name)) for name in sorted(tensors)],
            "epoch": store.epoch,
            "version": store.label,
        }
        reading = failing.pop_all()

    def send() -> None:
        with reading, beside_decoding(tensors):
            gathered = store.gather(tensors)
            try:
                group = gloo_group(rendezvous, 0, world_size, timeout_s)
                for _, tensor in gathered:
                    group.broadcast(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8), 0).wait()
            except RuntimeError as error:
                logger.warning("the weights were offered to another engine, which did not take them: %s", error)
                for _ in gathered:  # the other ranks of a sharded model gather along, and would wait for this one
                    pass

    threading.Thread(target=send, name="weights-offer", daemon=True).start()
    return answer
