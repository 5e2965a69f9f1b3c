"""The way of one request through the engine process, counted: what a reader, and the interpreter, must follow."""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq

from rollout.config import EngineConfig
from rollout.engine.process import EngineProcess
from rollout.messages import AddRequest, FromEngine, Outputs
from rollout.outputs import TokenOutput
from rollout.sampling.params import SamplingParams
from tests.support import tiny_models
from tests.support.trace import traced

TOKENS = 4


def test_a_request_of_four_tokens_takes_at_most_80_calls_from_file_to_file(tmp_path: Path) -> None:
    path = tiny_models.build("llama", tmp_path / "model")
    config = EngineConfig(str(path), dtype="float32", device="cpu", num_gpu_blocks_override=64, max_model_len=64)
    with zmq.Context() as context:
        inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        to_engine, from_engine = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for ours, theirs, name in ((inbox, to_engine, "in"), (outbox, from_engine, "out")):
            ours.bind(f"inproc://{name}")
            theirs.connect(f"inproc://{name}")
        process = EngineProcess(config, inbox, outbox)

        def serve() -> list[TokenOutput]:
            params = SamplingParams(max_tokens=TOKENS, seed=1, ignore_eos=True)
            request = AddRequest(request_id="r", prompt_token_ids=[3, 4, 5], sampling_params=params)
            to_engine.send(msgspec.msgpack.encode(request))
            outputs: list[TokenOutput] = []
            while not outputs or outputs[-1].finish_reason is None:
                process.turn()
                while from_engine.poll(0):
                    message = msgspec.msgpack.decode(from_engine.recv(), type=FromEngine)
                    assert isinstance(message, Outputs)
                    outputs += message.outputs
            return outputs

        try:
            warm = serve()
            with traced(without=("model/", "kernels/")) as trace:  # a layer of the model is a matter of its own
                outputs = serve()
        finally:
            context.destroy(linger=0)
    assert [output.token_id for output in outputs] == [output.token_id for output in warm]
    assert len(outputs) == TOKENS
    assert len(trace.calls_between_files) <= 80, trace.calls_between_files
