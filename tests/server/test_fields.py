"""Every field that vLLM's request models have is served, refused by name or said to have no effect, in each dialect.

The names are vLLM 0.33's own, taken from its source (`how` in the file says by what).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout.sampling.params import SamplingParams
from rollout.server.absent import ABSENT
from rollout.server.wire.anthropic import MessagesRequest
from rollout.server.wire.body import GenerationBody
from rollout.server.wire.chat import ChatCompletionRequest
from rollout.server.wire.completions import CompletionRequest
from rollout.server.wire.fields import NO_EFFECT, REFUSED
from rollout.server.wire.sglang import SGLangRequest, SGLangSampling
from rollout.server.wire.sglang_fields import NO_EFFECT as SGLANG_NO_EFFECT
from rollout.server.wire.sglang_fields import OF_VLLM
from rollout.server.wire.sglang_fields import REFUSED as SGLANG_REFUSED
from rollout.server.wire.tokens import GenerateRequest
from tests.support.server_harness import RunningServer
from tests.support.text_server import events, ok, refusal

DATA = Path(__file__).parents[1] / "data"
NAMES: dict[str, Any] = json.loads((DATA / "vllm_names.json").read_text())
# What SGLang itself writes into its parameters, of those that a client sends.
SGLANG_INTERNAL = {"is_normalized", "ebnf_full_assistant", "stop_strs", "stop_str_max_len"}
SGLANG_INTERNAL |= {"stop_regex_strs", "stop_regex_max_len"}
MODELS: dict[str, list[str]] = NAMES["models"]
PATHS: list[str] = NAMES["paths"]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
PROMPT: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
IDS: dict[str, Any] = {"token_ids": [97], "sampling_params": {"max_tokens": 2}}
DIALECTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", PROMPT),
    ("/v1/messages", CHAT),
    ("/inference/v1/generate", IDS),
]
BODIES: list[tuple[str, type[GenerationBody]]] = [
    ("ChatCompletionRequest", ChatCompletionRequest),
    ("CompletionRequest", CompletionRequest),
    ("AnthropicMessagesRequest", MessagesRequest),
    ("GenerateRequest", GenerateRequest),
]


@pytest.mark.parametrize(("theirs", "ours"), BODIES, ids=lambda value: str(value))
def test_every_field_of_vllms_is_decided(theirs: str, ours: type[GenerationBody]) -> None:
    decided = ours.model_fields.keys() | REFUSED.keys() | NO_EFFECT.keys()
    assert [name for name in MODELS[theirs] if name not in decided] == []


def test_so_is_every_sampling_parameter() -> None:
    decided = {field.name for field in dataclasses.fields(SamplingParams)} | REFUSED.keys() | NO_EFFECT.keys()
    assert [name for name in MODELS["SamplingParams"] if name not in decided] == []


def test_no_field_is_decided_twice() -> None:
    assert REFUSED.keys() & NO_EFFECT.keys() == set()
    served = {*SGLangRequest.model_fields, *(f"sampling_params.{name}" for name in SGLangSampling.model_fields)}
    assert len(served | SGLANG_REFUSED.keys() | SGLANG_NO_EFFECT.keys()) == sum(
        map(len, (served, SGLANG_REFUSED, SGLANG_NO_EFFECT))
    )


def test_every_field_of_sglangs_is_decided() -> None:
    theirs = json.loads((DATA / "peer_names.json").read_text())["sglang"]
    decided = SGLangRequest.model_fields.keys() | SGLANG_REFUSED.keys() | SGLANG_NO_EFFECT.keys()
    assert [name for name in theirs["GenerateReqInput"] if name not in decided] == []
    inner = {name.partition(".")[2] for name in decided} | SGLangSampling.model_fields.keys()
    assert [name for name in theirs["SamplingParams"] if name not in inner | SGLANG_INTERNAL] == []


@pytest.mark.parametrize(("path", "body"), DIALECTS, ids=[path for path, _ in DIALECTS])
def test_what_would_change_the_answer_is_refused_by_name(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    served = dict(zip([path for path, _ in DIALECTS], [ours for _, ours in BODIES], strict=True))[path].model_fields
    for name, (why, harmless) in REFUSED.items():
        if name not in served:
            for value in harmless:
                assert ok(client.post(path, json=body | {name: value}))["usage"], name
            status, param, message = refusal(client.post(path, json=body | {name: {"no": "harmless value"}}))
            assert (status, param) == (400, name)
            assert why in message
    passing = ok(client.post(path, json=body | dict.fromkeys(NO_EFFECT.keys() - served.keys(), "x")))
    assert passing["usage"]


def test_within_sampling_params_too(client: httpx.Client) -> None:
    path = "/inference/v1/generate"
    for name in REFUSED.keys() - {"structured_outputs", "routed_experts_prompt_start"}:  # which are served there
        params = {"max_tokens": 2, name: {"no": "harmless value"}}
        status, param, _ = refusal(client.post(path, json={"token_ids": [97], "sampling_params": params}))
        assert (status, param) == (400, f"sampling_params.{name}")
    quiet = dict.fromkeys(NO_EFFECT, 1)
    answer = client.post(path, json={"token_ids": [97], "sampling_params": {"max_tokens": 2, "new": 1, **quiet}})
    assert ok(answer)["choices"][0]["token_ids"] == [98, 99]
    assert answer.headers["x-ignored-parameters"] == "sampling_params.new"


ASKED: dict[str, Any] = {
    "structured_outputs": {"choice": ["a"]},
    "routed_experts_prompt_start": 1,
    "prompt_logprob_token_ids": [5],
    "prompt_logprob_start": 1,
    "output_config": {"effort": "low"},
    "thinking_token_budget": 9,
    "repetition_detection": {"max_pattern_size": 3},
    "vllm_xargs": {"scale": 2},
    "logits_processors": ["p"],
    "regex": "a+",
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": "start: A",
    "guided_whitespace_pattern": " ",
    "guided_decoding_backend": "xgrammar",
    "return_prompt_text": True,
    "return_token_offsets": True,
    "session_id": "s",
}
SERVED: dict[str, list[int]] = {  # by which of the dialects below
    "routed_experts_prompt_start": [0, 1, 2],
    "output_config": [2],
    "return_prompt_text": [0],
    "session_id": [0, 1, 2, 3, 4],
    "guided_decoding_backend": [0, 1, 2, 3],  # has no effect
}
FLAT = [*DIALECTS, ("/generate", {"input_ids": [97], "sampling_params": {"max_new_tokens": 2}})]


@pytest.mark.parametrize("name", ASKED)
def test_what_was_once_dropped_silently_is_served_or_named(client: httpx.Client, name: str) -> None:
    for place, (path, body) in enumerate(FLAT):
        answer = client.post(path, json=body | {name: ASKED[name]})
        if place in SERVED.get(name, []):
            assert answer.status_code == 200, (path, answer.text)
            assert "x-ignored-parameters" not in answer.headers, path
        elif answer.status_code == 200:
            assert name in answer.headers["x-ignored-parameters"], path
            assert name.startswith("return_") or (name, path) == ("guided_decoding_backend", "/generate"), path
        else:
            assert refusal(answer)[:2] == (400, name), path


def test_vllms_fields_were_dropped_from_generate_of_sglang(client: httpx.Client) -> None:
    path, body = FLAT[4]
    inner: dict[str, Any] = body["sampling_params"]
    for name, (why, harmless) in OF_VLLM.items():
        places = {name: body | {name: (value := {"no": "harmless value"})}}
        places[f"sampling_params.{name}"] = body | {"sampling_params": inner | {name: value}}
        for param, sent in places.items():
            if param == name or (name not in SGLangSampling.model_fields and param not in SGLANG_REFUSED):
                status, told, message = refusal(client.post(path, json=sent))
                assert (status, told) == (400, param)
                assert why in message
        for value in (None, *harmless):
            assert ok(client.post(path, json=body | {name: value}))["output_ids"] == [98, 99], name


def test_every_sampling_parameter_of_vllms_is_decided_within_sglangs() -> None:
    decided = SGLangSampling.model_fields.keys() | OF_VLLM.keys() | NO_EFFECT.keys() | {"detokenize"}
    assert [name for name in MODELS["SamplingParams"] if name not in decided] == []


@pytest.mark.parametrize(("path", "body"), FLAT, ids=[path for path, _ in FLAT])
def test_a_session_is_known_by_body_header_or_extension(
    server: RunningServer, client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    def session(fields: dict[str, Any], headers: dict[str, str]) -> str | None:
        answer = client.post(path, json=body | fields, headers=headers)
        assert answer.status_code == 200, answer.text
        assert "x-ignored-parameters" not in answer.headers
        return server.stats()["added"][-1]["session_id"]

    assert session({}, {}) is None
    assert session({"session_id": ""}, {}) is None
    assert session({"session_id": "mine"}, {"X-Session-ID": "header's"}) == "mine"
    assert session({}, {"X-Session-ID": "header's"}) == "header's"
    assert session({"vllm_xargs": {"session_id": "extension's"}}, {}) == "extension's"
    for other in ({"session_id": 7}, {"session_id": "a", "x": 1}):
        assert refusal(client.post(path, json=body | {"vllm_xargs": other}))[:2] == (400, "vllm_xargs")


@pytest.mark.parametrize(("path", "body"), DIALECTS[:3], ids=[path for path, _ in DIALECTS[:3]])
def test_numbers_at_their_edges(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    assert ok(client.post(path, json=body | {"seed": -1}))["usage"]
    assert refusal(client.post(path, json=body | {"seed": -2}))[:2] == (400, "seed")
    status, param, message = refusal(client.post(path, json=body | {"max_tokens": 3000, "min_tokens": 2048}))
    assert (status, param) == (400, "min_tokens")
    assert "got 2048" in message
    status, param, message = refusal(client.post(path, json=body | {"routed_experts_prompt_start": 99}))
    assert (status, param) == (400, "routed_experts_prompt_start")


@pytest.mark.parametrize("prompt", [None, 5, {}, [[5, "a"]], ["a", 5], [-1], [[]], True], ids=str)
def test_a_wrong_prompt_printed_internals(client: httpx.Client, prompt: Any) -> None:
    status, param, message = refusal(client.post("/v1/completions", json={"prompt": prompt}))
    assert status == 400
    assert param is not None
    assert param.endswith("prompt")
    for internal in ("function-", "list[", "encodable", "nullable"):
        assert internal not in message + param


def test_completions_name_as_many_logprobs_as_ids(client: httpx.Client) -> None:
    body = {**PROMPT, "logprobs": 1, "logprob_token_ids": [65, 66, 67]}
    (choice,) = ok(client.post("/v1/completions", json=body))["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [4, 4]


def test_render_tells_where_each_token_is_in_its_text(client: httpx.Client) -> None:
    (plain,) = ok(client.post("/v1/completions/render", json={"prompt": "añb", "return_token_offsets": True}))
    assert len(plain["token_offsets"]) == len(plain["token_ids"]) == 4
    assert ["añb"[start:end] for start, end in plain["token_offsets"]] == ["a", "ñ", "ñ", "b"]
    assert client.post("/inference/v1/generate", json=plain).headers.get("x-ignored-parameters") is None
    (silent,) = ok(client.post("/v1/completions/render", json={"prompt": [97], "return_token_offsets": True}))
    assert silent["token_offsets"] is None
    chat = ok(client.post("/v1/chat/completions/render", json={**CHAT, "return_token_offsets": True}))
    assert len(chat["token_offsets"]) == len(chat["token_ids"])


def test_a_chat_tells_its_prompts_text_and_echoes_its_last_message(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so"}]
    body = {"messages": messages, "max_tokens": 2, "echo": True, "return_prompt_text": True}
    body |= {"add_generation_prompt": False, "continue_final_message": True}
    plain = ok(client.post("/v1/chat/completions", json=body))
    assert plain["prompt_text"].endswith("[assistant]so")
    silent = ok(client.post("/v1/chat/completions", json=body | {"echo": False, "return_prompt_text": False}))
    assert silent["prompt_text"] is None
    text = silent["choices"][0]["message"]["content"]
    assert plain["choices"][0]["message"]["content"] == "so" + text
    chunks = events(client.post("/v1/chat/completions", json=body | {"stream": True}))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "so" + text
    assert chunks[0]["prompt_text"] == plain["prompt_text"]


def test_anthropics_counting_of_tokens(client: httpx.Client) -> None:
    body = {"model": "smol", "system": "s", "messages": [{"role": "user", "content": "a question"}]}
    counted = ok(client.post("/v1/messages/count_tokens", json=body))
    answered = ok(client.post("/v1/messages", json={**body, "max_tokens": 1}))
    assert counted == {"input_tokens": answered["usage"]["input_tokens"]}
    assert refusal(client.post("/v1/messages/count_tokens", json=body | {"model": "other"}))[0] == 404


def test_every_path_of_vllms_is_served_or_says_what_to_use(server: RunningServer, client: httpx.Client) -> None:
    there = set(client.get("/openapi.json").json()["paths"]) | {"/docs"}
    assert there & ABSENT.keys() == set()
    assert [path for path in PATHS if path not in there and path not in ABSENT] == []
    for path, why in ABSENT.items():
        asked = path.replace("{response_id}", "resp_1")
        for method in ("GET", "POST"):
            status, _, message = refusal(client.request(method, asked))
            assert (status, message) == (404, f"{asked} isn't offered by this server: {why}.")
    assert refusal(client.get("/no/such/path"))[2] == "Not Found"
