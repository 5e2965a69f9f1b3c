"""What a server does when clients leave, engines die or hang, keys are missing, generation is paused, signals come."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from rollout.cli import main as cli
from rollout.config import EngineConfig, ServerConfig
from rollout.server import main
from tests.support import fake_engine
from tests.support.server_harness import RunningServer, children, is_alive, running_server
from tests.support.wait import eventually

PATH = "/inference/v1/generate"
EXAMPLES = json.loads((Path(__file__).parents[1] / "data" / "wire_examples.json").read_text())


def body(first: int, **params: Any) -> dict[str, Any]:
    return {"token_ids": [first, 20], "sampling_params": {"max_tokens": 30, **params}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as http:
        yield http
        http.post("/resume")


def in_background(client: httpx.Client, **json_body: Any) -> Any:
    """The future response to a generate request."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(client.post, PATH, json=json_body)
    pool.shutdown(wait=False)
    return future


def running(server: RunningServer) -> int:
    return int(server.stats()["running"])


def leave(url: str, request: dict[str, Any]) -> None:
    """Ask, and close the connection at the first byte of the answer, or after half a second without one."""
    with (
        httpx.Client(base_url=url, timeout=0.5) as client,
        contextlib.suppress(httpx.TimeoutException),
        client.stream("POST", PATH, json=request) as response,
    ):
        next(response.iter_raw())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [fake_engine.NEVER, fake_engine.SLOW])
def test_a_client_that_leaves_aborts_its_request(server: RunningServer, stream: bool, prompt: int) -> None:
    silent = server.stats()["silent"]
    leave(server.url, {**body(prompt, max_tokens=100), "stream": stream})
    eventually(lambda: running(server) == 0 and server.stats()["silent"] == silent + 1)


def test_aborting_by_the_id_that_the_answer_bears(server: RunningServer, client: httpx.Client) -> None:
    doomed = [in_background(client, **body(fake_engine.NEVER, n=n), request_id=f"r{n}") for n in (1, 2)]
    eventually(lambda: running(server) == 2)
    answer = client.post("/inference/v1/abort_requests", json={"request_ids": ["generate-tokens-r2", "unknown"]})
    assert (answer.status_code, answer.content) == (200, b"")
    choices = doomed[1].result(10).json()["choices"]
    assert [(c["index"], c["finish_reason"], c["token_ids"], c["weight_versions"]) for c in choices] == [
        (0, "abort", [], []),
        (1, "abort", [], []),
    ]
    assert running(server) == 1
    assert client.post("/abort_requests", json={"request_ids": ["unknown"]}).json()["aborted"] == 0
    assert client.post("/abort_requests", json={}).json() == {"status": "aborted", "aborted": 1}
    assert doomed[0].result(10).json()["choices"][0]["finish_reason"] == "abort"


def test_an_aborted_stream_ends_with_its_spans(server: RunningServer, client: httpx.Client) -> None:
    chunks = []
    with client.stream("POST", PATH, json={**body(fake_engine.SLOW, max_tokens=500), "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: "))["choices"][0])
            if len(chunks) == 2 and chunks[-1]["finish_reason"] is None:
                client.post("/abort_requests")
    count = sum(len(chunk["token_ids"]) for chunk in chunks)
    assert chunks[-1]["finish_reason"] == "abort"
    assert [(s["start"], s["end"]) for s in chunks[-1]["weight_versions"]] == [(0, count)]


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_these_pauses_refuse_new_requests(client: httpx.Client, mode: str) -> None:
    assert client.post(f"/pause?mode={mode}").json() == {"status": "paused"}
    assert client.get("/is_paused").json() == {"is_paused": True}
    for stream in (False, True):
        refused = client.post(PATH, json={**body(7), "stream": stream})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
    assert client.post("/resume").json() == {"status": "resumed"}
    assert client.post(PATH, json=body(7)).status_code == 200


