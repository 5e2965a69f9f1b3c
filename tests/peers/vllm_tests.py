"""vLLM's own tests of its server, run against `rollout serve` on SmolLM2: what passes, is refused, or doesn't apply.

    python -m tests.peers.vllm_tests FOLDER [FILE …]

FOLDER keeps vLLM's source package, which is fetched from PyPI, and what its tests import beside our own environment.
FILEs are paths below vLLM's `tests/entrypoints`; without any, those of the list below. Only the server fixture and the
model's name are exchanged (vllm_stub.py). Takes tens of minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from rollout.demo.model import fetch_smollm2
from tests.peers.vllm_source import source

ROOT = Path(__file__).parents[2]

FILES = [
    "anthropic/test_messages.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "rl/return_routed_experts/test_openai_api.py",
    "rl/return_routed_experts/test_scale_out_api.py",
    "rl/state_transitions/test_pause_multi_frontend.py",
    "rl/state_transitions/test_pause_resume.py",
    "rl/state_transitions/test_sleep.py",
    "rl/state_transitions/test_weight_checker.py",
    "rl/weight_transfer_metrics/test_across_api_servers_metrics.py",
    "scale_out/derender/test_derender.py",
    "scale_out/derender/test_derender_parity.py",
    "scale_out/render/test_launch_render.py",
    "scale_out/render/test_render.py",
    "scale_out/token_in_token_out/test_serving_tokens.py",
    "serve/dev/rpc/test_collective_rpc.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_metrics.py",
    "serve/instrumentator/test_orca_metrics.py",
    "serve/instrumentator/test_uds.py",
    "serve/middleware/test_optional_middleware.py",
    "serve/tokenize/test_tokenization.py",
]
# Those that define what others import, taken along.
_HELPERS = ["rl/conftest.py", "scale_out/derender/utils.py"]
_NEEDED = ["pytest-asyncio", "pybase64"]
_MODEL = re.compile(r'^(MODEL(?:_NAME)?) = (?:os\.environ\.get\("VLLM_TEST_MODEL", )?"[^"]+"\)?', re.M)
_MODEL_OF_TEXT = re.compile(r'"text": "[\w.-]+/[\w.-]+"|model_name = "[\w.-]+/[\w.-]+"')
_LAUNCH = 'sys.executable,\n        "-m",\n        "vllm.entrypoints.openai.api_server",'


def prepare(folder: Path, files: list[str], model: Path) -> Path:
    """A folder with these tests of vLLM's and what stands for vLLM."""
    theirs, work = source(folder) / "tests", folder / "run"
    shutil.rmtree(work, ignore_errors=True)
    for name in [*files, *_HELPERS]:
        text = (theirs / "entrypoints" / name).read_text()
        text = _MODEL.sub(rf'\1 = "{model}"', text)
        text = _MODEL_OF_TEXT.sub(lambda found: found[0].partition('"')[0] + _renamed(found[0], model), text)
        text = text.replace(_LAUNCH, 'sys.executable, "-m", "vllm_launch",')
        path = work / "tests" / "entrypoints" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for package in [work / "tests", *(path for path in (work / "tests").rglob("*") if path.is_dir())]:
        (package / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("vllm_stub.py"), work / "vllm_stub.py")
    (work / "tests" / "utils.py").write_text("from vllm_stub import *\n")
    (work / "tests" / "conftest.py").write_text("from vllm_stub import LocalAssetServer\n")
    launch = "import subprocess, sys\nfrom vllm_stub import command\narguments = sys.argv[1:]\n"
    launch += "place = arguments.index('--model')\nmodel = arguments.pop(place + 1)\narguments.pop(place)\n"
    launch += "import os\nline = command(model, arguments)\nos.execv(line[0], line)\n"
    (work / "vllm_launch.py").write_text(launch)
    site = folder / "site"
    if not site.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), *_NEEDED]
        subprocess.run(pip, check=True)
    return work


def _renamed(found: str, model: Path) -> str:
    return f'"text": "{model}"' if found.startswith('"text"') else f'"{model}"'


def run(work: Path, files: list[str]) -> list[dict[str, str]]:
    """The outcome of each test."""
    report = work / "report.jsonl"
    paths = [str(work), str(work.parent / "site"), str(ROOT)]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "PEERS_REPORT": str(report), "OMP_NUM_THREADS": "1"}
    options = ["-q", "--timeout", "600", "-p", "no:cacheprovider"]
    options += ["-p", "vllm_stub", "-c", os.devnull, "--rootdir", str(work)]
    options += ["--tb", "short", "-W", "ignore"]
    for file in files:  # a process each: a module that breaks breaks no other
        line = [sys.executable, "-m", "pytest", *options, f"tests/entrypoints/{file}"]
        with (work / "pytest.log").open("a") as log:
            subprocess.run(line, cwd=work, env={**os.environ, **environment}, stdout=log, stderr=log, check=False)
        done = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        counts = Counter(one["kind"] for one in done if one["test"].startswith(f"tests/entrypoints/{file}"))
        print(f"{file}: {dict(counts)}", file=sys.stderr, flush=True)
    return [json.loads(line) for line in report.read_text().splitlines()]


def main(folder: Path, files: list[str]) -> None:
    """Run, and print each test that doesn't pass with its reason, then the counts."""
    work = prepare(folder.resolve(), files, fetch_smollm2())
    outcomes = run(work, files)
    for kind in ("failed", "refused", "inapplicable"):
        for one in outcomes:
            if one["kind"] == kind:
                print(f"{kind}: {one['test'].removeprefix('tests/entrypoints/')}: {one['why']}")
    print(dict(Counter(one["kind"] for one in outcomes)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or FILES)
