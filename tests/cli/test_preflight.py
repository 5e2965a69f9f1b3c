"""What `rollout` says to people: help that cuts nothing, flags from files and the environment, early errors."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from rollout import __version__, logs
from rollout.cli import main as cli
from rollout.cli.accepted import IGNORED, REFUSED, accepted
from rollout.cli.demo import demo
from rollout.config import EngineConfig, ServerConfig, named_adapter
from rollout.flags import whole_number
from rollout.model import model_config
from rollout.server import main
from tests.support import schemas, tiny_models


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


@pytest.mark.parametrize("command", [[], ["bench"], ["demo"], ["verify"], ["replay"], ["bench", "load"]])
def test_help_cuts_no_sentence_at_80_columns(command: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "rollout.cli", *command, "-h"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    usage, *lines = ran.stdout.splitlines()
    assert usage.startswith("Usage: ")
    assert [line for line in lines if "…" in line or line.endswith("...")] == []
    assert max(map(len, lines)) <= 80


def test_a_shell_completes_flags() -> None:
    asked = {"_ROLLOUT_COMPLETE": "complete_bash", "COMP_WORDS": "rollout serve --max-model", "COMP_CWORD": "2"}
    code = "import sys; sys.argv[0] = 'rollout'; from rollout.cli.main import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **asked}
    )
    assert ran.stdout.split() == ["--max-model-len"]


def test_windows_is_told_of_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match="WSL 2"):
        cli.main()


def test_the_demo_names_what_it_lacks_before_it_fetches_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    lacking = ("gguf", "matplotlib")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in lacking else find(name))
    for arguments, named in (((), ["gguf", "matplotlib"]), (("--model", "there"), ["matplotlib"])):
        refused = CliRunner().invoke(demo_app(), arguments)
        assert refused.exit_code == 1
        (line,) = refused.output.splitlines()
        assert re.findall(r"(gguf|matplotlib) \(", line) == named
        assert "pip install '.[gguf,wandb]'" in line


def demo_app() -> typer.Typer:
    app = typer.Typer()
    app.command()(demo)
    return app


def test_a_cpu_without_mkldnn_is_asked_nothing_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch on macOS is built."""
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(model_config, "multiplies", lambda dtype: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    assert model_config.cpu_multiplies_bf16() is False


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
        ("max-num-seqs: many", "'--max-num-seqs': Value error, 'many' is no whole number"),
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
            logger.exception("it %s", "failed", extra={"fields": {"engine": 3}})
    finally:
        logging.root.handlers, logging.root.level = before
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["level"], line["logger"], line["message"]) == ("error", "some.module", "it failed")
    assert line["engine"] == 3
    assert line["exception"].endswith("ValueError: no")


