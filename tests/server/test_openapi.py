"""Requests made from our own OpenAPI document, sent to live servers: nothing falls over, and the document is true."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from transformers import AutoModelForCausalLM

from rollout.config import EngineConfig, ServerConfig
from rollout.fleet.connection import run_engine
from rollout.fleet.fleet import Fleet
from rollout.server.app import create_app
from tests.support import text_server, tiny_models
from tests.support.server_harness import RunningServer, running_server
from tests.support.wait import eventually

FULL = {"enable_scale_out": True, "skip_tokenizer_init": True}
DOCUMENT = create_app(Fleet(EngineConfig()), EngineConfig(enable_sleep_mode=True), ServerConfig(**FULL)).openapi()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]
OPERATIONS.remove(("POST", "/scale_elastic_ep"))  # starts as many processes as it is asked to
OPERATIONS.remove(("POST", "/pull_weights"))  # writes to the folders that it is told
# These change what a server is: they get one of their own.
DISRUPTIVE = [
    (method, path)
    for method, path in OPERATIONS
    if path in ("/pause", "/resume", "/is_paused", "/init_broadcaster", "/get_world_size", "/wake_up")
    or any(part in path for part in ("weight", "memory", "_generation"))
    or "sleep" in path
]
GENERATIVE = [operation for operation in OPERATIONS if operation not in DISRUPTIVE]
PATH = "/inference/v1/generate"
load_all_checks()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose vocabulary is that of a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = text_server.tokenizer()
    config = tiny_models.config("llama")
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 128
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def serve(folder: Path) -> Iterator[RunningServer]:
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "num_threads": 1, "weight_update_timeout_s": 1.0}
    options["enable_sleep_mode"] = True
    config = ServerConfig(served_model_name="smol", enable_scale_out=True, return_sampling_mask=True)
    with running_server(config, model=str(folder), target=run_engine, **options) as running:
        yield running


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    yield from serve(folder)


@pytest.fixture(scope="module")
def disrupted(folder: Path) -> Iterator[RunningServer]:
    yield from serve(folder)


# Where a schema says no more than "a number", most requests would be refused for it: half of them get these instead.
RANGES: dict[str, tuple[float, float]] = {
    "n": (1, 4),
    "temperature": (0.1, 2),
    "top_p": (0.01, 1),
    "top_k": (-1, 50),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.1, 5),
    "seed": (0, 2**40),
    "max_tokens": (5, 40),
    "max_completion_tokens": (5, 40),
    "min_tokens": (0, 5),
    "routed_experts_prompt_start": (0, 0),
    "top_logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "priority": (-5, 5),
}
IDS = {"token_ids", "stop_token_ids", "allowed_token_ids", "logprob_token_ids", "tokens"}
TRANSFERS = {"kv_transfer_params", "ec_transfer_params"}
REFUSED = {"model", "vllm_xargs", "cache_salt", "chat_template", "features", "content_parts"} | TRANSFERS


def tamed(value: Any) -> Any:
    """The same body with numbers in their ranges, and without what is always refused."""
    if isinstance(value, list):
        return [tamed(item) for item in value[:50]]
    if not isinstance(value, dict):
        return value
    body = {key: tamed(item) for key, item in value.items() if key not in REFUSED}
    for key, item in body.items():
        number = isinstance(item, int | float) and not isinstance(item, bool)
        if number and key in RANGES:
            low, high = RANGES[key]
            body[key] = type(item)(min(max(item, low), high))
        elif number and key == "logprobs":
            body[key] = item % 21
        elif isinstance(item, list) and (key in IDS or (key == "prompt" and all(isinstance(i, int) for i in item))):
            body[key] = [i % 256 for i in item if isinstance(i, int)] or [7]
    if "logprob_token_ids" in body:
        body.pop("logprobs", None)
    return body


def attack(server: RunningServer, method: str, path: str, examples: int) -> None:
    """Send so many requests to this operation; then the server is still there, and right."""
    operation = SCHEMA[path][method]
    good, bad = (operation.as_strategy(generation_mode=mode) for mode in GenerationMode)

    @given(case=st.one_of(good, good, bad) if _has_input(method, path) else good, tame=st.booleans())
    @settings(
        max_examples=examples if _has_input(method, path) else 1,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Case, tame: bool) -> None:
        if tame:
            case.body = tamed(case.body)
        response = case.call(base_url=server.url, timeout=300)
        assert response.status_code < 500 or response.status_code == 503, response.text
        case.validate_response(response, checks=CHECKS)

    send()
    assert httpx.get(f"{server.url}/health").status_code == 200
    body = {"token_ids": [70, 71], "sampling_params": {"max_tokens": 3, "temperature": 0}}
    httpx.post(f"{server.url}/wake_up", timeout=300)
    if httpx.get(f"{server.url}/weight_info").json()["weights"] == "invalid":  # it slept at level 2
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["root"]
        httpx.post(f"{server.url}/update_weights", json={"weight_dir": model}, timeout=300)
    httpx.post(f"{server.url}/resume", timeout=300)
    answer = httpx.post(server.url + PATH, json=body, timeout=60).json()
    assert len(answer["choices"][0]["token_ids"]) == 3
    eventually(lambda: server.stats()["free_blocks"] == server.stats()["num_blocks"])
    assert server.engine.in_flight == 0


def _has_input(method: str, path: str) -> bool:
    operation = DOCUMENT["paths"][path][method.lower()]
    return "requestBody" in operation or "parameters" in operation


@pytest.mark.parametrize(("method", "path"), GENERATIVE)
def test_no_request_breaks_the_server(server: RunningServer, method: str, path: str) -> None:
    attack(server, method, path, examples=20)


@pytest.mark.parametrize(("method", "path"), DISRUPTIVE)
def test_nor_do_calls_that_pause_or_update(disrupted: RunningServer, method: str, path: str) -> None:
    attack(disrupted, method, path, examples=10)


@pytest.mark.long
@pytest.mark.parametrize(("method", "path"), GENERATIVE)
def test_no_request_of_thousands_breaks_the_server(server: RunningServer, method: str, path: str) -> None:
    attack(server, method, path, examples=500)


@pytest.mark.long
@pytest.mark.parametrize(("method", "path"), DISRUPTIVE)
def test_nor_do_hundreds_of_calls_that_pause_or_update(disrupted: RunningServer, method: str, path: str) -> None:
    attack(disrupted, method, path, examples=100)


# -- the document is complete


def test_every_answer_has_a_schema() -> None:
    empty = {"/health", "/liveness", "/ping", "/inference/v1/abort_requests", "/init_broadcaster", "/sleep", "/wake_up"}
    empty |= {"/abort_request", "/health_generate", "/release_memory_occupation", "/resume_memory_occupation"}
    for method, path in OPERATIONS:
        responses = DOCUMENT["paths"][path][method.lower()]["responses"]
        assert "422" not in responses
        assert "500" not in responses
        if path not in empty:
            assert all(media["schema"] for media in responses["200"]["content"].values()), path


def test_references_resolve() -> None:
    text = json.dumps(DOCUMENT)
    names = {part.split('"')[0].rstrip("\\") for part in text.split("#/components/schemas/")[1:]}
    assert names <= DOCUMENT["components"]["schemas"].keys()


TEXT_BODY = {"max_tokens": 4, "temperature": 0.5, "stream": True, "return_token_ids": True}
STREAMS = {
    PATH: {"token_ids": [70], "sampling_params": {"max_tokens": 4, "logprobs": 2}, "stream": True},
    "/v1/completions": {"prompt": "ab", "logprobs": 2, **TEXT_BODY},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "logprobs": True, **TEXT_BODY},
    "/v1/messages": {"messages": [{"role": "user", "content": "ab"}], **TEXT_BODY},
}


@pytest.mark.parametrize("path", STREAMS)
def test_events_are_of_the_documented_form(server: RunningServer, path: str) -> None:
    event = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    form = event["properties"]["data"]["anyOf"][1]["contentSchema"]
    validator = jsonschema_rs.Draft202012Validator({**form, "components": DOCUMENT["components"]})
    text = httpx.post(server.url + path, json=STREAMS[path], timeout=60).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert events
    for said in events:
        validator.validate(said)
    assert not validator.is_valid({**events[-1], "choices": 3, "type": 3})