def test_a_pause_clears_the_cache_where_it_is_asked_to(server: RunningServer, client: httpx.Client) -> None:
    before = len(server.stats()["calls"])
    for mode, clear in (("abort", "true"), ("wait", "false"), ("keep", "true")):
        client.post(f"/pause?mode={mode}&clear_cache={clear}")
        client.post("/resume")
    methods = [call["method"] for call in server.stats()["calls"][before:]]
    assert methods == ["pause", "reset_prefix_cache", "resume", "pause", "resume", "pause", "resume"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/pause?mod=keep", "mod"),
        ("/resume?tags=weights", "tags"),
        ("/reset_prefix_cache?reset_running_requests=true", "reset_running_requests"),
        ("/reset_prefix_cache?reset_external=1", "reset_external"),
        ("/start_weight_update?mode=in_place", "mode"),
        ("/abort_requests?request_ids=a", "request_ids"),
        ("/flush_cache?timeout=-1", "query.timeout"),
        ("/pause_generation?mode=retract", "mode"),
        ("/collective_rpc?method=start_weight_update", "method"),
    ],
)
def test_no_query_parameter_is_ignored_where_something_changes(client: httpx.Client, path: str, param: str) -> None:
    refused = client.post(path)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert client.get("/is_paused").json() == {"is_paused": False}
    for harmless in ("/reset_prefix_cache?reset_external=false", "/ping?from=balancer", "/flush_cache?timeout=0.5"):
        assert client.post(harmless).status_code == 200


def test_a_keep_pause_queues_them(server: RunningServer, client: httpx.Client) -> None:
    client.post("/pause?mode=keep")
    queued = in_background(client, **body(7))
    eventually(lambda: running(server) == 1)
    assert not queued.done()
    client.post("/resume")
    assert queued.result(10).json()["choices"][0]["finish_reason"] == "length"


def test_an_abort_pause_ends_what_runs(server: RunningServer, client: httpx.Client) -> None:
    doomed = in_background(client, **body(fake_engine.NEVER))
    eventually(lambda: running(server) == 1)
    client.post("/pause")
    assert doomed.result(10).json()["choices"][0]["finish_reason"] == "abort"


CONTROL = "weight_info uwv uwv_missing pause_bad pause_keep is_paused2 resume models abort_missing abort_unknown"


@pytest.mark.parametrize("name", CONTROL.split())
def test_control_answers_are_the_recorded_ones(client: httpx.Client, name: str) -> None:
    case = EXAMPLES[name]
    if name == "is_paused2":
        client.post("/pause?mode=keep")
    if name == "weight_info":
        client.post("/update_weight_version", json={"new_version": "default"})
    request = case["request"]
    response = client.request(request["method"], request["path"], json=request.get("json"))
    assert response.status_code == case["status"]
    if name == "models":
        (ours,), (theirs,) = response.json()["data"], case["body"]["data"]
        assert list(ours) == list(theirs)
        assert list(ours["permission"][0]) == list(theirs["permission"][0])
        assert (ours["id"], ours["max_model_len"]) == (theirs["id"], theirs["max_model_len"])
    elif name == "weight_info":
        assert response.json().items() >= case["body"].items()
    else:
        assert (response.json() if response.content else "") == case["body"]


def test_weight_calls_reach_the_engine_with_their_body(server: RunningServer, client: httpx.Client) -> None:
    sent = {
        "init_weight_transfer_engine": {"init_info": {"master_port": 1}},
        "start_weight_update": None,
        "finish_weight_update": {"weight_version": "v8"},
        "abort_weight_update": {},
        "weight_checker": {"action": "checksum"},
        "shutdown_weight_transfer_engine": None,
    }
    before = len(server.stats()["calls"])
    for method, params in sent.items():
        assert client.post(f"/{method}", json=params).json() == {"message": f"{method} done"}
    calls = server.stats()["calls"][before:]
    handed_out = ("owner", "update_id", "handed_out")  # the server's own additions: see docs/weight-updates.md
    bodies = [{key: value for key, value in call["params"].items() if key not in handed_out} for call in calls]
    assert [call["method"] for call in calls] == list(sent)
    assert bodies == [body or {} for body in sent.values()]
    refused = client.post("/update_weights", json={"update_info": {}})
    assert (refused.status_code, refused.json()["error"]) == (
        409,
        {"message": "no update is open (state: idle)", "type": "ConflictError", "param": "state", "code": 409},
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("new_data_parallel_size", "9" * 30), ("new_data_parallel_size", "1025"), ("drain_timeout", "1e999")],
)
def test_any_number_of_engines_was_started(client: httpx.Client, field: str, value: str) -> None:
    content = f'{{"new_data_parallel_size": 1, "{field}": {value}}}'
    answer = client.post("/scale_elastic_ep", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == f"body.{field}"
    assert ("inf" if field == "drain_timeout" else value) in error["message"]


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        ("[1]", "application/json"),
        ('{"a": 1' + "0" * 30 + "}", "application/json"),
        ('{"a": "\\ud800"}', "application/json"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "application/json"),
        ("{}", "text/plain"),
    ],
)
def test_hostile_bodies_of_weight_calls_are_a_400(client: httpx.Client, content: str, content_type: str) -> None:
    response = client.post("/start_weight_update", content=content, headers={"Content-Type": content_type})
    assert response.status_code == 400, response.text


