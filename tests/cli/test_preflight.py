"""What `rollout` says to people: help that cuts nothing, flags from files and the environment, early errors."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollout import __version__, logs
from rollout.cli import main as cli
from rollout.config import EngineConfig, ServerConfig
from rollout.server import main
from tests.support import tiny_models


def invoke(*arguments: object, **environment: str) -> Any:
    return CliRunner().invoke(cli.app, list(map(str, arguments)), env={"COLUMNS": "80", **environment})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that would be served."""
    configs: list[Any] = []
    monkeypatch.setattr(main, "serve", lambda *given: configs.extend(given) or 0)
    return configs


def test_help_cuts_no_name_at_80_columns() -> None:
    shown = invoke("serve", "-h").output
    fields = {**EngineConfig.__dataclass_fields__, **ServerConfig.__dataclass_fields__}
    flags = ["--" + name.replace("_", "-") for name in fields if name != "model"]
    assert len(flags) > 40
    assert [flag for flag in flags if not re.search(rf"{flag}\b", shown)] == []
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_version() -> None:
    assert invoke("--version").output == f"rollout {__version__}\n"


def test_a_flag_comes_from_the_command_line_else_the_environment_else_a_file(
    model: Path, served: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"model: {model}\nmax-num-seqs: 3\nmax_model_len: 64\nport: 7\nbatch-invariant: true\napi-key: [a, b]\n"
    )
    flags = ["--port", "9", "--config", file]
    assert invoke("serve", *flags, ROLLOUT_MAX_MODEL_LEN="32", ROLLOUT_PORT="8").exit_code == 0
    assert served == [
        EngineConfig(model=str(model), max_num_seqs=3, max_model_len=32, batch_invariant=True),
        ServerConfig(port=9, api_key=("a", "b")),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-num-sequences: 3", "'max_num_sequences'"),
        ("max-num-seqs: many", "'--max-num-seqs': Input should be a valid integer"),
        ("- 3", "one flag a line"),
        ("a: [", "isn't YAML"),
    ],
)
def test_a_config_file_that_is_wrong_is_refused(
    model: Path, served: list[Any], tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    result = invoke("serve", model, "--config", tmp_path / "serve.yaml")
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert not served


def refused(*arguments: object) -> str:
    """The one line that a command line is refused with, without anything being started."""
    result = invoke("serve", *arguments)
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    return line


def test_a_folder_that_is_not_there(served: list[Any], tmp_path: Path) -> None:
    said = refused(tmp_path / "missing")
    assert (
        said
        == f"rollout: {tmp_path / 'missing'} doesn't exist: MODEL is a transformers folder, a .gguf file or a hub id"
    )
    assert not served


def test_a_folder_without_a_config(served: list[Any], tmp_path: Path) -> None:
    assert "holds no config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json can't be read" in refused(tmp_path)
    assert not served


def test_an_empty_gguf_file(served: list[Any], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert "(0 bytes) is no GGUF file" in refused(tmp_path / "model.gguf")
    assert "doesn't exist" in refused(tmp_path / "other.gguf")


def test_a_context_that_is_too_long_for_the_model(served: list[Any], model: Path) -> None:
    limit = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert refused(model, "--max-model-len", limit + 1).endswith(f"longer than the model's own limit of {limit}")
    assert invoke("serve", model, "--max-model-len", limit).exit_code == 0


def test_a_folder_without_a_tokenizer_is_said_before_it_loads(served: list[Any], model: Path, tmp_path: Path) -> None:
    note = f"rollout: {model} has no tokenizer, so only token ids are served"
    assert note in invoke("serve", model).output
    assert note not in invoke("serve", model, "--tokens-only").output
    for path in model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "tokenizer.json").touch()
    assert "has no tokenizer" not in invoke("serve", tmp_path).output
    assert len(served) == 6


def test_a_hub_that_is_away(served: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "there is no folder 'some/model' here, and the hub gave no such model" in refused("some/model")


def test_a_second_server_on_the_port_of_one_that_loads_is_refused_at_once() -> None:
    """A bound socket that doesn't listen yet lets others bind the same port; they failed after they had loaded."""
    with main.listen("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        main.listen("127.0.0.1", first.getsockname()[1])
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        main.listen("127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device", "cuda"], "torch sees no CUDA device; use --device cpu"),
        (["--num-gpu-blocks-override", "3"], "fewer than max_model_len"),
    ],
)
def test_what_the_engine_refuses_is_one_line(model: Path, flags: list[str], said: str) -> None:
    command = [sys.executable, "-m", "rollout.cli", "serve", str(model), "--port", "0", *flags]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert ran.returncode == 1
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
    assert len([line for line in ran.stderr.splitlines() if said in line]) == 1


def test_the_log_is_json_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.root.handlers, logging.root.level
    try:
        logging.root.handlers = []
        logs.configure(EngineConfig(log_format="json", log_level="warning"))
        logger = logging.getLogger("some.module")
        logger.info("not serious enough")
        try:
            raise ValueError("no")
        except ValueError:
            logger.exception("it %s", "failed")
    finally:
        logging.root.handlers, logging.root.level = before
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["level"], line["logger"], line["message"]) == ("error", "some.module", "it failed")
    assert line["exception"].endswith("ValueError: no")
