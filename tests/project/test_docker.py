"""examples/docker, as far as it can be checked without docker: what is copied, installed and called exists."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout.cli import main as cli

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILES = sorted(FOLDER.glob("Dockerfile.*"))
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())


def instructions(file: Path) -> list[tuple[str, str]]:
    """Each instruction with its arguments, continued lines joined."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def check_serve(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration that these words of a command line would serve."""
    from rollout.server import main

    served: list[Any] = []
    monkeypatch.setattr(main, "serve", lambda *configs: served.extend(configs) or 0)
    monkeypatch.setattr(cli, "check_model", lambda config: None)
    with pytest.raises(SystemExit) as ended:
        cli.app(words)
    assert not ended.value.code
    return served


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.suffix)
def test_what_an_image_copies_installs_and_calls_exists(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = instructions(file)
    names = [name for name, _ in found]
    assert (names[0], names[-2:]) == ("FROM", ["ENTRYPOINT", "CMD"])
    copied = [source for name, rest in found if name == "COPY" for source in rest.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert {"pyproject.toml", PROJECT["readme"], "rollout", "trainer_bridge"} <= set(copied)
    extras = re.findall(r"install [^\n]*\.\[([^]]*)\]", file.read_text())
    assert extras
    assert set(extras[0].split(",")) <= PROJECT["optional-dependencies"].keys()
    call = dict(found[-2:])
    (program,) = json.loads(call["ENTRYPOINT"])
    assert program in PROJECT["scripts"]
    _, server = check_serve(json.loads(call["CMD"]), monkeypatch)
    exposed = dict(found)["EXPOSE"]
    assert (server.host, str(server.port)) == ("0.0.0.0", exposed)
    assert f":{exposed}/health" in dict(found)["HEALTHCHECK"]
    assert f"-f {file.relative_to(ROOT)}" in file.read_text()


def test_the_trainer_and_the_server_of_the_compose_file_are_called_as_they_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = COMPOSE["services"]
    for service in services.values():
        build = service["build"]
        assert (FOLDER / build["context"]).resolve() == ROOT
        assert ROOT / build["dockerfile"] in DOCKERFILES
        assert {mount.split(":")[-2 if mount.endswith(":ro") else -1] for mount in service["volumes"]} & {"/model"}
        named = {mount.split(":")[0] for mount in service["volumes"]} - {"${MODEL"}
        assert named <= COMPOSE["volumes"].keys()
    engine, server = check_serve(services["server"]["command"], monkeypatch)
    assert (engine.logprobs_mode, server.return_sampling_mask) == ("processed_logprobs", True)
    program, script = services["trainer"]["entrypoint"]
    assert program == "python"
    assert (ROOT / script.removeprefix("/src/")).exists()
    text = (ROOT / "examples" / "common.py").read_text()
    model, *flags = services["trainer"]["command"]
    assert model == engine.model
    assert [flag for flag in flags if f'"{flag.split("=")[0]}"' not in text] == []
    assert f"--url=http://server:{server.port}" in flags
    assert services["trainer"]["depends_on"].keys() == {"server"}
    assert shlex.split((FOLDER / "compose.yaml").read_text().split("#   ")[1].split("\n")[0])[3:5] == [
        "-f",
        "examples/docker/compose.yaml",
    ]
