"""docs/weight-updates.md: its trainer is run as it stands there, and its tables name the fields that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from rollout.launch import serve
from rollout.model.parameters import ModelParameters
from rollout.weights.bodies import Announcement, CheckerBody, FinishBody, InitInfo, StartBody, UpdateBody, VersionBody
from rollout.weights.store import WeightStore
from rollout.weights.updater import WeightUpdater
from tests.support import tiny_models
from tests.support.engine_utils import TOLERANCE, prompt, teacher_forced
from tests.support.weight_updates import llama, sha256
from trainer_bridge.client import RolloutClient, Span

TEXT = (Path(__file__).parents[2] / "docs" / "weight-updates.md").read_text()
FLAGS = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutClient]:
    folder = tmp_path_factory.mktemp("server")
    path = tiny_models.build("llama", folder / "model")
    with serve(path, folder / "log", *FLAGS) as url, RolloutClient(url, timeout_s=60) as client:
        yield client


def test_the_trainer_pushes(client: RolloutClient, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(code))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")])
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported == {"concurrent", "contextlib", "datetime", "httpx", "torch"}
    before = client.post("/weight_checker", {"action": "checksum"})["checksums"]
    model = tiny_models.model("llama", 1)
    space = {"url": client.base_url, "model": model}
    exec(compile(code, "docs/weight-updates.md", "exec"), space)
    assert capsys.readouterr().out == "epoch 1\n"

    sums = client.post("/weight_checker", {"action": "checksum"})["checksums"]
    assert sums == {name: sha256(p.detach()) for name, p in model.named_parameters()}
    assert all(sums[name] != before[name] for name in sums)
    (choice,) = client.generate(prompt(20), {"temperature": 0, "max_tokens": 6, "logprobs": 0}).choices
    table = teacher_forced(model, prompt(20), choice.token_ids).log_softmax(-1)
    assert choice.token_ids == table.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(choice.logprobs), table.amax(-1), atol=TOLERANCE, rtol=0)
    assert choice.spans == [Span("step-1", 0, 6, 1, "current")]

    pusher = space["Pusher"](client.base_url, timeout_s=10.0)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight: shape \[3\]"):
        pusher.push(model, "misshapen")
    assert client.weight_info()["weight_version"] == "step-1"
    assert client.post("/weight_checker", {"action": "compare", "baseline": sums})["match"]


def test_every_call_and_field_is_documented() -> None:
    words = set(re.findall(r"`/?(\w+)`", TEXT)) | set(re.findall(r'"(\w+)":', TEXT))
    for kind in (InitInfo, StartBody, Announcement, FinishBody, UpdateBody, VersionBody, CheckerBody):
        assert {field.name for field in msgspec.structs.fields(kind)} <= words, kind
    updater = WeightUpdater(WeightStore(ModelParameters(llama(0))))
    assert updater.methods <= words
    assert updater.call("weight_info", {}).result().keys() <= words


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("init_info", InitInfo),
        ("start_weight_update", StartBody),
        ("update_info", Announcement),
        ("finish_weight_update", FinishBody),
    ],
)
def test_the_tables_hold_the_fields_and_no_others(heading: str, kind: type[msgspec.Struct]) -> None:
    table = re.search(rf"^`{heading}`:\n\n(.*?)\n\n", TEXT, re.DOTALL | re.MULTILINE)
    assert table is not None
    rows = [row.split("|")[1] for row in table[1].splitlines()[2:]]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {field.name for field in msgspec.structs.fields(kind)}
