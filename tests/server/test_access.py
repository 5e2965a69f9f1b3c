"""Who may ask, how much, and how slowly; and what the server does with requests when it is told to end."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from rollout.config import ServerConfig
from rollout.server import limits
from rollout.server.api import generate
from rollout.server.auth import api_keys
from rollout.server.context import ServerContext
from rollout.server.wire.completions import CompletionRequest
from tests.support import fake_engine
from tests.support.server_harness import RunningServer, running_server
from tests.support.trace import traced
from tests.support.wait import eventually

PATH = "/inference/v1/generate"
ROOT = Path(__file__).parents[2]


def body(first: int, **params: Any) -> dict[str, Any]:
    return {"token_ids": [first, 20], "sampling_params": {"max_tokens": 30, **params}}


def config(**fields: Any) -> ServerConfig:
    return ServerConfig(served_model_name="smol", enable_scale_out=True, **fields)


@contextlib.contextmanager
def in_background() -> Iterator[Any]:
    """Yields `post(url, body)`, whose answers are futures."""
    with ThreadPoolExecutor(8) as pool:
        yield lambda url, json_body: pool.submit(httpx.post, url + PATH, json=json_body, timeout=30)


# -- keys


def test_keys_of_the_environment_count_where_no_flag_gives_one() -> None:
    environment = {"ROLLOUT_API_KEY": "ours", "VLLM_API_KEY": "theirs"}
    assert api_keys((), environment) == ["ours", "theirs"]
    assert api_keys((), {"VLLM_API_KEY": "theirs", "ROLLOUT_API_KEY": ""}) == ["theirs"]
    assert api_keys(("flag",), environment) == ["flag"]
    with pytest.raises(ValueError, match="api_key must not be empty"):
        ServerConfig(api_key=("a", ""))


def test_a_key_of_the_environment_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with running_server(config()) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/v1/models").status_code == 401
        for headers in ({"Authorization": "Bearer secret"}, {"X-API-Key": "secret"}):
            assert client.get("/v1/models", headers=headers).status_code == 200
        for headers in ({"Authorization": "Bearer"}, {"X-API-Key": ""}, {"X-API-Key": "secret2"}):
            assert client.get("/v1/models", headers=headers).status_code == 401
        twice = [("X-API-Key", "wrong"), ("X-API-Key", "secret")]
        assert client.get("/v1/models", headers=twice).status_code == 401


SERVE = """
import sys
sys.path.insert(0, {tests!r})
from tests.support.fake_engine import run_engine
from rollout.config import EngineConfig, ServerConfig
from rollout.server.main import serve
if __name__ == "__main__":
    config = ServerConfig(port=0, served_model_name="smol", enable_scale_out=True, **{fields!r})
    sys.exit(serve(EngineConfig(device='cpu'), config, target=run_engine))
"""


@contextlib.contextmanager
def process(tmp_path: Path, **fields: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process of its own, and its address."""
    script = tmp_path / "serve.py"
    script.write_text(SERVE.format(tests=str(Path(__file__).parents[2]), fields=fields))
    pipe = subprocess.PIPE
    serving = subprocess.Popen([sys.executable, str(script)], stdout=pipe, stderr=pipe, text=True, env=os.environ)
    try:
        assert serving.stdout is not None
        yield serving, serving.stdout.readline().split(" on ")[1].split()[0]
    finally:
        serving.kill()
        serving.communicate()


def test_keys_are_never_logged(tmp_path: Path) -> None:
    with process(tmp_path, api_key=("sesame-1", "sesame-2"), uvicorn_log_level="trace") as (serving, url):
        for headers in ({"Authorization": "Bearer sesame-1"}, {"X-API-Key": "sesame-2"}, {"X-API-Key": "sesame-3"}):
            answer = httpx.post(url + PATH, json=body(7), headers=headers)
            assert "sesame" not in answer.text
        serving.terminate()
        out, errors = serving.communicate(timeout=20)
    assert "HTTP connection made" in errors
    assert "sesame" not in out + errors
    assert "sesame" not in repr(ServerConfig(api_key=("sesame",)))


# -- pages of other sites


FOREIGN: list[dict[str, str]] = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:3000"},
    {"Origin": "http://[::1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:3000"},
    {"Host": "evil.example"},
    {"Host": "evil.example:8000", "Sec-Fetch-Site": "same-origin"},
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "[::1"},
]


