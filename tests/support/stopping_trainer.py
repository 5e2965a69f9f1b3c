"""A trainer for a process of its own that stops at a chosen point of its push."""

from __future__ import annotations

import json
import socket
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from tests.support import tiny_models
from trainer_bridge.push import transaction
from trainer_bridge.push.control import ServerControl, WeightPushError
from trainer_bridge.push.group import TrainerGroup
from trainer_bridge.push.sender import WeightSender

TIMEOUT_S = 2.0
"""What these trainers ask for: the longest that a server waits for one of them."""


@torch.no_grad()
def weights(seed: int) -> PreTrainedModel:
    """A model of 6 MB, more than sockets hold, whose other seeds are unrelated to it."""
    config: Any = tiny_models.config("llama")
    config.intermediate_size = 2560
    torch.manual_seed(seed)
    model: PreTrainedModel = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
    return model


def trainer(url: str, seed: int, point: str, packed: int, parent: Connection) -> None:
    """Push the weights of this seed, stopping at `point` until the parent says go on; then say what came of it.

    `packed`: in how many buffers; 0 sends one broadcast a parameter.
    """
    torch.set_num_threads(1)
    broadcasts = 0
    call, broadcast = ServerControl.call, TrainerGroup.broadcast

    def halt(where: str) -> None:
        if where == point:
            parent.send(where)
            parent.recv()

    def halting_call(self: ServerControl, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        halt(f"before {path}")
        if point == f"sent {path}":
            unread = _send_only(url, method, path, body)
            halt(f"sent {path}")
            unread.close()
        if point == "prepared" and path == "/finish_weight_update":
            call(self, method, path, (body or {}) | {"prepare": True})
            halt("prepared")
        answer = call(self, method, path, body, **options)
        halt(f"after {path}")
        return answer

    def halting_broadcast(self: TrainerGroup, *arguments: Any) -> None:
        nonlocal broadcasts
        halt(f"broadcast {broadcasts}")
        broadcasts += 1
        broadcast(self, *arguments)

    ServerControl.call = halting_call  # type: ignore[method-assign]
    TrainerGroup.broadcast = halting_broadcast  # type: ignore[method-assign, assignment]
    transaction.PACKED_BUFFER_BYTES = (6 << 20) // max(1, packed)
    try:
        with WeightSender.connect(url, weights(seed), packed=bool(packed), timeout_s=TIMEOUT_S) as sender:
            parent.send(sender.push("doomed").epoch)
    except WeightPushError as error:
        parent.send(error)


def _send_only(url: str, method: str, path: str, body: Any) -> socket.socket:
    """A request whose answer nobody will read."""
    address = urlsplit(url)
    data = json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection
