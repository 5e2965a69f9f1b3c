"""What stands for vLLM when its own tests run against `rollout serve`: the server fixture, and names to import.

A pytest plugin of its own process (see vllm_tests.py), beside vLLM's tests under their own name, `tests`. Whatever
calls vLLM's code is skipped as inapplicable: that code isn't here. Each test's outcome goes to $PEERS_REPORT, one JSON
a line. On a slow machine $PEERS_MAX_MODEL_LEN bounds how long answers without an end may become.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import re
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests

REFUSALS = re.compile(
    r"[^\n]*(?:not supported by this server|isn't offered by this server|isn't served|is no query parameter of"
    r"|The body holds|runs text-only models|can't be served beside the reasoning"
    r"|are disabled\. Restart|greater than max allowed|: must be .* here, got|there is no method '\w+', only)[^\n]*"
)
# What calls vLLM's code in another way, or what no machine without a GPU or a network has.
_ELSEWHERE = re.compile("Foreign|Mock object has no attribute|URLError|Torch not compiled with CUDA")
# How a failure reads that shows the status of an answer alone: what the server said is added to it.
_BARE = re.compile(r"assert 4\d\d == 200|where 4\d\d = <Response|4\d\d Client Error|Client error '4\d\d")
# Of the launch: a CPU's dtype, and a cache that leaves room for neighbours.
OWN_FLAGS = ["--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "1G", "--enable-scale-out"]
DROPPED = {"--dtype", "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--device"}


class Foreign:
    """A name of vLLM's own code: to call it skips the test."""

    def __init__(self, name: str) -> None:
        self.foreign = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        pytest.skip(f"inapplicable: calls vLLM's own {self.foreign}", allow_module_level=True)

    def __getattr__(self, name: str) -> Foreign:
        if name.startswith("__"):
            raise AttributeError(name)
        return Foreign(f"{self.foreign}.{name}")

    def __or__(self, _: Any) -> Foreign:
        return self

    __ror__ = __getitem__ = __or__

    def __iter__(self) -> Any:
        return self()

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)


class ModelConfig:
    """As far as tests ask a configuration."""

    def __init__(self, model: str, **_: Any) -> None:
        self.model = model

    def get_vocab_size(self) -> int:
        return int(json.loads((Path(self.model) / "config.json").read_text())["vocab_size"])


def get_tokenizer(tokenizer_name: str, **_: Any) -> Any:
    """Transformers' tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_name)


def get_open_port() -> int:
    """A port that was free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


KNOWN: dict[str, Any] = {
    "vllm.config.ModelConfig": ModelConfig,
    "vllm.envs.VLLM_USE_RUST_FRONTEND": False,
    "vllm.exceptions.VLLMValidationError": type("VLLMValidationError", (ValueError,), {}),
    "vllm.platforms.current_platform": types.SimpleNamespace(is_cuda_alike=lambda: False),
    "vllm.tokenizers.get_tokenizer": get_tokenizer,
    "vllm.utils.network_utils.get_open_port": get_open_port,
    "vllm.version.__version__": "0.33.0",
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes any module of vLLM's; its names are those of KNOWN, or Foreign."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def name_of(name: str) -> Any:
            if name.startswith("__") and name != "__version__":
                raise AttributeError(name)
            dotted = f"{spec.name}.{name}"
            return KNOWN[dotted] if dotted in KNOWN else Foreign(dotted)

        module.__getattr__ = name_of  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())


_errors: list[str] = []
"""What the server said to the test that runs, of answers that are errors and aren't streamed."""


def _keep_error(answer: Any) -> Any:
    if answer.status_code >= 400 and getattr(answer, "is_closed", True):
        _errors.append(answer.text)
    return answer


def _send(client: Any, request: Any, sends: Any = httpx.Client.send, **options: Any) -> Any:
    return _keep_error(sends(client, request, **options))


async def _asend(client: Any, request: Any, sends: Any = httpx.AsyncClient.send, **options: Any) -> Any:
    return _keep_error(await sends(client, request, **options))


def _send_requests(client: Any, request: Any, sends: Any = requests.Session.send, **options: Any) -> Any:
    answer = sends(client, request, **options)
    return answer if options.get("stream") else _keep_error(answer)


httpx.Client.send, httpx.AsyncClient.send = _send, _asend  # type: ignore[method-assign]
requests.Session.send = _send_requests  # type: ignore[method-assign]


