"""The calls that trainers make, in their order and with their exact bodies, to one running server.

Each trainer is written out here from what it sends: TRL 1.16 (`experimental/async_grpo/weight_transfer.py` and
`vllm_client.py`), prime-rl (`utils/client.py`), vLLM (its example `rlhf_http_nccl.py`, and the later form of it with a
start and a finish). What NCCL carries there goes over gloo here, hence `backend` in init_info.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rollout.launch import serve
from tests.support import tiny_models
from tests.support.engine_utils import TOLERANCE, prompt, teacher_forced
from tests.support.push_reference import as_stamped
from tests.support.weight_updates import sha256, update_info
from trainer_bridge.client import Choice, RolloutClient, RolloutError

FLAGS = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1"]
TIMEOUT = timedelta(seconds=20)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutClient]:
    folder = tmp_path_factory.mktemp("server")
    path = tiny_models.build("llama", folder / "model")
    with serve(path, folder / "log", *FLAGS) as url, RolloutClient(url, timeout_s=60) as client:
        yield client


class Trainer:
    """Rank 0 over gloo, and `POST` with a body or without one, as `requests.post(url, json=…)` does it."""

    def __init__(self, client: RolloutClient) -> None:
        self.http = httpx.Client(base_url=client.base_url, timeout=60)

    def post(self, path: str, json: Any = None, **params: str) -> Any:
        answer = (
            self.http.post(path, json=json, params=params) if json is not None else self.http.post(path, params=params)
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def init(self, **init_info: Any) -> None:
        """Both sides rendezvous: the call on a thread, the trainer's own join beside it."""
        world_size = self.http.get("/get_world_size").json()["world_size"] + 1
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, TIMEOUT, wait_for_workers=False)
        info = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": world_size}
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(
                self.post, "/init_weight_transfer_engine", {"init_info": info | init_info | {"backend": "gloo"}}
            )
            self.group = dist.ProcessGroupGloo(dist.PrefixStore("rollout", store), 0, world_size, TIMEOUT)
            call.result(30)

    def broadcast(self, tensors: dict[str, torch.Tensor], *, packed: bool) -> None:
        """One broadcast a tensor, or all of them as bytes in one buffer (they are far below its 1 GiB)."""
        sent = [tensor.detach().contiguous() for tensor in tensors.values()]
        if packed:
            sent = [torch.cat([tensor.view(-1).view(torch.uint8) for tensor in sent])]
        for tensor in sent:
            self.group.broadcast(tensor, 0).wait()

    def update_beside_broadcast(self, info: dict[str, Any], tensors: dict[str, torch.Tensor], *, packed: bool) -> None:
        """/update_weights blocks until the last broadcast, so it goes on a thread."""
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(self.post, "/update_weights", {"update_info": info})
            self.broadcast(tensors, packed=packed)
            assert call.result(30).keys() == {"message"}


def parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def check_serves(client: RolloutClient, model: PreTrainedModel, epoch: int) -> None:
    (choice,) = client.generate(prompt(20), {"temperature": 0, "max_tokens": 5, "logprobs": 0}).choices
    table = teacher_forced(model, prompt(20), choice.token_ids).log_softmax(-1)
    assert choice.token_ids == table.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(choice.logprobs), table.amax(-1), atol=TOLERANCE, rtol=0)
    assert [span.epoch for span in choice.spans] == [epoch]


class Stream:
    """A request that is under way while a trainer makes its calls."""

    def __init__(self, client: RolloutClient) -> None:
        self._events = client.stream(prompt(12), {"max_tokens": 900, "logprobs": 0, "ignore_eos": True})
        self._pieces = [next(self._events)]
        self._client = client

    def end(self, more: int = 10) -> Choice:
        """`more` events, then an abort: the whole of it."""
        length = len(self._pieces) + more
        while len(self._pieces) < length:
            self._pieces.append(next(self._events))
        self._client.abort([self._pieces[0].request_id])
        self._pieces += self._events
        choices = [choice for piece in self._pieces for choice in piece.choices]
        ids = [i for choice in choices for i in choice.token_ids]
        logprobs = [value for choice in choices for value in choice.logprobs or ()]
        return Choice(0, ids, logprobs, None, choices[-1].spans, choices[-1].finish_reason, None)


def test_trl(client: RolloutClient) -> None:
    """AsyncGRPO: pause keep; start; update on the main thread, broadcasts on another; finish; resume. Twice."""
    base = client.weight_info()["epoch"]
    served = tiny_models.model("llama", 0)
    models = {base: served}
    trainer = Trainer(client)
    first = tiny_models.model("llama", 1)
    info = update_info(parameters(first))
    assert trainer.http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]["model_config"] == {
        "dtype": "torch.float32",
        "logprobs_mode": "raw_logprobs",
    }
    trainer.init(packed=True)
    stream = Stream(client)
    for step, model in enumerate([first, tiny_models.model("llama", 2)], start=1):
        trainer.post("/pause", mode="keep")
        assert trainer.post("/start_weight_update", {"is_checkpoint_format": True}).keys() >= {"message"}
        sending = threading.Thread(target=trainer.broadcast, args=[parameters(model)], kwargs={"packed": True})
        sending.start()
        trainer.post("/update_weights", {"update_info": info})
        sending.join(20)
        trainer.post("/finish_weight_update")
        trainer.post("/resume")
        models[base + step] = model
        check_serves(client, model, base + step)
    choice = stream.end()
    assert [span.epoch for span in choice.spans] == [base, base + 1, base + 2]
    expected = as_stamped(models, prompt(12), choice.token_ids, choice.spans)
    torch.testing.assert_close(torch.tensor(choice.logprobs), expected, atol=TOLERANCE, rtol=0)


