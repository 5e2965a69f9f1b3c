"""What hostile clients and careless users send to a real engine, and what is left of it: everything, exactly."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from rollout.fleet.connection import run_engine
from rollout.messages import AbortRequests, EngineReady
from rollout.outputs import TokenOutput, mask_ids
from rollout.sampling.params import SamplingParams
from rollout.sampling.rows import RequestFilters, SamplingRow
from rollout.sampling.sampler import Sampler
from rollout.server.admit import check_satisfiable
from rollout.server.errors import ApiError
from rollout.server.limits import prompt_bytes
from rollout.server.text import tokenizer
from rollout.server.text.tokenizer import BackgroundTokenizer
from tests.support import abuse, tiny_models
from tests.support.engine_utils import TOLERANCE, engine, prompt, request, teacher_forced
from tests.support.server_harness import RunningServer, running_server
from tests.support.wait import eventually

PATH = "/inference/v1/generate"
MAX_LEN, MAX_SEQS, VOCAB = 128, 8, 256
ALL_IDS = [str(i) for i in range(VOCAB)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    return tiny_models.build("llama", tmp_path_factory.mktemp("hostile")), tiny_models.model("llama")


@pytest.fixture(scope="module")
def server(model: tuple[Path, PreTrainedModel]) -> Iterator[RunningServer]:
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": MAX_LEN,
        "max_num_seqs": MAX_SEQS,
        "num_gpu_blocks_override": 24,
    }
    with running_server(model=str(model[0]), target=run_engine, num_threads=1, **options) as running:
        yield running


@pytest.fixture
def client(server: RunningServer, model: tuple[Path, PreTrainedModel]) -> Iterator[httpx.Client]:
    """After what the test did, the server answers exactly as transformers does, and holds nothing of it any more."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http
        http.post("/resume")
        ids = prompt(30)
        params = {"max_tokens": 6, "temperature": 0, "logprobs": 0}
        choice = http.post(PATH, json={"token_ids": ids, "sampling_params": params}).json()["choices"][0]
        expected = teacher_forced(model[1], ids, choice["token_ids"]).log_softmax(-1).max(-1)
        assert choice["token_ids"] == expected.indices.tolist()
        reported = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        torch.testing.assert_close(reported, expected.values, atol=TOLERANCE, rtol=0)
        eventually(lambda: idle(server))
        assert server.engine.in_flight == 0


def idle(server: RunningServer) -> bool:
    stats = server.stats()
    return stats["free_blocks"] == stats["num_blocks"] and stats["running"] == stats["waiting"] == 0


EDGES: list[dict[str, Any]] = [
    {"n": MAX_SEQS, "logprobs": 20, "prompt_logprobs": 20, "top_p": 0.9, "min_tokens": 1},
    {"top_p": 1e-9},
    {"top_p": 5e-324, "min_p": 1, "top_k": 2**63 - 1},
    {"temperature": 5e-324, "min_p": 5e-324},
    {"temperature": 2, "repetition_penalty": 5e-324, "presence_penalty": 2, "frequency_penalty": -2},
    {"temperature": 1e-6, "repetition_penalty": 1.7e308, "top_p": 0.9, "min_p": 0.1},
    {"logit_bias": dict.fromkeys(ALL_IDS, -1e308), "logprobs": 20},
    {"logit_bias": dict.fromkeys(ALL_IDS, 1e308), "temperature": 0.01},
    {"allowed_token_ids": [9] * 200, "stop_token_ids": [9], "seed": 2**63 - 1},
    {"stop_token_ids": list(range(VOCAB))},
    {"max_tokens": 10**30, "min_tokens": 1},
]


@pytest.mark.parametrize("params", EDGES, ids=str)
@pytest.mark.parametrize("length", [1, 5, MAX_LEN - 1])
def test_every_edge_of_the_parameters_is_served(client: httpx.Client, params: dict[str, Any], length: int) -> None:
    sent = {"max_tokens": 8, "logprobs": 0, **params}
    answer = client.post(PATH, json={"token_ids": prompt(length), "sampling_params": sent})
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert 1 <= len(choice["token_ids"]) <= MAX_LEN - length
        for token, mask in zip(choice["token_ids"], choice["sampling_mask"] or [], strict=False):
            assert mask is None or token in mask


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_k", "seed", "n", "max_tokens", "logprobs"])
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "9" * 5000, "[[[]]]", '"\\ud800"', "-2"])
def test_numbers_that_are_none_are_refused(client: httpx.Client, name: str, value: str) -> None:
    body = f'{{"token_ids": [5], "sampling_params": {{"{name}": {value}}}}}'
    answer = client.post(PATH, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


EOS = tiny_models.EOS_TOKEN_ID


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [EOS], "min_tokens": 1},
        {"allowed_token_ids": [9, EOS, 9], "stop_token_ids": [9], "min_tokens": 3, "ignore_eos": True},
        {"stop_token_ids": list(range(VOCAB)), "min_tokens": 1},
    ],
    ids=str,
)
def test_filters_that_leave_no_token_are_refused(client: httpx.Client, params: dict[str, Any]) -> None:
    answer = client.post(PATH, json={"token_ids": [5], "sampling_params": {"max_tokens": 4, **params}})
    assert answer.status_code == 400
    assert "No token is left to sample" in answer.json()["error"]["message"]
    params["min_tokens"] = 0
    assert client.post(PATH, json={"token_ids": [5], "sampling_params": {"max_tokens": 4, **params}}).is_success