def command(model: str, flags: list[str]) -> list[str]:
    """How `rollout serve` is started where a test would start vLLM with these flags."""
    if not Path(model).is_dir():
        pytest.skip(f"inapplicable: needs the model {model}")
    kept, rest, most = [], iter(flags), os.environ.get("PEERS_MAX_MODEL_LEN")
    for flag in rest:
        if flag in DROPPED:
            next(rest, None)
        elif flag == "--max-model-len" and most is not None:
            kept += [flag, str(min(int(next(rest)), int(most)))]
        else:
            kept.append(flag)
    return [sys.executable, "-m", "rollout.cli", "serve", model, *kept, *OWN_FLAGS]


class RemoteOpenAIServer:
    """Stands for the fixture of vLLM's tests: `rollout serve`, with the flags that the test passes."""

    DUMMY_API_KEY = "token-abc123"
    uds = None
    show_hidden_metrics = False

    def __init__(
        self, model: str, vllm_serve_args: list[str], *, env_dict: Any = None, seed: int = 0, **_: Any
    ) -> None:
        self.host, self.port = "127.0.0.1", get_open_port()
        seeded = [] if seed is None else ["--seed", str(seed)]
        line = command(model, [*vllm_serve_args, "--port", str(self.port), *seeded])
        self.log = Path(os.environ["PEERS_REPORT"]).with_suffix(f".{self.port}.log")
        with self.log.open("w") as log:
            self.proc = subprocess.Popen(line, stdout=log, stderr=log, env={**os.environ, **(env_dict or {})})
        deadline = time.monotonic() + 300
        while "rollout: serving" not in self.log.read_text():
            if self.proc.poll() is not None:
                told = (self.log.read_text().strip().splitlines() or ["nothing"])[-1]
                if told.startswith("Error: "):  # a flag, by name
                    pytest.skip(f"refused: the server's start: {told}")
                pytest.fail(f"the server didn't start: {told}")
            if time.monotonic() > deadline:
                self.proc.kill()
                pytest.fail("the server didn't start in 300 s")
            time.sleep(0.2)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(30)
        except subprocess.TimeoutExpired:
            self.proc.kill()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return f"{self.url_root}/" + "/".join(part.strip("/") for part in parts if part)

    def _client(self, kind: Any, base: str, **options: Any) -> Any:
        return kind(base_url=base, api_key=self.DUMMY_API_KEY, max_retries=0, **{"timeout": 540, **options})

    def get_client(self, **options: Any) -> Any:
        import openai

        return self._client(openai.OpenAI, self.url_for("v1"), **options)

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return self._client(openai.AsyncOpenAI, self.url_for("v1"), **options)

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return self._client(anthropic.Anthropic, self.url_root, **options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return self._client(anthropic.AsyncAnthropic, self.url_root, **options)


RemoteLaunchRenderServer = RemoteOpenAIServerCustom = RemoteOpenAIServer
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}


class LocalAssetServer:
    """Named by a test of images, which is inapplicable."""


@pytest.fixture
def local_asset_server() -> None:
    """See LocalAssetServer."""


def multi_gpu_test(**_: Any) -> Any:
    """A mark for tests that need several GPUs."""
    return pytest.mark.skip(reason="inapplicable: needs several GPUs")


multi_gpu_only = large_gpu_test = multi_gpu_test


def pytest_runtest_setup() -> None:
    """What was said to another test explains nothing of this one."""
    _errors.clear()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Write the outcome down, once a test."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or (report.when == "setup" and not report.passed):
        _note(item.nodeid, report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that can't be collected stands for all its tests."""
    if not report.passed and report.nodeid.endswith(".py"):
        _note(report.nodeid, report)


def _note(nodeid: str, report: Any) -> None:
    told = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "")
    if _errors and _BARE.search(told):
        told += "\n" + _errors[-1]
    found = REFUSALS.search(told)
    if report.passed:
        kind, why = "passed", ""
    elif "inapplicable: " in told:
        kind, why = "inapplicable", told.rpartition("inapplicable: ")[2].splitlines()[0]
    elif elsewhere := _ELSEWHERE.search(told):
        kind, why = "inapplicable", told[elsewhere.start() :].splitlines()[0]
    elif "refused: " in told or found:
        kind, why = "refused", found[0].strip() if found else told.rpartition("refused: ")[2].splitlines()[0]
    elif report.skipped:
        kind, why = "inapplicable", told.removeprefix("Skipped: ")
    else:
        kind, why = "failed", told.strip().splitlines()[-1] if told.strip() else ""
    with open(os.environ["PEERS_REPORT"], "a") as file:
        file.write(json.dumps({"test": nodeid, "kind": kind, "why": why[:300]}) + "\n")