def test_any_web_page_could_pause_a_server_without_a_key() -> None:
    with running_server(config()) as server, httpx.Client(base_url=server.url) as client:
        for headers in FOREIGN:
            refused = client.post("/pause?mode=abort", headers=headers)
            assert refused.status_code == 403, headers
            assert "--allowed-hosts" in refused.json()["error"]["message"]
        assert client.get("/is_paused", headers={"Host": "evil.example"}).status_code == 403
        assert client.get("/is_paused").json() == {"is_paused": False}
        port = urlsplit(server.url).port
        own: list[dict[str, str]] = [
            {},
            {"Sec-Fetch-Site": "none"},
            {"Sec-Fetch-Site": "same-origin", "Origin": server.url},
            {"Origin": server.url},
            {"Host": f"localhost:{port}"},
            {"Host": f"[::1]:{port}"},
            {"Host": f"api.localhost:{port}", "Origin": f"http://api.localhost:{port}"},
        ]
        for headers in own:
            assert client.post("/pause?mode=abort", headers=headers).status_code == 200, headers
        assert client.get("/health", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200  # a link


@pytest.mark.parametrize(
    ("fields", "served"),
    [
        ({"allowed_hosts": ("evil.example",)}, [0, 6, 7]),
        ({"allowed_hosts": ("*",)}, [*range(10)]),
        ({"host": "0.0.0.0"}, [6, 7, 8, 9]),
        ({"api_key": ("secret",)}, [*range(10)]),
    ],
)
def test_which_pages_and_names_are_served(fields: dict[str, Any], served: list[int]) -> None:
    key = {"Authorization": "Bearer secret"}
    with running_server(config(**fields)) as server, httpx.Client(base_url=server.url, headers=key) as client:
        statuses = [client.post("/resume", headers=headers).status_code for headers in FOREIGN]
    assert [i for i, status in enumerate(statuses) if status == 200] == served


# -- limits


def test_a_full_queue_refuses_and_says_when_to_retry() -> None:
    most = fake_engine.MAX_NUM_SEQS + 2
    with running_server(config(max_queued_requests=2)) as server, in_background() as post:
        running: list[Future[httpx.Response]] = [post(server.url, body(fake_engine.NEVER, n=n)) for n in (8, 1)]
        eventually(lambda: server.engine.in_flight == most - 1)
        for stream in (False, True):
            refused = httpx.post(server.url + PATH, json={**body(7, n=2), "stream": stream})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
            assert "9 choices run or wait" in error["message"]
        assert httpx.post(server.url + PATH, json=body(7)).status_code == 200
        httpx.post(server.url + "/abort_requests")
        assert [answer.result(10).status_code for answer in running] == [200, 200]
        assert httpx.post(server.url + PATH, json=body(7, n=8)).status_code == 200


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0), timeout=20)


HEAD = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
TINY = config(max_body_bytes=1000, receive_timeout_s=0.3)


@pytest.fixture(scope="module")
def impatient() -> Iterator[RunningServer]:
    with running_server(TINY) as server:
        yield server