def test_so_are_bad_words_that_are_all_that_is_allowed() -> None:
    info = EngineReady(
        vocab_size=4, max_model_len=9, max_num_seqs=1, dtype="", device="", model_type="", num_blocks=2, block_size=1,
        seconds={}, eos_token_ids=[3],
    )  # fmt: skip
    for params in (SamplingParams(allowed_token_ids=[0, 1]), SamplingParams(allowed_token_ids=[0, 1, 3], min_tokens=1)):
        check_satisfiable(params, [[0], [0, 1]], info)
        with pytest.raises(ApiError, match="No token is left") as refused:
            check_satisfiable(params, [[0], [1]], info)
        assert refused.value.param == "allowed_token_ids"


HEADERS = [
    "X-Request-Id",
    "X-data-parallel-rank",
    "Authorization",
    "X-API-Key",
    "Content-Type",
    "Content-Length",
    "Transfer-Encoding",
    "Host",
    "Origin",
    "Sec-Fetch-Site",
    "Accept",
    "Accept-Encoding",
    "Connection",
    "Expect",
    "Upgrade",
    "Cookie",
]
VALUES = rb"""
    -1 8 1_0 %00 chunked [::1 http://[ 100-continue application/json;charset=x multipart/form-data;boundary=
""".split()
VALUES += [b"", b"9" * 400, b"\xff\xfe", b"\xc2\xb2", b"Bearer \xff", b"x" * 8000]
OTHERS = ["/v1/completions", "/abort_requests", "/scale_elastic_ep", "/reset_prefix_cache"]
QUERIES = [
    r"/pause?mode=",
    r"/pause?mode=%ff",
    r"/pause?mode=%00",
    r"/pause?mode=keep%0d",
    r"/pause?mode=x&mode=y",
    r"/pause?%",
    r"/scale_elastic_ep?new_data_parallel_size=2",
    r"/get_world_size?include_dp=",
    r"/get_world_size?include_dp=%ed%a0%80",
    r"/server_info?config_format=%ff",
    r"/abort_requests?request_ids=%",
    r"/%ff%fe",
    r"//",
    r"/..%2f..%2fetc",
    r"/v1/models/%00",
    r"*",
    r"http://evil.example/pause?mode=",
    r"/openapi.json?%zz",
]
QUERIES += ["/docs?" + "a=b&" * 2000, "/metrics?\xff"]


def raw_status(server: RunningServer, head: bytes, body: bytes = b"") -> int | None:
    """The status of the answer to a request that is sent as it is; None where the connection is closed without one."""
    with socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0), timeout=60) as connection:
        connection.sendall(head + b"\r\n\r\n" + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(answer.split()[1]) if answer else None


@pytest.mark.parametrize("name", HEADERS)
def test_values_of_headers_stopped_the_server(server: RunningServer, client: httpx.Client, name: str) -> None:
    choose = random.Random(name)
    allowed = [*range(32, 127), *range(128, 256)]
    values = [*VALUES, *(bytes(choose.choices(allowed, k=choose.choice([1, 4, 40]))) for _ in range(15))]
    content = b'{"token_ids": [5], "prompt": [5], "sampling_params": {"max_tokens": 1}, "max_tokens": 1}'
    headers = {"Host": b"localhost", "Content-Type": b"application/json", "Content-Length": b"%d" % len(content)}
    for value in values:
        lines = [b"%s: %s" % (key.encode(), each) for key, each in {**headers, name: value}.items()]
        for target in (PATH, choose.choice(OTHERS)):
            head = b"\r\n".join([f"POST {target} HTTP/1.1".encode(), b"Connection: close", *lines])
            status = raw_status(server, head, content)
            assert status is None or status < 500, (target, value, status)


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "OPTIONS", "DELETE"])
def test_values_of_paths_and_queries_stopped_the_server(
    server: RunningServer, client: httpx.Client, method: str
) -> None:
    for target in QUERIES:
        head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0"
        status = raw_status(server, head.encode("latin-1"))
        assert status is None or status < 500, (target, status)


