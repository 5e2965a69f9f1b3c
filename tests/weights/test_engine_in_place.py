"""An engine whose weights are being overwritten runs no forward pass, and does not resume into half an update."""

from __future__ import annotations

import msgspec
import pytest
import torch
import zmq
from safetensors.torch import load_file, save_file

from rollout.config import EngineConfig
from rollout.engine.process import EngineProcess
from rollout.messages import Call, FromEngine, Reply
from rollout.weights.errors import WeightUpdateError
from tests.support import tiny_models
from tests.support.engine_utils import engine, ids, logprobs, prompt, request, teacher_forced


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    found = [tiny_models.build("llama", root / str(seed), seed) for seed in range(2)]
    tensors = load_file(found[1] / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    (root / "broken").mkdir()
    save_file(tensors, root / "broken" / "model.safetensors")
    return [*found, root / "broken"]


def call(running, method, **params):
    """A control call, while the engine's loop turns."""
    answer = running.weights.call(method, params)
    while not answer.done():
        assert running.step() == []
    return answer.result()


def test_nothing_is_generated_from_the_start_to_the_commit_of_an_update_in_place(folders):
    running = engine(folders[0])
    item = request("a", prompt(9), max_tokens=12)
    running.add_request(item)
    outputs = [output for _ in range(5) for output in running.step()]
    running.weights.call("init_weight_transfer_engine", {"init_info": {"backend": "disk"}}).result(10)
    with pytest.raises(WeightUpdateError, match="pause"):
        call(running, "start_weight_update", weight_staging="in_place")
    running.paused = True
    call(running, "start_weight_update", weight_staging="in_place")
    forward = running.runner.forward
    running.runner.forward = None  # not even if somebody resumed
    running.paused = False
    call(running, "update_weights", update_info={"path": str(folders[2])})
    with pytest.raises(WeightUpdateError, match="finite"):
        call(running, "finish_weight_update")
    running.paused = True
    assert call(running, "weight_info")["weights"] == "invalid"
    call(running, "start_weight_update", weight_staging="in_place")
    call(running, "update_weights", update_info={"path": str(folders[1])})
    answer = running.weights.call("finish_weight_update", {"weight_version": "healed"})
    while not answer.done():
        running.step()
    running.runner.forward = forward
    running.paused = False
    while running.has_work:
        outputs += running.step()
    assert [o.epoch for o in outputs] == [0] * 5 + [1] * 7
    fresh = request("b", prompt(9), max_tokens=4)
    running.add_request(fresh)
    outputs = []
    while running.has_work:
        outputs += running.step()
    expected = teacher_forced(tiny_models.model("llama", 1), prompt(9), ids(outputs)).log_softmax(-1)
    expected = expected.gather(-1, torch.tensor(ids(outputs))[:, None])[:, 0]
    torch.testing.assert_close(logprobs(outputs), expected, atol=1e-4, rtol=0)
    assert {o.version for o in outputs} == {"healed"}


def test_resume_is_refused_while_the_weights_are_invalid(folders):
    context = zmq.Context()
    try:
        inbox, outbox, far = context.socket(zmq.PULL), context.socket(zmq.PUSH), context.socket(zmq.PULL)
        far.bind("inproc://from-engine")
        outbox.connect("inproc://from-engine")
        config = EngineConfig(
            model=str(folders[0]), dtype="float32", device="cpu", num_gpu_blocks_override=64, max_model_len=64,
            weight_staging="in_place",
        )  # fmt: skip
        process = EngineProcess(config, inbox, outbox)
        numbers = iter(range(100))

        def answer(method, **params):
            process._handle(Call(next(numbers), method, params))
            while True:
                while not process._answers.empty():
                    process._send(process._answers.get())
                if far.poll(0) and isinstance(reply := msgspec.msgpack.decode(far.recv(), type=FromEngine), Reply):
                    return reply

        answer("init_weight_transfer_engine", init_info={"backend": "disk"})
        assert answer("pause", mode="keep").result == {"status": "paused"}
        assert answer("start_weight_update").error is None
        refused = answer("resume")
        assert isinstance(refused, Reply)
        assert refused.error.status == 409
        assert "complete an update, then resume" in refused.error.message
        assert answer("is_paused").result == {"is_paused": True}
        answer("abort_weight_update")
        assert answer("resume").result == {"status": "resumed"}
    finally:
        context.destroy(linger=0)
