"""In-place, sparse, verified, merged and by-path pushes into a running server, by what it then samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from rollout.launch import serve
from tests.support import tiny_models
from tests.support.engine_utils import TOLERANCE, prompt, teacher_forced
from trainer_bridge.client import RolloutClient, RolloutError, Span
from trainer_bridge.push.lora import LoraSource
from trainer_bridge.push.sender import WeightPushError, WeightSender

FLAGS = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutClient]:
    folder = tmp_path_factory.mktemp("server")
    path = tiny_models.build("llama", folder / "model")
    with serve(path, folder / "log", *FLAGS) as url, RolloutClient(url, timeout_s=60) as client:
        yield client


def check_serves(client: RolloutClient, model: PreTrainedModel, version: str) -> None:
    """Greedy tokens and their logprobs are the model's, and labelled so."""
    (choice,) = client.generate(prompt(20), {"temperature": 0, "max_tokens": 6, "logprobs": 0}).choices
    table = teacher_forced(model, prompt(20), choice.token_ids).log_softmax(-1)
    assert choice.token_ids == table.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(choice.logprobs), table.amax(-1), atol=TOLERANCE, rtol=0)
    assert choice.spans == [Span(version, 0, 6, client.weight_info()["epoch"], "current")]


def test_sparse_and_verified(client: RolloutClient) -> None:
    model = tiny_models.model("llama", 1)
    with WeightSender.connect(client, model, timeout_s=20) as sender:
        sender.push("whole", sparse=True, verify=True)
        check_serves(client, model, "whole")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[::50] *= -3
        assert sender.push("sparse", sparse=True, verify=True).bytes_saved > 0
        check_serves(client, model, "sparse")


def test_in_place_only_when_paused_and_no_resume_into_invalid_weights(client: RolloutClient) -> None:
    model = tiny_models.model("llama", 2)
    with WeightSender.connect(client, model, timeout_s=20) as sender:
        with pytest.raises(WeightPushError, match=r"409.*/pause\?mode=keep"):
            sender.push("never", weight_staging="in_place")
        client.pause("keep")
        value = model.model.norm.weight.data[0].item()
        model.model.norm.weight.data[0] = float("nan")
        with pytest.raises(WeightPushError, match=r"model\.norm\.weight"):
            sender.push("never", weight_staging="in_place")
        assert client.weight_info()["weights"] == "invalid"
        with pytest.raises(RolloutError, match="then resume") as caught:
            client.resume()
        assert caught.value.status == 409
        assert client.is_paused()
        model.model.norm.weight.data[0] = value
        sender.push("healed", weight_staging="in_place")
    assert client.weight_info()["weights"] == "valid"
    client.resume()
    check_serves(client, model, "healed")


def test_a_folder_of_a_push_and_a_checkpoint_by_its_path(client: RolloutClient, tmp_path_factory) -> None:
    root = tmp_path_factory.mktemp("disk")
    model = tiny_models.model("llama", 3)
    with WeightSender.connect(client, model, backend="disk", disk_path=root, timeout_s=20) as sender:
        sender.push("disk", verify=True)
        check_serves(client, model, "disk")
        sender.push_folder(tiny_models.build("llama", root / "checkpoint", 4), "checkpoint")
    check_serves(client, tiny_models.model("llama", 4), "checkpoint")


def test_adapters_are_merged_on_the_way(client: RolloutClient) -> None:
    model = tiny_models.model("llama", 5)
    layer = model.model.layers[1].mlp.up_proj
    a, b = torch.randn(2, layer.in_features), torch.randn(layer.out_features, 2)
    with WeightSender.connect(client, LoraSource(model, {"model.layers.1.mlp.up_proj": (a, b, 0.5)})) as sender:
        sender.push("merged")
    layer.weight.data += 0.5 * (b @ a)
    check_serves(client, model, "merged")