def test_trl_finishes_also_after_a_failed_update(client: RolloutClient) -> None:
    """It sends finish "best effort" then: that must not commit anything; it raises, and a new run starts over."""
    before = client.weight_info()
    sums = client.post("/weight_checker", {"action": "checksum"})["checksums"]
    trainer = Trainer(client)
    trainer.init(packed=True)
    model = tiny_models.model("llama", 3)
    trainer.post("/pause", mode="keep")
    trainer.post("/start_weight_update", {"is_checkpoint_format": True})
    info = update_info(parameters(model))
    info["shapes"][3] = [1, *info["shapes"][3]]
    assert trainer.http.post("/update_weights", json={"update_info": info}).status_code == 400
    finish = trainer.http.post("/finish_weight_update")
    assert finish.status_code == 409
    assert trainer.http.get("/weight_info").json()["epoch"] == before["epoch"]
    assert client.post("/weight_checker", {"action": "compare", "baseline": sums})["match"]

    restarted = Trainer(client)
    restarted.init(packed=True)
    restarted.post("/pause", mode="keep")
    restarted.post("/start_weight_update", {"is_checkpoint_format": True})
    restarted.update_beside_broadcast(update_info(parameters(model)), parameters(model), packed=True)
    restarted.post("/finish_weight_update")
    restarted.post("/resume")
    check_serves(client, model, before["epoch"] + 1)


@pytest.mark.parametrize("extra", [{}, {"skip_prefix_cache_reset": True}])
def test_prime_rl_filesystem(client: RolloutClient, tmp_path: Path, extra: dict[str, Any]) -> None:
    """pause keep without clearing the cache; one /update_weights with `weight_dir`; resume."""
    epoch = client.weight_info()["epoch"]
    stream = Stream(client)
    trainer = Trainer(client)
    seed = 5 + len(extra)
    folder = tiny_models.build("llama", tmp_path / "step_7", seed)
    trainer.post("/pause", mode="keep", clear_cache="false")
    assert trainer.post("/update_weights", {"weight_dir": folder.as_posix(), **extra})["status"] == "ok"
    trainer.post("/resume")
    check_serves(client, tiny_models.model("llama", seed), epoch + 1)
    assert [span.epoch for span in stream.end().spans] == [epoch, epoch + 1]


def test_prime_rl_nccl_is_refused_with_its_reason(client: RolloutClient) -> None:
    with pytest.raises(RolloutError) as refused:
        client.post("/init_broadcaster", {"host": "127.0.0.1", "port": 29501, "rank_offset": 0, "timeout": 1200})
    assert 400 <= refused.value.status < 500
    assert "pickle" in refused.value.message


@pytest.mark.parametrize("packed", [True, False])
def test_vllm_http_example(client: RolloutClient, packed: bool) -> None:
    """pause (abort); start; update on a thread with `packed` in update_info; broadcasts; finish and resume bodiless."""
    epoch = client.weight_info()["epoch"]
    stream = Stream(client)
    trainer = Trainer(client)
    trainer.init()
    model = tiny_models.model("llama", 7 + packed)
    trainer.post("/pause")
    trainer.post("/start_weight_update", {"is_checkpoint_format": True})
    info = update_info(parameters(model)) | {"packed": packed}
    trainer.update_beside_broadcast(info, parameters(model), packed=packed)
    trainer.post("/finish_weight_update")
    trainer.post("/resume")
    check_serves(client, model, epoch + 1)
    choice = stream.end(more=0)
    assert choice.finish_reason == "abort"
    assert [span.epoch for span in choice.spans] == [epoch]  # the pause ended it


def test_a_client_with_empty_bodies_everywhere(client: RolloutClient) -> None:
    """start, finish and resume with `{}`; the pause with `clear_cache`."""
    epoch = client.weight_info()["epoch"]
    trainer = Trainer(client)
    trainer.init()
    model = tiny_models.model("llama", 9)
    trainer.post("/pause", mode="keep", clear_cache="true")
    trainer.post("/start_weight_update", {})
    info = update_info(parameters(model)) | {"packed": True, "packed_buffer_size_bytes": 1 << 30}
    trainer.update_beside_broadcast(info, parameters(model), packed=True)
    trainer.post("/finish_weight_update", {})
    trainer.post("/resume", {})
    assert trainer.http.get("/is_paused").json() == {"is_paused": False}
    check_serves(client, model, epoch + 1)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_moe_under_module_and_checkpoint_names(name: str, tmp_path: Path) -> None:
    """The same checksums, those of what save_pretrained writes, by either kind of name."""
    from safetensors.torch import load_file

    path = tiny_models.build(name, tmp_path / "served")
    model = tiny_models.model(name, 1)
    model.save_pretrained(tmp_path / "pushed")
    by_checkpoint = load_file(tmp_path / "pushed" / "model.safetensors")
    by_module = parameters(model)
    assert any(".experts.0." in n for n in by_checkpoint)
    assert not any(".experts.0." in n for n in by_module)
    expected = {n: sha256(t) for n, t in by_checkpoint.items()}
    other = parameters(tiny_models.model(name, 2))
    with serve(path, tmp_path / "log", *FLAGS) as url, RolloutClient(url, timeout_s=60) as client:
        trainer = Trainer(client)
        trainer.init(packed=True)
        for tensors, matches in [(by_module, True), (other, False), (by_checkpoint, True)]:
            trainer.post("/start_weight_update", {"is_checkpoint_format": tensors is by_checkpoint})
            trainer.update_beside_broadcast(update_info(tensors), tensors, packed=True)
            trainer.post("/finish_weight_update")
            compared = trainer.post("/weight_checker", {"action": "compare", "baseline": expected})
            assert compared["match"] == matches
        assert trainer.post("/weight_checker", {"action": "checksum"})["checksums"] == expected
        check_serves(client, model, 3)
