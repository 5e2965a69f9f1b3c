"""What the README shows is run as it stands there, but for the model's path and the port."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout.demo.model import FOLDER
from rollout.launch import serve
from tests.support import tiny_models

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
MODEL, ADDRESS = "path/to/model", "http://127.0.0.1:8000"


def _block(language: str, start: str) -> str:
    (block,) = [text for kind, text in BLOCKS if kind == language and text.startswith(start)]
    return str(block)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("readme") / "model")


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    program, command, path, *flags = shlex.split(_block("sh", "rollout serve"))
    assert (program, command, path) == ("rollout", "serve", MODEL)
    assert flags[-2:] == ["--port", "8000"]
    with serve(model, model.parent / "server.log", *flags[:-2], "--num-threads", "1") as address:
        yield address


def test_the_curl_command_gets_what_the_text_says(address: str) -> None:
    words = shlex.split(_block("sh", "curl"))
    assert words[1] == "-s"
    assert words[2].startswith(ADDRESS)
    header, value = words[words.index("-H") + 1].split(": ")
    response = httpx.post(
        words[2].replace(ADDRESS, address), headers={header: value}, content=words[words.index("-d") + 1]
    )
    choices = response.raise_for_status().json()["choices"]
    assert len(choices) == 2
    for choice in choices:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
        (span,) = choice["weight_versions"]
        assert span == {"version": "default", "start": 0, "end": len(choice["token_ids"]), "epoch": 0, "kv": "current"}
        shown = re.search(r"`\[(\{.*?\})", README, re.DOTALL)
        assert shown is not None
        assert json.loads(shown[1]).keys() == span.keys()


def test_the_python_block_runs(address: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = _block("python", "from transformers").replace(ADDRESS, address).replace(MODEL, str(model))
    names: dict[str, Any] = {}
    try:
        exec(compile(code, "README.md", "exec"), names)
        printed = capsys.readouterr().out
        assert len(names["answer"].choices) == 8
        assert "Span(version='default'" in printed
        assert names["pushed"].version == "step-7"
        assert names["pushed"].epoch == 1
    finally:
        for name in names.keys() & {"sender", "client"}:
            names[name].close()


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^make (\w+)", _block("sh", "make"), re.MULTILINE)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}: model", makefile, re.MULTILINE) for target in targets)


def test_what_the_install_block_and_the_first_loop_name_exists() -> None:
    install, own = _block("sh", "python3 -m venv"), _block("sh", '"${EDITOR')
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"\.\[([^]]*)\]", install)
    assert len(extras) == 2
    assert {name for listed in extras for name in listed.split(",")} <= project["optional-dependencies"].keys()
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in README
    (module,) = re.findall(r"python -m ([\w.]+)   #", install)
    assert "fetch_smollm2()" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    copied = (ROOT / shlex.split(own.splitlines()[1])[1]).read_text()
    assert "ROWS = " in copied
    assert "def reward(row" in copied
    assert own.splitlines()[1].endswith(f"~/.cache/rollout/{FOLDER}")
