"""A long step is work, not death: what a control call does while the engine reports that it gets on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollout.config import EngineConfig
from rollout.fleet import client as client_module
from rollout.fleet.client import EngineClient
from rollout.fleet.errors import EngineError
from rollout.messages import Call, FromEngine, Progress, Reply, ToEngine
from tests.support import tiny_models
from tests.support.engine_utils import engine, prompt, request, run


class Connection:
    """An engine that is what the test sends through `receive`."""

    pid = None
    address = "127.0.0.1"
    ended = False

    def __init__(self, rank: int, config: EngineConfig, receive: Callable[[FromEngine], None], *_: object) -> None:
        self.receive = receive
        self.sent: list[ToEngine] = []
        self.last_message_at = asyncio.get_running_loop().time()

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    def end(self) -> None:
        self.ended = True

    async def close(self, timeout_s: float) -> None:
        self.end()


@pytest.mark.parametrize("began_before_the_call", [True, False])
def test_a_call_waits_for_a_step_that_gets_on(began_before_the_call: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PROGRESS_TIMEOUT_S", 5.0)

    async def call() -> dict[str, object]:
        made: list[Connection] = []

        def connect(*arguments: object) -> Connection:
            made.append(Connection(*arguments))  # type: ignore[arg-type]
            return made[0]

        client = EngineClient(EngineConfig(), start_engine=connect)  # type: ignore[arg-type]
        client.start()
        connection = made[0]
        answer = asyncio.ensure_future(client.call("is_paused", timeout_s=0.05))
        await asyncio.sleep(0)
        connection.receive(Progress(3, 60.0 if began_before_the_call else -60.0))
        await asyncio.sleep(0.2)  # four times what the call allows
        (sent,) = connection.sent
        assert isinstance(sent, Call)
        connection.receive(Reply(sent.call_id, {"is_paused": False}))
        try:
            return await answer
        finally:
            await client.stop()

    if began_before_the_call:
        assert asyncio.run(call()) == {"is_paused": False}
    else:
        with pytest.raises(EngineError, match=r"did not answer 'is_paused' within 0\.05 s"):
            asyncio.run(call())


def test_a_step_under_way_shows_that_it_gets_on(tmp_path: Path) -> None:
    served = engine(tiny_models.build("llama", tmp_path / "model"))
    seen: list[tuple[int, int, bool]] = []
    head = served.runner.model.get_output_embeddings()

    def look(*_: torch.nn.Module) -> None:
        seen.append((served.steps, served.layers, served.step_since is not None))

    head.register_forward_pre_hook(look)
    run(served, [request("r", prompt(9), max_tokens=3)])
    layers = served.runner.model.config.num_hidden_layers
    assert seen == [(step, step * layers, True) for step in (1, 2, 3)]
    assert served.step_since is None