@pytest.mark.parametrize(
    ("given", "number"),
    [("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("2M", 2 << 20), ("25.6k", 25600), ("1g", 10**9), ("7", 7)],
)
def test_whole_numbers_are_read_as_vllm_reads_them(given: str, number: int) -> None:
    assert whole_number(given) == number


@pytest.mark.parametrize("given", ["1.5K", "k", "4kk", "1e3", "4.5", ""])
def test_what_is_no_whole_number_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="is no whole number"):
        whole_number(given)


def test_flags_with_suffixes_reach_the_configuration(served: list[Any], model: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-batched-tokens: 4K\nblock-size: 32\nswap-space: 4\n")
    line = ["serve", model, "--max-queued-requests=1k", "--config", file]
    assert invoke(*line, ROLLOUT_KV_CACHE_MEMORY_BYTES="1g").exit_code == 0
    engine, server = served
    assert (engine.max_num_batched_tokens, engine.block_size) == (4096, 32)
    assert (engine.kv_cache_memory_bytes, server.max_queued_requests) == (10**9, 1000)
    assert "'4.5' is no whole number" in invoke("serve", model, "--block-size", "4.5").output


def test_a_command_line_of_vllms(served: list[Any], model: Path) -> None:
    line = ["--model", model, "--max_model_len", 64, "-tp", 1, "--disable-log-requests", "--disable-log-stats"]
    line += ["--swap-space", 4, "--generation-config=vllm", "-O3", "--compilation-config.mode", 3, "--port", 9]
    answer = invoke("serve", *line)
    assert answer.exit_code == 0, answer.output
    engine, server = served
    assert (engine.model, engine.max_model_len, server.port) == (str(model), 64, 9)
    told = [told for told in answer.output.splitlines() if "is ignored" in told]
    flags = ["--disable-log-requests", "--disable-log-stats", "--swap-space", "--generation-config"]
    assert [told.split()[2] for told in told] == [*flags, "--optimization-level", "--compilation-config"]


def test_what_launch_scripts_pass_is_served_ignored_or_refused_by_name(served: list[Any], tmp_path: Path) -> None:
    model = schemas.build(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}")
    line = ["--tokenizer", model, "--chat-template", template, "--enable-auto-tool-choice", "--enable-sleep-mode"]
    line += ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--max-model-len", "4k"]
    line += ["--weight-transfer-config", '{"backend": "nccl"}', "--disable-log-requests", "--revision", "main"]
    answer = invoke("serve", model, *line)
    assert answer.exit_code == 0, answer.output
    engine, server = served
    assert (engine.max_model_len, engine.enable_sleep_mode) == (4000, True)
    assert (server.tokenizer, server.chat_template) == (str(model), str(template))
    assert (server.enable_auto_tool_choice, server.tool_call_parser) == (True, "hermes")
    assert server.reasoning_parser == "qwen3"
    told = [told.split()[2] for told in answer.output.splitlines() if "is ignored" in told]
    assert told == ["--weight-transfer-config", "--disable-log-requests", "--revision"]
    for flag in (["--trust-remote-code"], ["--revision", "abc"], ["--tool-call-parser", "mine"]):
        answer = invoke("serve", model, *flag)
        assert answer.exit_code == 2
        assert flag[0] in answer.output


def test_flags_of_vllms_are_ours_ignored_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {**EngineConfig.__dataclass_fields__, **ServerConfig.__dataclass_fields__}
    own = {"--" + name.replace("_", "-") for name in fields}
    names = json.loads((Path(__file__).parents[1] / "data" / "vllm_names.json").read_text())
    theirs = {"--" + name.replace("_", "-") for name in names["flags"]} | {"--api-server-count", "--headless"}
    of_others = {  # vLLM's of earlier versions
        "--disable-frontend-multiprocessing", "--disable-log-requests", "--guided-decoding-backend",
        "--max-seq-len-to-capture", "--num-scheduler-steps", "--swap-space", "--task",
    }  # fmt: skip
    for table in (IGNORED, REFUSED):
        assert table.keys() - theirs - of_others == set()
        assert table.keys() & own == set()
    assert IGNORED.keys() & REFUSED.keys() == set()
    for flag, why in REFUSED.items():
        with pytest.raises(typer.BadParameter, match=re.escape(why)) as refused:
            list(accepted(["model", flag, "x"]))
        assert refused.value.param_hint == flag
    for flag, ignored in IGNORED.items():
        value = [*ignored.only, "x"][0] if ignored.has_value else None
        given = [flag] if value is None else [flag, value]
        assert list(accepted(["model", *given, "--port", "9"])) == ["model", "--port", "9"]
        assert capsys.readouterr().err == f"rollout: vLLM's {flag} is ignored: {ignored.why}\n"
        if value is not None:
            assert list(accepted([f"{flag}={value}", "model"])) == ["model"]
            capsys.readouterr()
        if ignored.only:
            with pytest.raises(typer.BadParameter, match=re.escape(ignored.why)):
                list(accepted(["model", flag, "another"]))
    for given in (["-config", '{"enable_in_reasoning": true}'], ["-config.enable_in_reasoning", "true"]):
        with pytest.raises(typer.BadParameter, match="enable_in_reasoning isn't served"):
            list(accepted([f"--structured-outputs{given[0]}", given[1], "model"]))


def test_several_adapters_after_one_flag_ended_the_start(served: list[Any], model: Path) -> None:
    by_json = '{"name": "c", "path": "x/c=1", "base_model_name": "m", "is_3d_lora_weight": false}'
    for given in (
        [model, "--enable-lora", "--lora-modules", "a=x/a", "b=x/b", by_json],
        ["--enable-lora", "--lora_modules=a=x/a", "b=x/b", "--lora-modules", by_json, model],
        ["--lora-modules", "a=x/a", "--lora-modules", "b=x/b", by_json, "--enable-lora", model],
    ):
        answer = invoke("serve", *given)
        assert answer.exit_code == 0, answer.output
        engine, server = served[-2:]
        assert engine.model == str(model)
        loaded = [named_adapter(module) for module in server.lora_modules]
        assert loaded == [("a", "x/a"), ("b", "x/b"), ("c", "x/c=1")]


@pytest.mark.parametrize(
    "wrong",
    ["a", "a=", "=x", "{", "{}", '{"name": "a"}', '{"name": 1, "path": "x"}', '{"name": "a", "path": "x", "y": 1}'],
)
def test_a_wrong_adapter_is_told_what_to_write(served: list[Any], model: Path, wrong: str) -> None:
    answer = invoke("serve", model, "--enable-lora", "--lora-modules", wrong)
    assert (answer.exit_code, served) == (2, [])
    assert "must be name=path or" in " ".join(answer.output.split())


def test_a_refused_flag_ends_the_start_with_its_reason(served: list[Any], model: Path) -> None:
    answer = invoke("serve", model, "--trust-remote-code")
    assert (answer.exit_code, served) == (2, [])
    assert "--trust-remote-code: vLLM's flag isn't served: no code from a model's" in " ".join(answer.output.split())


def test_a_chat_template_that_is_no_file_is_refused(served: list[Any], model: Path) -> None:
    answer = invoke("serve", model, "--chat-template", "nowhere.jinja")
    assert (answer.exit_code, served) == (2, [])
    assert "there is no such file" in re.sub(r"[\s│]+", " ", answer.output)
