"""What `rollout bench` says of an engine in its own process, of servers that it starts, and of the machine."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rollout.bench import bare, host
from rollout.bench.http_cost import bare_engine
from rollout.bench.loads import Load
from rollout.bench.profile import StepTimer, measure
from rollout.bench.roofline import Machine, steps
from rollout.bench.start import measure as measure_starts
from rollout.cli.bench import bench
from rollout.engine.engine import Engine
from rollout.launch import launch, split_command
from tests.support import foreign_server, tiny_models

LOAD = Load("tiny", "", 3, 2, 5, 20, 6)
TINY_HOST = Load("tiny", "", 2, 2, 5, 5, 40)
FLAGS = ["--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--seed", "7"]
FOREIGN = f"{shlex.quote(sys.executable)} {shlex.quote(foreign_server.__file__)} {{port}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("bench") / "model")


def figures_of(file: Path, command: str, *arguments: str) -> dict[str, Any]:
    ran = CliRunner().invoke(bench, [command, "--json", str(file), *arguments])
    assert ran.exit_code == 0, ran.output
    return json.loads(file.read_text())


# -- the engine, and the time of its steps


def test_a_load_on_a_bare_engine_samples_every_token(folder: Path) -> None:
    engine = Engine(bare.engine_config(folder, FLAGS))
    assert engine.config.dtype == "float32"
    assert bare.run(engine, LOAD, LOAD.prompts(0, 0, 256)) == 3 * 2 * 6
    assert engine.stats["finished_length"] == 6
    assert not engine.has_work


def test_timers_change_no_token_and_their_phases_are_the_parts_of_a_step(folder: Path) -> None:
    prompts = LOAD.prompts(0, 0, 256)

    def tokens(timed: bool) -> tuple[list[int], StepTimer | None]:
        engine = Engine(bare.engine_config(folder, FLAGS))
        outputs: list[int] = []
        step = engine.step
        engine.step = lambda: outputs.extend(o.token_id for o in step())  # type: ignore[method-assign]
        timer = StepTimer(engine) if timed else None
        bare.run(engine, LOAD, prompts, timer.step if timer else None)
        return outputs, timer

    plain, _ = tokens(timed=False)
    seen, timer = tokens(timed=True)
    assert seen == plain
    assert len(seen) == 36
    assert timer is not None
    profile, layers = timer.profile, tiny_models.config("llama").num_hidden_layers
    computed = {kind: (found.steps, found.tokens) for kind, found in profile.items()}
    assert computed == {"prefill": (1, sum(map(len, prompts))), "decode": (5, 5 * 6)}
    for found in profile.values():
        phases, count = found.phases, found.steps
        assert phases["attention"].calls == layers * count
        assert phases["linear"].calls == 7 * layers * count
        assert phases["norm"].calls == (2 * layers + 1) * count
        for once in ("schedule", "forward: rest", "attention: plan", "head", "sample", "step: rest"):
            assert phases[once].calls == count
        assert found.seconds == pytest.approx(sum(phase.seconds for phase in phases.values()))


def test_the_profile_names_torch_operators(folder: Path) -> None:
    profile, top = measure(bare.engine_config(folder, FLAGS), LOAD, 0, operators=400)
    assert {kind: found.steps for kind, found in profile.items()} == {"prefill": 1, "decode": 5}
    calls = {operator.name: operator.calls for operator in top}
    assert calls["aten::embedding"] == 6
    assert [operator.milliseconds for operator in top] == sorted((o.milliseconds for o in top), reverse=True)


def test_the_profile_command(folder: Path, tmp_path: Path) -> None:
    options = ["profile", str(folder), "--load", "single", "--operators", "0"]
    found = figures_of(tmp_path / "f.json", *options, "--", *FLAGS)
    assert found["load"]["name"] == "single"
    assert {kind: found["kinds"][kind]["steps"] for kind in found["kinds"]} == {"prefill": 1, "decode": 127}
    assert not found["operators"]
    ran = CliRunner().invoke(bench, [*options, "--", "--port", "1"])
    assert ran.exit_code == 2  # a server has it, an engine hasn't


def test_the_host_is_measured_in_steps_that_decode_every_sequence() -> None:
    engine = host.hollow_engine(TINY_HOST)
    assert len(host.step_seconds(engine, TINY_HOST, 3)) == 3
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.replays >= 3
    assert len(engine.scheduler.running) == 4
    assert all(sequence.output_len >= TINY_HOST.max_tokens + 3 for sequence in engine.scheduler.running)


def test_trees_are_measured_in_turn_and_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    tree = Path(host.__file__).parents[2]
    (found,) = host.measure([tree], 1, loads=[TINY_HOST])
    assert len(found["tiny"]) == host.STEPS
    assert all(seconds > 0 for seconds in found["tiny"])
    with pytest.raises(ValueError, match="holds no folder `rollout`"):
        host.measure([tmp_path], 1)


# -- servers that it starts


def test_the_start_of_any_server(folder: Path, tmp_path: Path) -> None:
    found = figures_of(tmp_path / "f.json", "start", str(folder), "--command", FOREIGN, "--rounds", "2")
    assert found["command"][-1] == "{port}"
    assert len(found["starts"]) == 2
    assert all(0 < start["healthy"] < start["first_token"] for start in found["starts"])


def test_every_start_is_counted_but_the_first() -> None:
    runs: list[None] = []
    assert len(measure_starts(split_command(FOREIGN), 1, lambda: runs.append(None))) == 1
    assert len(runs) == 2


def test_a_launched_server_ends_with_the_block() -> None:
    with launch(split_command(FOREIGN), timeout_s=60) as server:
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        process = psutil.Process(server.pid)
    assert not process.is_running()


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(RuntimeError, match=r"(?s)has ended.*no such file as this"),
        launch([sys.executable, "-c", "raise SystemExit('no such file as this')"], timeout_s=60),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match="not healthy after"),
        launch([sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=0.3),
    ):
        pass


def test_a_command_without_a_port_is_refused(folder: Path) -> None:
    ran = CliRunner().invoke(bench, ["start", str(folder), "--command", "some serve"])
    assert ran.exit_code == 1
    assert "{port}" in ran.output


def test_the_cost_of_http_is_that_of_the_server_process(folder: Path, tmp_path: Path) -> None:
    options = ["--command", FOREIGN, "--rounds", "2", "--vocab-size", "50"]
    found = figures_of(tmp_path / "f.json", "http", str(folder), *options)
    assert [cost["load"] for cost in found["costs"]] == ["json", "sse"]
    for cost in found["costs"]:
        assert 0 <= cost["server"]["min"] <= cost["server"]["median"] <= cost["server"]["max"]
        assert cost["server"]["max"] > 0  # a clock of hundredths of a second sees nothing of a short round
        assert cost["engine"]["max"] == 0  # this server has no other process
        assert cost["tokens_per_second"]["median"] > 0
    assert found["bare_engine"] is None


def test_the_bare_engine_beside_it(folder: Path) -> None:
    spread = bare_engine(folder, FLAGS, 1, 0)
    assert spread.min == spread.median == spread.max > 0


# -- the machine


def test_the_roof_of_a_model(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    head = model.lm_head.weight.numel()
    body = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)) - head
    slow_memory, slow_products = Machine(1, 1e3, 1e30), Machine(1, 1e30, 1e3)
    (read,) = steps(slow_memory, folder, torch.bfloat16, [(5, 2)])
    (multiply,) = steps(slow_products, folder, torch.bfloat16, [(5, 2)])
    assert read.roof == pytest.approx((body + head) * 2 / 1e3)
    assert multiply.roof == pytest.approx(2 * (5 * body + 2 * head) / 1e3)
    assert multiply.tokens_per_second == pytest.approx(5 / multiply.roof)


def test_the_roofline_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.bench.roofline.machine", lambda dtype: Machine(2, 3e9, 4e9))
    found = figures_of(tmp_path / "f.json", "roofline", str(folder), "--dtype", "float32")
    assert found["roofline"] == {"threads": 2, "read_bytes_per_second": 3e9, "flops": 4e9}
    assert [step["rows"] for step in found["steps"]] == [1, 64, 2048]