def test_small_answers(client: httpx.Client) -> None:
    assert PATH in client.get("/openapi.json").json()["paths"]
    assert client.get("/health").content == client.get("/ping").content == b""
    assert client.get("/version").json()["version"]
    assert client.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    config = client.get("/server_info?config_format=json").json()["vllm_config"]
    assert (config["model_config"], config["parallel_config"]) == (
        {"dtype": "torch.float32", "logprobs_mode": "raw_logprobs"},
        {"data_parallel_size": 1},
    )


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", PATH, 405)])
def test_the_framework_errors_have_the_same_shape(client: httpx.Client, method: str, path: str, status: int) -> None:
    response = client.request(method, path)
    assert response.status_code == response.json()["error"]["code"] == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("prompt", "reason"), [(fake_engine.DIE, "-9"), (fake_engine.DIE_SAYING_WHY, "out of memory")])
def test_a_dead_engine_fails_what_is_in_flight(prompt: int, reason: str) -> None:
    with running_server() as server, httpx.Client(base_url=server.url, timeout=20) as client:
        waiting = in_background(client, **body(fake_engine.NEVER))
        eventually(lambda: running(server) == 1)
        streamed = client.post(PATH, json={**body(prompt, max_tokens=100), "stream": True}).text
        *chunks, failure, done = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
        assert done == "[DONE]"
        assert reason in json.loads(failure)["error"]["message"]
        assert bool(chunks) == (prompt == fake_engine.DIE)
        for response in (waiting.result(10), client.get("/health"), client.post(PATH, json=body(7))):
            assert response.status_code == 503
            assert reason in response.json()["error"]["message"]
        assert client.post("/pause").status_code == 503


def test_a_hanging_engine_is_declared_dead() -> None:
    with running_server(stall_timeout_s=0.5) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        response = client.post(PATH, json=body(fake_engine.HANG))
        assert (response.status_code, response.json()["error"]["code"]) == (503, 503)
        assert "hangs" in response.json()["error"]["message"]
        assert client.get("/health").status_code == 503


def test_a_quiet_engine_is_not() -> None:
    with running_server(stall_timeout_s=0.3) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        waiting = in_background(client, **body(fake_engine.NEVER))
        threading.Event().wait(1.5)
        assert not waiting.done()
        client.post("/abort_requests")
        assert waiting.result(10).status_code == 200


KEYED = {"api_key": ("first", "second"), "served_model_name": "smol"}


@pytest.mark.parametrize("tokens_only", [False, True])
def test_keys_guard_everything_but_the_probes(tokens_only: bool) -> None:
    config = ServerConfig(**KEYED, enable_scale_out=True, tokens_only=tokens_only)
    with running_server(config) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        assert client.get("/health").status_code == client.get("/ping").status_code == 200
        guarded = [
            ("POST", PATH),
            ("POST", "/finish_weight_update"),
            ("GET", "/v1/models"),
            ("GET", "/openapi.json"),
        ]
        for method, path in guarded:
            for header in ({}, {"Authorization": "Bearer third"}, {"Authorization": "first"}):
                response = client.request(method, path, headers=header)
                assert response.status_code == response.json()["error"]["code"] == 401
                assert "first" not in response.text
        for key in KEYED["api_key"]:
            assert client.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200
        # the one legacy path: without the key it only ever ends requests that are named
        unnamed = client.post("/abort_requests", json={})
        named = client.post("/abort_requests", json={"request_ids": ["x"]})
        if tokens_only:
            assert (unnamed.status_code, named.status_code, named.content) == (400, 200, b"")
        else:
            assert (unnamed.status_code, named.status_code) == (401, 401)
        full = client.post("/abort_requests", json={}, headers={"Authorization": "Bearer second"})
        assert full.json() == {"status": "aborted", "aborted": 0}