def test_an_endless_body_is_cut_off(server: RunningServer, client: httpx.Client) -> None:
    sent, limit = 0, prompt_bytes(server.engine.info)

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 16 * limit:
            sent += 1 << 20
            yield b" " * (1 << 20)

    try:
        answer = client.post(PATH, content=endless(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert str(limit) in answer.json()["error"]["message"]
    except httpx.WriteError:
        pass  # the answer came, and the connection went, while it was still being sent
    just_fits = b'{"token_ids": [5], "sampling_params": {"max_tokens": 1}}'.ljust(1 << 20)
    assert client.post(PATH, content=just_fits, headers={"Content-Type": "application/json"}).is_success


def test_clients_that_leave_anywhere_leave_nothing(server: RunningServer, client: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: abuse.leave_somewhere(server.url, seed, VOCAB, MAX_LEN, MAX_SEQS), range(120)))


def test_pauses_and_aborts_race_with_streams(server: RunningServer, client: httpx.Client) -> None:
    """Every stream that began ends with [DONE], every choice with one reason and spans that tile its tokens."""
    over = threading.Event()

    def disturb(seed: int) -> None:
        choose = random.Random(seed)
        with httpx.Client(base_url=server.url, timeout=60) as http:
            while not over.wait(choose.random() / 20):
                http.post(choose.choice(["/pause?mode=keep", "/pause?mode=abort", "/resume", "/resume"]))
                http.post(choose.choice(["/abort_requests", "/reset_prefix_cache"]), json={})

    def ask(seed: int) -> None:
        params = {"n": 3, "max_tokens": 12, "min_tokens": 12, "prompt_logprobs": 0}
        body = {"token_ids": prompt(20, seed), "sampling_params": params, "stream": True}
        with client.stream("POST", PATH, json=body, headers={"X-Request-Id": "same"}) as response:
            if response.status_code == 503:
                return
            *events, done = [line[6:] for line in response.iter_lines() if line]
        assert done == "[DONE]"
        lengths, ended = [0, 0, 0], set()
        for event in events:
            (choice,) = json.loads(event)["choices"]
            index = choice["index"]
            lengths[index] += len(choice["token_ids"])
            if choice["finish_reason"]:
                assert index not in ended
                ended.add(index)
                assert [s["end"] for s in choice["weight_versions"]][-1:] == [lengths[index]][: bool(lengths[index])]
        assert ended == {0, 1, 2}

    with ThreadPoolExecutor(10) as pool:
        disturbing = [pool.submit(disturb, seed) for seed in range(2)]
        try:
            list(pool.map(ask, range(40)))
        finally:
            over.set()
        for task in disturbing:
            task.result()


def test_prompt_logprobs_survive_the_abort_of_the_first_choice(model: tuple[Path, PreTrainedModel]) -> None:
    serving = engine(model[0], max_num_batched_tokens=16)
    item = request("asks", prompt(40), n=3, prompt_logprobs=0)
    serving.add_request(item)
    assert serving.step() == []  # a chunk of the prompt
    outputs: list[TokenOutput] = serving.abort(AbortRequests(["asks"], index=0))
    while serving.has_work:
        outputs += serving.step()
    (told,) = [output for output in outputs if output.prompt_logprobs]
    assert told.index == 1
    tokens = item.prompt_token_ids
    expected = teacher_forced(model[1], tokens[:1], tokens[1:]).log_softmax(-1)
    reported = [entries[0].logprob for entries in (told.prompt_logprobs or [])[1:] if entries]
    torch.testing.assert_close(torch.tensor(reported), expected[range(39), tokens[1:]], atol=TOLERANCE, rtol=0)


def test_wide_masks_cost_four_bytes_a_token() -> None:
    rows, vocab = 48, 49152
    logits = torch.zeros(rows, vocab)
    params = SamplingParams(min_tokens=1)
    filters = RequestFilters(params, [5], eos_token_ids=[2], want_mask=True)
    asked = [SamplingRow(filters, seed, 0) for seed in range(rows)]
    tracemalloc.start()  # knows Python's and NumPy's memory, not torch's
    try:
        sampled = Sampler().sample(logits, asked)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(mask_ids(s.sampling_mask or b"").tolist() == [i for i in range(vocab) if i != 2] for s in sampled[-2:])
    assert peak < 1.5 * 4 * rows * vocab


def test_the_end_of_the_loop_does_not_wait_for_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda model: release.wait(60))

    async def serve() -> None:
        loading = BackgroundTokenizer("model", enabled=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loading.get(), 0.01)

    ending = threading.Thread(target=lambda: asyncio.run(serve()))
    ending.start()
    ending.join(20)
    waits = ending.is_alive()
    release.set()
    ending.join(20)
    assert not waits
