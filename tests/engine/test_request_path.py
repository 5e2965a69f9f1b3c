"""The way of one request through the engine process, counted: what a reader, and the interpreter, must follow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from rollout.config import EngineConfig
from rollout.engine import process as engine_process
from rollout.engine.process import EngineProcess
from rollout.messages import AddRequest, FromEngine, Outputs
from rollout.outputs import TokenOutput
from rollout.sampling.params import SamplingParams
from tests.support import tiny_models
from tests.support.trace import traced

TOKENS = 4


class Wired:
    """An engine process in this one, and both ends of its sockets."""

    def __init__(self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self.to_engine, self.from_engine = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for ours, theirs, name in ((inbox, self.to_engine, "in"), (outbox, self.from_engine, "out")):
            ours.bind(f"inproc://{name}")
            theirs.connect(f"inproc://{name}")
        self.process = EngineProcess(config, inbox, outbox)

    def add(self, request_id: str = "r") -> None:
        params = SamplingParams(max_tokens=TOKENS, seed=1, ignore_eos=True)
        request = AddRequest(request_id=request_id, prompt_token_ids=[3, 4, 5], sampling_params=params)
        self.to_engine.send(msgspec.msgpack.encode(request))

    def read(self) -> list[TokenOutput]:
        """What the engine has sent."""
        outputs: list[TokenOutput] = []
        while self.from_engine.poll(0):
            message = msgspec.msgpack.decode(self.from_engine.recv(), type=FromEngine)
            assert isinstance(message, Outputs)
            outputs += message.outputs
        return outputs


@pytest.fixture
def wired(tmp_path: Path) -> Iterator[Wired]:
    path = tiny_models.build("llama", tmp_path / "model")
    config = EngineConfig(str(path), dtype="float32", device="cpu", num_gpu_blocks_override=64, max_model_len=64)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield Wired(config, context)
    finally:
        context.destroy(linger=0)


def test_a_request_of_four_tokens_takes_at_most_80_calls_from_file_to_file(wired: Wired) -> None:
    def serve() -> list[TokenOutput]:
        wired.add()
        outputs: list[TokenOutput] = []
        while not outputs or outputs[-1].finish_reason is None:
            wired.process.turn()
            outputs += wired.read()
        return outputs

    warm = serve()
    with traced(without=("model/", "kernels/")) as trace:  # a layer of the model is a matter of its own
        outputs = serve()
    assert [output.token_id for output in outputs] == [output.token_id for output in warm]
    assert len(outputs) == TOKENS
    assert len(trace.calls_between_files) <= 80, trace.calls_between_files


def test_those_that_run_go_on_while_thousands_of_requests_come_in(
    wired: Wired, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "MESSAGES_S", 0.0, raising=False)  # as if each took as long to read as it may
    for number in range(TOKENS):
        wired.add(f"r{number}")
    tokens = []
    while not (ended := [output for output in tokens if output.finish_reason is not None]):
        wired.process.turn()
        tokens += wired.read()
    assert [output.request_id for output in ended] == ["r0"]
    assert len(tokens) == TOKENS * (TOKENS + 1) // 2, "one more of them ran in each step"
