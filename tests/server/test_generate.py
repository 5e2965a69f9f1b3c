"""`/inference/v1/generate` over HTTP, against recorded answers of a vLLM server and a fake engine."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.config import ServerConfig
from rollout.sampling.params import SamplingParams
from rollout.server.wire.tokens import GenerateRequest
from tests.support import fake_engine
from tests.support.server_harness import RunningServer, running_server

PATH = "/inference/v1/generate"
EXAMPLES = json.loads((Path(__file__).parents[1] / "data" / "wire_examples.json").read_text())
OURS = ("epoch", "kv")  # keys of a span that a vLLM server lacks


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def post(client: httpx.Client, token_ids: list[int], params: dict[str, Any] | None = None, **more: Any) -> Any:
    body = {"token_ids": token_ids, "sampling_params": {"max_tokens": 4, **(params or {})}, **more}
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(client: httpx.Client, body: dict[str, Any]) -> list[Any]:
    response = client.post(PATH, json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def send_recorded(client: httpx.Client, request: dict[str, Any]) -> httpx.Response:
    return client.request(
        request["method"],
        request["path"],
        headers=request.get("headers"),
        json=request.get("json"),
        content=request.get("data"),
    )


def recorded(path: str, ok: bool) -> list[str]:
    """Names of the recorded cases of this path that need no tokenizer: this server has none."""

    def textless(request: dict[str, Any]) -> bool:
        body = request.get("json") or {}
        params = body.get("sampling_params", {})
        return body.get("output_mode") != "text" and "bad_words" not in params and (not ok or "stop" not in params)

    return [
        name
        for name, case in EXAMPLES.items()
        if case["request"]["path"] == path and (case["status"] == 200) == ok and textless(case["request"])
    ]


def shape(value: Any, path: str = "") -> Any:
    """The keys of an answer in order, what is null in it, and the form of everything else."""
    if isinstance(value, dict) and not path.endswith("prompt_logprobs"):
        return {key: shape(item, f"{path}.{key}") for key, item in value.items() if key not in OURS}
    if isinstance(value, list):
        return [json.loads(form) for form in dict.fromkeys(json.dumps(shape(item, path)) for item in value)]
    return None if value is None else type(value).__name__


@pytest.mark.parametrize("name", recorded(PATH, ok=False) + recorded("/inference/v1/abort_requests", ok=False))
def test_refusals_are_the_recorded_ones_to_the_letter(client: httpx.Client, name: str) -> None:
    case = EXAMPLES[name]
    response = send_recorded(client, case["request"])
    assert (response.status_code, response.json()) == (case["status"], case["body"])


@pytest.mark.parametrize("name", [n for n in recorded(PATH, ok=True) if not n.startswith("stream")])
def test_answers_have_the_recorded_shape(client: httpx.Client, name: str) -> None:
    case = EXAMPLES[name]
    answer, expected = send_recorded(client, case["request"]).json(), case["body"]
    # stop_reason depends on what was sampled; everything else on the request alone
    for body in (answer, expected):
        body["choices"][0]["stop_reason"] = None
    assert json.dumps(shape(answer)) == json.dumps(shape(expected))
    assert answer["request_id"].startswith("generate-tokens-")
    if "id" in name:
        assert answer["request_id"] == expected["request_id"] or name == "ret_ids"
        assert answer["prompt_token_ids"] == expected["prompt_token_ids"]


@pytest.mark.parametrize("name", [n for n in recorded(PATH, ok=True) if n.startswith("stream")])
def test_streams_have_the_recorded_shape(client: httpx.Client, name: str) -> None:
    case = EXAMPLES[name]
    ours, theirs = events(client, case["request"]["json"]), case["body"][:-1]
    if (case["request"]["json"].get("stream_options") or {}).get("include_usage"):
        totals = ours.pop()
        assert list(totals) == list(theirs.pop())
        assert totals["usage"] == {"prompt_tokens": 16, "total_tokens": 32, "completion_tokens": 16}
        assert totals["choices"] == []
    first, *middle, last = ours
    theirs[-1]["choices"][0]["finish_reason"] = "length"
    assert json.dumps(shape(first)) == json.dumps(shape(theirs[0]))
    assert {json.dumps(shape(chunk)) for chunk in middle} == {json.dumps(shape(theirs[1]))}
    assert json.dumps(shape(last)) == json.dumps(shape(theirs[-1]))
    assert [t for chunk in ours for c in chunk["choices"] for t in c["token_ids"]] == list(range(199, 215))
    if name == "stream_cont":
        lengths = itertools.accumulate(len(chunk["choices"][0]["token_ids"]) for chunk in ours)
        assert [chunk["usage"]["completion_tokens"] for chunk in ours] == list(lengths)


def test_tokens_usage_and_finish_of_several_choices(client: httpx.Client) -> None:
    answer = post(client, [7, 20], {"n": 3, "stop_token_ids": [33]})
    assert [(c["index"], c["token_ids"]) for c in answer["choices"]] == [
        (0, [21, 22, 23, 24]),
        (1, [31, 32, 33]),
        (2, [41, 42, 43, 44]),
    ]
    assert [(c["finish_reason"], c["stop_reason"]) for c in answer["choices"]] == [
        ("length", None),
        ("stop", 33),
        ("length", None),
    ]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 11, 13)


def test_a_streamed_group_is_the_whole_in_pieces(client: httpx.Client) -> None:
    params = {"n": 3, "max_tokens": 5, "logprobs": 2}
    whole = post(client, [fake_engine.RELABEL, 20], params)
    pieces: dict[int, list[Any]] = {}
    for event in events(client, {"token_ids": [fake_engine.RELABEL, 20], "sampling_params": params}):
        for choice in event["choices"]:
            pieces.setdefault(choice["index"], []).append(choice)
    for choice in whole["choices"]:
        parts = pieces[choice["index"]]
        assert [t for p in parts for t in p["token_ids"]] == choice["token_ids"]
        assert [e for p in parts for e in p["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert parts[-1]["weight_versions"] == choice["weight_versions"]


def test_spans_break_at_label_epoch_and_cache_state(client: httpx.Client) -> None:
    (choice,) = post(client, [fake_engine.RELABEL, 20], {"max_tokens": 6})["choices"]
    assert choice["weight_versions"] == [
        {"version": "v7", "start": 0, "end": 2, "epoch": 0, "kv": "current"},
        {"version": "v8", "start": 2, "end": 3, "epoch": 1, "kv": "current"},
        {"version": "v8", "start": 3, "end": 6, "epoch": 1, "kv": "mixed"},
    ]


def test_the_mask_is_null_where_nothing_was_filtered(client: httpx.Client) -> None:
    assert post(client, [7, 20])["choices"][0]["sampling_mask"] is None
    masked = post(client, [fake_engine.MASKED, 20])["choices"][0]["sampling_mask"]
    assert masked == [None, [5, 22], None, [5, 24]]


@pytest.mark.parametrize(("k", "expected"), [(0, [[3], [4]]), (5, [[3, 0, 1, 2, 4], [4, 0, 1, 2, 3]])])
def test_top_logprobs_name_the_sampled_token_first_and_once(
    client: httpx.Client, k: int, expected: list[list[int]]
) -> None:
    (choice,) = post(client, [7, 2], {"max_tokens": 2, "logprobs": k})["choices"]
    content = choice["logprobs"]["content"]
    assert [[top["token_id"] for top in entry["top_logprobs"]] for entry in content] == expected
    assert all({**entry["top_logprobs"][0], "top_logprobs": entry["top_logprobs"]} == entry for entry in content)


def test_logprobs_that_json_cannot_say(client: httpx.Client) -> None:
    (choice,) = post(client, [fake_engine.UNSENDABLE, 2], {"max_tokens": 2, "logprobs": 0})["choices"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-9999.0, -9999.0]


def test_prompt_logprobs_without_a_tokenizer(client: httpx.Client) -> None:
    expected = [
        None,
        {
            "20": {"logprob": -1.0, "rank": 7, "decoded_token": None},
            "3": {"logprob": -0.5, "rank": 1, "decoded_token": None},
        },
    ]
    body = {"token_ids": [7, 20], "sampling_params": {"max_tokens": 2, "prompt_logprobs": 1}}
    assert client.post(PATH, json=body).json()["prompt_logprobs"] == expected
    first, *rest = events(client, body)
    assert first["prompt_logprobs"] == expected
    assert all("prompt_logprobs" not in chunk for chunk in rest)


def test_what_the_engine_is_asked(server: RunningServer, client: httpx.Client) -> None:
    post(client, [7] * 2000, {"max_tokens": 10**40, "min_tokens": 5, "top_k": 10**40}, priority=-3, cache_salt="s")
    asked = server.stats()["added"][-1]
    params = asked["sampling_params"]
    assert (params["max_tokens"], params["min_tokens"], params["top_k"]) == (48, 5, fake_engine.VOCAB_SIZE)
    assert (asked["priority"], asked["cache_salt"], asked["return_sampling_mask"]) == (-3, "s", True)
    client.post(PATH, json={"token_ids": [7] * 2000, "sampling_params": {"temperature": None, "stop": None, "seed": 5}})
    params = server.stats()["added"][-1]["sampling_params"]
    assert (params["max_tokens"], params["temperature"], params["stop"], params["seed"]) == (48, 1.0, [], 5)


@pytest.mark.parametrize(
    ("params", "more", "param"),
    [
        ({"stop": "x"}, {}, "stop"),
        ({"stop": ["x", "y"]}, {}, "stop"),
        ({"bad_words": ["x"]}, {}, "bad_words"),
        ({"n": 9}, {}, "n"),
        ({"logprobs": -1}, {}, "logprobs"),
        ({"prompt_logprobs": -2}, {}, "prompt_logprobs"),
        ({"temperature": "hot"}, {}, "body.sampling_params.temperature"),
        ({"seed": 10**400}, {}, "seed"),
        ({"logit_bias": {"x": 1}}, {}, "body.sampling_params.logit_bias.x.[key]"),
        ({"stop_token_ids": [10**400]}, {}, "stop_token_ids"),
        ({}, {"output_mode": "text"}, "output_mode"),
        ({}, {"features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": []}}}, "features"),
        ({}, {"features": {}}, "body.features.mm_hashes"),
        (
            {},
            {"features": {"mm_hashes": {}, "mm_placeholders": {"image": [{"offset": 0, "length": 0}]}}},
            "body.features.mm_placeholders.image.0.length",
        ),
        ({}, {"content_parts": [{"type": "image_url", "url": "x"}]}, "content_parts"),
        ({}, {"content_parts": {}}, "body.content_parts"),
        ({}, {"ec_transfer_params": {}}, "ec_transfer_params"),
        ({}, {"kv_transfer_params": []}, "kv_transfer_params"),
        ({}, {"kv_transfer_params": {}}, "kv_transfer_params"),
        ({}, {"priority": 2**63}, "body.priority"),
        ({}, {"token_ids": [1.5]}, "body.token_ids.0"),
        ({}, {"token_ids": None}, "body.token_ids"),
        ({}, {"sampling_params": [1]}, "body.sampling_params"),
    ],
)
def test_refusals_name_the_field(client: httpx.Client, params: Any, more: dict[str, Any], param: str) -> None:
    response = client.post(PATH, json={"token_ids": [1], "sampling_params": params, **more})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, 400, param), error


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"token_ids": [1], "sampling_params": {"temperature": NaN}}',
        b'{"token_ids": [1], "sampling_params": {"repetition_penalty": Infinity}}',
        b'{"token_ids": [1], "sampling_params": {"top_p": -Infinity}}',
        b'{"token_ids": [1], "sampling_params": {"seed": 1' + b"0" * 5000 + b"}}",
        b'{"token_ids": [1], "sampling_params": {}, "request_id": "\\ud800"}',
        b'{"token_ids": [1], "sampling_params": {}, "model": "\\ud800"}',
        b'{"token_ids": [1], "sampling_params": {"\\ud800": 1, "n": "\\ud800"}}',
        b'{"token_ids": [1], "sampling_params": {"bad_words": ["\\ud800"]}}',
        b'{"token_ids": [1], "sampling_params": {}, "cache_salt": "\\ud800"}',
    ],
)
def test_hostile_bodies_are_a_400(client: httpx.Client, content: bytes) -> None:
    response = client.post(PATH, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NUMBERS = st.integers(-2, 30) | st.floats(0, 1) | st.lists(st.integers(-1, 60_000), max_size=3)
PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([1, 3, 0, None, 10**30, 1.0, "2"])},
    optional={field.name: NUMBERS | JSON for field in dataclasses.fields(SamplingParams) if field.name != "max_tokens"},
)
OPTIONAL = {*GenerateRequest.model_fields, "unknown"} - {"token_ids", "sampling_params"}
BODY = st.fixed_dictionaries({"token_ids": st.lists(st.integers(0, 900), min_size=1, max_size=4)}).flatmap(
    lambda body: st.one_of(  # one part at a time is random: a body that is wrong everywhere tests its first check only
        st.fixed_dictionaries({"sampling_params": PARAMS}).map(lambda random: body | random),
        st.fixed_dictionaries({"sampling_params": JSON}).map(lambda random: body | random),
        st.fixed_dictionaries({"token_ids": JSON}).map(
            lambda random: body | {"sampling_params": {"max_tokens": 3}} | random
        ),
        st.fixed_dictionaries({}, optional=dict.fromkeys(OPTIONAL, st.none() | st.booleans() | JSON)).map(
            lambda random: body | {"sampling_params": {"max_tokens": 3}} | random
        ),
    )
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=BODY)
def test_any_body_gets_an_answer_or_a_4xx(client: httpx.Client, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()  # with NaN and Infinity, as a careless client sends them
    response = client.post(PATH, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 200 or 400 <= response.status_code < 500, (response.status_code, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == response.status_code
    elif not response.headers["content-type"].startswith("text/event-stream"):
        assert all(math.isfinite(c["index"]) and c["finish_reason"] for c in response.json()["choices"])
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("path", [PATH, "/inference/v1/abort_requests"])
def test_without_the_flag_scale_out_is_403(path: str) -> None:
    with running_server(ServerConfig()) as server:
        response = httpx.post(server.url + path, json={})
        assert response.status_code == 403
        assert response.json()["error"]["message"].startswith("Scale-out endpoints are disabled.")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of four words and what a space makes of two of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"a": 0, "b": 1, "Ġa": 2, "c": 3, "d": 4, "Ġ": 5, "[UNK]": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a")], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return str(folder)


def test_with_a_tokenizer(tokenizer_folder: str) -> None:
    config = ServerConfig(served_model_name="smol", enable_scale_out=True)
    with (
        running_server(config, model=tokenizer_folder) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        params = {"max_tokens": 1, "prompt_logprobs": 1, "bad_words": ["a", " b", "cd"]}
        answer = http.post(PATH, json={"token_ids": [7, 0], "sampling_params": params}).json()
        assert [e["decoded_token"] for e in answer["prompt_logprobs"][1].values()] == ["a", "c"]
        # "a" also as " a", one token of its own; " b" ends with the token of "b", which is banned anyway; "cd" likewise
        assert server.stats()["added"][-1]["bad_words_token_ids"] == [[0], [2], [1], [3, 4]]


SHORT = {"token_ids": [5], "sampling_params": {"max_tokens": 2}}


@pytest.mark.parametrize("rank", ["-1", "1", "-9999999999999999999999", "9" * 4000])
def test_a_rank_below_zero_was_a_500_and_a_cut_connection(client: httpx.Client, rank: str) -> None:
    answer = client.post(PATH, json=SHORT, headers={"X-data-parallel-rank": rank})
    assert answer.status_code == 400, answer.text
    assert "is out of range [0, 1)" in answer.json()["error"]["message"]
    assert client.post(PATH, json=SHORT).status_code == 200
