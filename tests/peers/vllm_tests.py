"""vLLM's own tests of its server, run against `rollout serve` on SmolLM2: what passes, is refused, or doesn't apply.

    python -m tests.peers.vllm_tests FOLDER [FILE …] [-k EXPRESSION]

FOLDER keeps vLLM's source package, which is fetched from PyPI, and what its tests import beside our own environment.
FILEs are paths below vLLM's `tests/entrypoints`; without any, those of the list below. Only the server fixture and the
model's name are exchanged (vllm_stub.py). Takes an hour; $PEERS_FILE_SECONDS (1800) is the most that one file may.
Most of it goes into answers without max_tokens, which go on to the model's length: at four tokens a second, as two
busy cores give, 2048 take nine minutes. $PEERS_MAX_MODEL_LEN bounds them; tests that tell the length, or need it, then
fail. EXPRESSION chooses tests, as pytest's.

What is expected is in tests/data/vllm_outcomes.json: each test's outcome, and why it doesn't pass. A run prints what
differs, and with `--record` writes down what it found; a test whose outcome is as before keeps its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from rollout.demo.model import fetch_smollm2
from tests.peers.vllm_source import source

ROOT = Path(__file__).parents[2]
EXPECTED = ROOT / "tests" / "data" / "vllm_outcomes.json"
Outcomes = dict[str, tuple[str, str]]
"""Test → passed, refused (by a clear word), inapplicable or failed, and why."""

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
_HELPERS = ["conftest.py", "rl/conftest.py", "scale_out/derender/utils.py"]
_NEEDED = ["pytest-asyncio", "pybase64", "orjson"]
_MODEL = re.compile(r'^(MODEL(?:_NAME)?) = (?:os\.environ\.get\("VLLM_TEST_MODEL", )?"[^"]+"\)?', re.M)
_MODEL_OF_TEXT = re.compile(r'"text": "[\w.-]+/[\w.-]+"|model_name = "[\w.-]+/[\w.-]+"')
_NO_TESTS = 5  # pytest's exit status
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


def run(work: Path, files: list[str], model: Path, chosen: str = "") -> Outcomes:
    """The outcome of each test, or of those that the expression chooses."""
    report, most = work / "report.jsonl", float(os.environ.get("PEERS_FILE_SECONDS", "1800"))
    paths = [str(work), str(work.parent / "site"), str(ROOT)]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "PEERS_REPORT": str(report), "OMP_NUM_THREADS": "1"}
    options = ["-q", "--timeout", "600", "-p", "no:cacheprovider"]
    options += ["-p", "vllm_stub", "-c", os.devnull, "--rootdir", str(work)]
    options += ["--tb", "short", "-W", "ignore"]
    found: Outcomes = {}
    for file in files:  # a process each: a module that breaks breaks no other
        report.write_text("")
        line = [sys.executable, "-m", "pytest", *options, f"tests/entrypoints/{file}", "-k", chosen]
        with (work / "pytest.log").open("a") as log:
            process = subprocess.Popen(
                line, cwd=work, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait(most)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # and its server
                process.wait()
        told = [json.loads(line) for line in report.read_text().splitlines()]
        outcomes = {named(one["test"], model): (one["kind"], one["why"]) for one in told}
        if process.returncode == -signal.SIGKILL:
            outcomes[file] = ("failed", f"the file took more than {most:g} s: the rest of it wasn't run")
        elif not outcomes and not (chosen and process.returncode == _NO_TESTS):
            outcomes[file] = ("failed", f"no test came to an end: pytest exited with {process.returncode}")
        print(f"{file}: {counted(outcomes)}", file=sys.stderr, flush=True)
        found |= outcomes
    return found


def named(test: str, model: Path) -> str:
    """The test's name, the same on every machine."""
    return test.removeprefix("tests/entrypoints/").replace(str(model), "MODEL")


def counted(outcomes: Outcomes) -> dict[str, int]:
    """How many there are of each kind."""
    return dict(Counter(kind for kind, _ in outcomes.values()))


def main(folder: Path, files: list[str], chosen: str, *, record: bool) -> None:
    """Run, and print each test that doesn't pass with its reason, what isn't as expected, and the counts."""
    model = fetch_smollm2()
    expected: Outcomes = {test: (kind, why) for test, (kind, why) in json.loads(EXPECTED.read_text()).items()}
    found = run(prepare(folder.resolve(), files, model), files, model, chosen)
    for test, (kind, why) in found.items():
        if expected.get(test, ("", ""))[0] == kind:
            found[test] = expected[test]
        elif test in expected:
            print(f"changed: {test}: {expected[test][0]} before, now {kind}: {why}")
        else:
            print(f"new: {test}: {kind}: {why}")
    for kind in ("failed", "refused", "inapplicable"):
        for test, (its, why) in found.items():
            if its == kind:
                print(f"{kind}: {test}: {why}")
    print(counted(found))
    if record:
        ran = set() if chosen else set(files)
        others = {test: told for test, told in expected.items() if test.partition("::")[0] not in ran}
        EXPECTED.write_text(json.dumps(others | found, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("-k", dest="chosen", default="")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    main(given.folder, given.files or FILES, given.chosen, record=given.record)