SERVE = """
import sys
sys.path.insert(0, {tests!r})
from tests.support.fake_engine import run_engine
from rollout.config import EngineConfig, ServerConfig
from rollout.server.main import serve
if __name__ == "__main__":
    config = ServerConfig(port={port}, served_model_name="smol", tokens_only=True)
    sys.exit(serve(EngineConfig(model={model!r}, device='cpu'), config, target=run_engine))
"""


def start_process(tmp_path: Path, model: str = "", port: int = 0) -> subprocess.Popen[str]:
    script = tmp_path / "serve.py"
    script.write_text(SERVE.format(tests=str(Path(__file__).parents[2]), model=model, port=port))
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(script)], stdout=pipe, stderr=pipe, text=True)


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"rollout: serving smol on (http://127\.0\.0\.1:\d+) \(\d+\.\d s\)\n", line)
    assert found, line
    return found[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_answers_what_is_in_flight_and_ends(tmp_path: Path, number: signal.Signals) -> None:
    process = start_process(tmp_path)
    try:
        with httpx.Client(base_url=url_of(process), timeout=20) as client:
            answer = in_background(client, **body(fake_engine.NEVER))
            eventually(lambda: client.get("/health").status_code == 200)
            threading.Event().wait(0.5)
            engines = children(process.pid)
            process.send_signal(number)
            assert answer.result(10).json()["choices"][0]["finish_reason"] == "abort"
        assert process.wait(10) == 0
        assert engines  # the engine and multiprocessing's helper, which ends a moment after its parent
        eventually(lambda: not any(is_alive(pid) for pid in engines))
        assert "Traceback" not in process.communicate()[1]
    finally:
        process.kill()
        process.communicate()


def test_an_engine_that_does_not_start_is_reported(tmp_path: Path) -> None:
    process = start_process(tmp_path, model="dies")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "rollout: The engine is not running: no such model: dies." in errors
    assert "Traceback" not in errors


def test_stopped_while_the_engine_loads(tmp_path: Path) -> None:
    process = start_process(tmp_path, model="stalls")
    try:
        eventually(lambda: len(children(process.pid)) >= 1, 20)
        threading.Event().wait(0.5)
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_taken_is_reported_before_anything_is_loaded(tmp_path: Path, server: RunningServer) -> None:
    process = start_process(tmp_path, port=int(server.url.rpartition(":")[2]))
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.startswith("rollout: can't listen on 127.0.0.1:")


def test_a_folder_for_snapshots_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message had the name of a temporary folder that could not be made in it."""
    missing = tmp_path / "missing"
    assert main.serve(EngineConfig(model="", keep_weight_snapshot=str(missing)), ServerConfig(port=0)) == 1
    reported = f"rollout: can't write to --keep-weight-snapshot {missing}: No such file or directory\n"
    assert capsys.readouterr().err == reported


def test_every_field_is_a_flag() -> None:
    shown = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "300"}).output
    for flag in ("--max-num-seqs", "--no-enable-prefix-caching", "--kv-policy", "--tokens-only", "--api-key", "--port"):
        assert flag in shown


def test_flags_reach_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(main, "serve", lambda *configs: served.extend(configs) or 0)
    monkeypatch.setattr(cli, "check_model", lambda config: None)
    flags = shlex.split(
        "--max-num-seqs 4 --no-enable-prefix-caching --kv-policy recompute --api-key a --api-key b --port 9"
    )
    assert CliRunner().invoke(cli.app, ["serve", "some/model", *flags]).exit_code == 0
    assert served == [
        EngineConfig(model="some/model", max_num_seqs=4, enable_prefix_caching=False, kv_policy="recompute"),
        ServerConfig(api_key=("a", "b"), port=9),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "MODEL"),
        (["m", "--kv-policy", "drop"], "--kv-policy"),
        (["m", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["m", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (["m", "--frobnicate"], "--frobnicate"),
    ],
)
def test_usage_errors_name_the_flag(arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(cli.app, ["serve", *arguments])
    assert result.exit_code == 2
    assert expected in result.output


def test_the_server_process_starts_without_torch() -> None:
    code = "import rollout.cli.main, rollout.server.main, rollout.server.app, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