def received(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_body_announced_as_too_large_is_refused_before_it_comes(impatient: RunningServer) -> None:
    with connect(impatient) as connection:
        connection.sendall(f"{HEAD}Content-Length: 1001\r\n\r\n".encode())
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"larger than 1000 bytes" in answer
    fits = json.dumps(body(7)).ljust(1000)
    assert httpx.post(impatient.url + PATH, content=fits, headers={"Content-Type": "application/json"}).is_success


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    """With a key, and a receive timeout that no test waits for."""
    with running_server(config(api_key=("key",), receive_timeout_s=600.0)) as server:
        yield server


@pytest.mark.parametrize("then", [b"", b"x"], ids=["nothing", "one byte"])
@pytest.mark.parametrize("path", [PATH, "/v1/models", "/no/such/path"])
def test_a_body_that_never_came_held_its_connection_after_the_answer(
    guarded: RunningServer, path: str, then: bytes
) -> None:
    key = "" if path == PATH else "Authorization: Bearer key\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Length: 60000000\r\n\r\n"
    with connect(guarded) as connection:
        connection.sendall(head.encode() + then)
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"connection: close" in answer


def test_a_server_error_left_the_connection_of_a_body_that_never_came_open(
    guarded: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is answered outside of all middleware but ours."""
    monkeypatch.setattr(ServerContext, "model_name", property(lambda _: 1 / 0))
    head = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key\r\nContent-Type: application/json"
    with connect(guarded) as connection:
        connection.sendall(f"{head}\r\nContent-Length: 60000000\r\n\r\nx".encode())
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"connection: close" in answer
    assert answer.count(b"HTTP/1.1") == 1
    assert b"ZeroDivisionError. Its log has the traceback" in answer


def test_a_client_that_sends_on_still_reads_its_refusal(guarded: RunningServer) -> None:
    answer = httpx.post(guarded.url + PATH, content=b" " * (8 << 20), timeout=30)
    assert answer.status_code == 401
    assert "connection" not in answer.headers


def test_an_empty_line_held_an_idle_connection(impatient: RunningServer) -> None:
    """It stopped the timer of idle connections, and began none of its own."""
    with connect(impatient) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"\r\n")
        assert received(connection) == b""


# -- what is in a body


def test_a_body_of_one_prompt_is_refused_by_its_size_before_it_is_parsed() -> None:
    """60 MB of ids stopped the server for 56 s, and took 1.2 GB."""
    with running_server(config()) as server:
        for path in (PATH, "/v1/chat/completions", "/v1/messages", "/tokenize"):
            with connect(server) as connection:
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                connection.sendall(f"{head}Content-Length: 60000000\r\n\r\n".encode())
                answer = received(connection)
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"no prompt of the model's length takes more" in answer


LARGE = " " * (1 << 20)  # so that it isn't parsed on the event loop


@pytest.mark.parametrize("extra", [{"prompt": [5] * 10**6}, {"prompt": "a", "allowed_token_ids": [[5] * 10**6]}])
def test_a_list_longer_than_any_of_ids_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    monkeypatch.delattr(limits.msgspec.json, "decode")
    with pytest.raises(HTTPException) as refused:
        limits.parse_large((json.dumps(extra) + LARGE).encode(), 10**5)
    assert (refused.value.status_code, refused.value.detail) == (
        400,
        "The body holds a list of more than 100000 numbers; no list of ids here is so long.",
    )


@pytest.mark.parametrize("value", [[[]] * (10**6 + 1), [{}] * (10**6 + 1), ["a"] * (2 * 10**6 + 1)])
def test_so_are_millions_of_small_things(value: Any) -> None:
    with pytest.raises(HTTPException, match="send less in one request"):
        limits.parse_large(json.dumps(value).encode(), 10**9)


@given(
    value=st.recursive(
        st.integers(-(2**53), 2**53) | st.text(st.sampled_from('a,"]\\')) | st.none() | st.booleans(),
        lambda part: st.lists(part) | st.dictionaries(st.text(st.sampled_from('a,"]')), part),
        max_leaves=40,
    ),
    piece=st.integers(1, 40),
)
def test_what_is_in_a_large_body_is_read_as_json(value: Any, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "_SMALL_BYTES", piece)
        assert limits.parse_large(json.dumps(value).encode(), 10**5) == value


def test_a_batch_of_prompts_is_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """57 MB of them held up all others for 1.5 s: for so long Python's lock was held, on whichever thread."""
    decode, sizes = msgspec.json.decode, list[int]()

    def recorded(data: Any, **kind: Any) -> Any:
        if not kind:  # else the parts are found, and left as they are
            sizes.append(len(data))
        return decode(data, **kind)

    monkeypatch.setattr(msgspec.json, "decode", recorded)
    (route,) = [r for r in generate.router.routes if isinstance(r, limits.BoundedRoute) and r.path == "/v1/completions"]
    prompts = [[place % 500 for place in range(start, start + 5000)] for start in range(100)]
    with traced() as trace:
        made = route._read(json.dumps({"prompt": prompts, "max_tokens": 2}).encode(), 10**5)
    assert isinstance(made, CompletionRequest)
    assert made.prompts() == prompts
    assert max(sizes) < 50_000
    assert [called for _, called in trace.calls].count("server/wire/body.py:_breathe") >= len(prompts)


def test_a_large_body_is_served_or_refused_like_a_small_one(guarded: RunningServer) -> None:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}

    def sent(text: str) -> httpx.Response:
        return httpx.post(guarded.url + PATH, content=text + LARGE, headers=headers, timeout=30)

    assert sent(json.dumps(body(7))).is_success
    broken = sent(json.dumps(body(7))[:-1]).json()["error"]
    assert (broken["code"], "JSON decode error" in broken["message"]) == (400, True)
    wrong = sent(json.dumps(body(7, n="many"))).json()["error"]
    assert wrong == httpx.post(guarded.url + PATH, json=body(7, n="many"), headers=headers).json()["error"]
    assert wrong["param"] == "body.sampling_params.n"
    deep = sent("[" * 100_000).json()["error"]
    assert (deep["code"], "JSON decode error" in deep["message"]) == (400, True)
    long = sent(json.dumps({**body(7), "token_ids": [5] * 500_000})).json()["error"]
    assert (long["code"], "list of more than" in long["message"]) == (400, True)


def test_a_body_that_stops_coming_is_told_so(impatient: RunningServer) -> None:
    with connect(impatient) as connection:
        connection.sendall(f"{HEAD}Content-Length: 100\r\n\r\n".encode() + b'{"token_ids": ')
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 408


@pytest.mark.parametrize("start", [b"", b"POST /inf", HEAD.encode()])
def test_headers_that_stop_coming_end_the_connection(impatient: RunningServer, start: bytes) -> None:
    with connect(impatient) as connection:
        connection.sendall(start)
        assert received(connection) == b""


def test_so_do_those_of_a_second_request(impatient: RunningServer) -> None:
    with connect(impatient) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_client_that_leaves_with_requests_in_line_ends_them_all(impatient: RunningServer) -> None:
    request = json.dumps(body(fake_engine.NEVER)).encode()
    data = f"{HEAD}Content-Length: {len(request)}\r\n\r\n".encode() + request
    with connect(impatient) as connection:
        connection.sendall(data + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: impatient.engine.in_flight == 1)
    eventually(lambda: impatient.engine.in_flight == 0)


def test_so_does_one_that_sends_nonsense_in_line(impatient: RunningServer) -> None:
    request = json.dumps({**body(fake_engine.SLOW), "stream": True}).encode()
    data = f"{HEAD}Content-Length: {len(request)}\r\n\r\n".encode() + request
    with connect(impatient) as connection:
        connection.sendall(data)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b"HTTP/1.1 400 " in received(connection)
    eventually(lambda: impatient.engine.in_flight == 0)


def test_an_upgrade_is_not_for_us(impatient: RunningServer) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x" * 22 + "==", "X": "y"}
    assert httpx.get(impatient.url + "/health", headers=headers).status_code == 200


def test_an_answer_may_take_longer_than_that(impatient: RunningServer) -> None:
    answer = httpx.post(impatient.url + PATH, json=body(fake_engine.SLOW), timeout=30)
    assert len(answer.json()["choices"][0]["token_ids"]) == 30


# -- the end


@contextlib.contextmanager
def streamed(url: str, max_tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
    """The choices of a slow stream, of which the first has come: the request is at work."""
    request = {**body(fake_engine.SLOW, max_tokens=max_tokens), "stream": True}
    with httpx.stream("POST", url + PATH, json=request, timeout=30) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {"))
        chunks = (json.loads(line)["choices"][0] for line in lines)
        yield itertools.chain([next(chunks)], chunks)


def test_told_to_stop_it_lets_running_requests_finish(tmp_path: Path) -> None:
    with process(tmp_path, shutdown_timeout=60.0) as (serving, url), streamed(url, 40) as chunks:
        serving.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.post(url + PATH, json=body(7)).status_code == 503)
        assert httpx.get(url + "/health").status_code == 200
        last = list(chunks)[-1]
        assert (last["finish_reason"], last["weight_versions"][-1]["end"]) == ("length", 40)
        assert serving.wait(30) == 0


@pytest.mark.parametrize(("seconds", "signals"), [(0.3, 1), (600.0, 2)])
def test_what_takes_too_long_is_aborted_with_what_it_has(tmp_path: Path, seconds: float, signals: int) -> None:
    with process(tmp_path, shutdown_timeout=seconds) as (serving, url), streamed(url, 2000) as chunks:
        for _ in range(signals):
            serving.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.TransportError):
                eventually(lambda: httpx.post(url + PATH, json=body(7)).status_code == 503)
        choices = list(chunks)
        count = sum(len(choice["token_ids"]) for choice in choices)
        assert choices[-1]["finish_reason"] == "abort"
        assert choices[-1]["weight_versions"][-1]["end"] == count < 2000
        assert serving.wait(30) == 0


# -- what comes from the network is never unpickled

UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNPICKLING_CALLS = {"recv_pyobj", "broadcast_object_list", "all_gather_object", "gather_object", "recv_object_list"}


def unpickling(node: ast.AST) -> bool:
    """Whether this part of a program could read a pickle."""
    if isinstance(node, ast.Import):
        return bool({alias.name.partition(".")[0] for alias in node.names} & UNPICKLERS)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] in UNPICKLERS
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if called == "torch.load":
        return arguments.get("weights_only") != "True"
    if called in ("np.load", "numpy.load"):
        return arguments.get("allow_pickle", "False") != "False"
    return called.rpartition(".")[2] in UNPICKLING_CALLS


def test_nothing_unpickles() -> None:
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]
        for folder in ("rollout", "trainer_bridge")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if unpickling(node)
    ]
    assert found == []
    assert unpickling(ast.parse("import pickle").body[0])
