"""SGLang's `/generate`, in all the forms of its answers: a tiny model against transformers, and the fake engine."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.config import ServerConfig
from rollout.fleet.connection import run_engine
from rollout.outputs import FinishReason
from rollout.sampling.sampler import NO_TOKEN_LEFT, NOT_FINITE
from rollout.server.errors import ApiError
from rollout.server.wire.answer import Delta
from rollout.server.wire.sglang import SGLangWriter, _Told
from tests.support import fake_engine, tiny_models
from tests.support.engine_utils import TOLERANCE, prompt, teacher_forced
from tests.support.server_harness import RunningServer, running_server
from tests.support.text_server import ok, refusal, tokenizer
from tests.support.wait import eventually

ASKED = {"return_logprob": True}
EBNF = re.compile(r"(ab|ba\d)+")


def generate(client: httpx.Client, input_ids: Any, params: dict[str, Any] | None = None, **more: Any) -> Any:
    body = {"input_ids": input_ids, "sampling_params": {"max_new_tokens": 4, **(params or {})}, **more}
    return ok(client.post("/generate", json=body))


def events(client: httpx.Client, input_ids: Any, params: dict[str, Any], **more: Any) -> list[Any]:
    body = {"input_ids": input_ids, "sampling_params": params, "stream": True, **more}
    *chunks, done, end = client.post("/generate", json=body).text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


# -- a model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_models.build("qwen3_moe", tmp_path_factory.mktemp("tiny"))
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(tiny: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[httpx.Client]:
    """The real engine, which tells experts and the logprobs of what it drew from."""
    options = {"dtype": "float32", "max_num_seqs": 16, "logprobs_mode": "processed_logprobs"}
    options |= {"enable_return_routed_experts": True, "num_threads": 1, "num_gpu_blocks_override": 128}
    config = ServerConfig(served_model_name="tiny")
    with (
        running_server(config, model=str(tiny), target=run_engine, **options) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def assert_logprobs(model: PreTrainedModel, prompt_ids: list[int], meta: dict[str, Any]) -> torch.Tensor:
    """The answer's logprobs are transformers'; returns its log-softmax, (tokens, vocabulary)."""
    ids = [token_id for _, token_id, _ in meta["output_token_logprobs"]]
    table = teacher_forced(model, prompt_ids, ids).log_softmax(-1)
    got = torch.tensor([logprob for logprob, _, _ in meta["output_token_logprobs"]])
    torch.testing.assert_close(got, table[range(len(ids)), ids], atol=TOLERANCE, rtol=0)
    return table


def test_logprobs_of_output_and_prompt(served: httpx.Client, model: PreTrainedModel) -> None:
    ids = prompt(12)
    answer = generate(served, ids, {"ignore_eos": True}, **ASKED, logprob_start_len=5, top_logprobs_num=3)
    meta = answer["meta_info"]
    table = assert_logprobs(model, ids, meta)
    assert answer["output_ids"] == [token_id for _, token_id, _ in meta["output_token_logprobs"]]
    for row, top in zip(table, meta["output_top_logprobs"], strict=True):
        best = row.topk(3)
        assert [token_id for _, token_id, _ in top] == best.indices.tolist()
        assert [logprob for logprob, _, _ in top] == pytest.approx(best.values.tolist(), abs=TOLERANCE)
    of_prompt = teacher_forced(model, ids[:5], ids[5:]).log_softmax(-1)
    assert [token_id for _, token_id, _ in meta["input_token_logprobs"]] == ids[5:]
    got = torch.tensor([logprob for logprob, _, _ in meta["input_token_logprobs"]])
    torch.testing.assert_close(got, of_prompt[range(7), ids[5:]], atol=TOLERANCE, rtol=0)
    assert [[c[1] for c in top] for top in meta["input_top_logprobs"]] == of_prompt.topk(3).indices.tolist()
    assert [meta[key] for key in ("prompt_tokens", "completion_tokens", "weight_version")] == [12, 4, "default"]
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    (span,) = meta["weight_versions"]
    assert (span["version"], span["start"], span["end"]) == ("default", 0, 4)


def test_a_prompt_is_scored_from_its_first_token_which_has_none(served: httpx.Client, model: PreTrainedModel) -> None:
    ids = prompt(9)
    for tokens in (0, 1):  # as slime's and AReaL's teachers ask
        answer = generate(served, ids, {"max_new_tokens": tokens, "temperature": 0}, **ASKED, logprob_start_len=0)
        first, *rest = answer["meta_info"]["input_token_logprobs"]
        assert first == [None, ids[0], None]
        table = teacher_forced(model, ids[:1], ids[1:]).log_softmax(-1)
        got = torch.tensor([logprob for logprob, _, _ in rest])
        torch.testing.assert_close(got, table[range(8), ids[1:]], atol=TOLERANCE, rtol=0)
        assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == tokens
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": tokens}


def test_named_tokens(served: httpx.Client, model: PreTrainedModel) -> None:
    ids, named = prompt(6), [9, 200, 4]
    meta = generate(served, ids, **ASKED, token_ids_logprob=named)["meta_info"]
    table = assert_logprobs(model, ids, meta)
    for row, entry in zip(table, meta["output_token_ids_logprobs"], strict=True):
        assert [token_id for _, token_id, _ in entry] == named
        assert [logprob for logprob, _, _ in entry] == pytest.approx(row[named].tolist(), abs=TOLERANCE)


def test_a_batch_is_its_prompts_in_order(served: httpx.Client, model: PreTrainedModel) -> None:
    prompts = [prompt(5), prompt(17, 1), prompt(9, 2)]
    answers = generate(served, prompts, {"ignore_eos": True}, **ASKED, rid="one")
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert [answer["meta_info"]["id"] for answer in answers] == ["one_0", "one_1", "one_2"]
    for ids, answer in zip(prompts, answers, strict=True):
        assert_logprobs(model, ids, answer["meta_info"])
    (alone,) = generate(served, prompts[:1], {"temperature": 0})
    assert alone["output_ids"] == teacher_forced(model, prompts[0], alone["output_ids"]).argmax(-1).tolist()


def test_choices_of_one_prompt_have_their_own_logprobs(served: httpx.Client, model: PreTrainedModel) -> None:
    ids = prompt(8)
    answers = generate(served, ids, {"n": 3, "sampling_seed": 5, "ignore_eos": True}, **ASKED)
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    for answer in answers:
        assert_logprobs(model, ids, answer["meta_info"])
    again = generate(served, ids, {"n": 3, "sampling_seed": 5, "ignore_eos": True})
    assert [a["output_ids"] for a in again] == [a["output_ids"] for a in answers]


@pytest.mark.parametrize("start", [0, 4])
def test_experts_are_those_of_prompt_and_output_without_the_last_token(
    served: httpx.Client, model: PreTrainedModel, start: int
) -> None:
    ids = prompt(6)
    more = {"return_routed_experts": True, "routed_experts_start_len": start}
    answer = generate(served, ids, {"ignore_eos": True, "max_new_tokens": 5}, **more)
    tokens = torch.tensor([ids + answer["output_ids"][:-1]])
    with torch.inference_mode():
        router = model(tokens, use_cache=False, output_router_logits=True).router_logits
    k = model.config.num_experts_per_tok
    expected = torch.stack([logits.topk(k).indices for logits in router], 1).numpy()[start:]
    rows = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
    assert rows.reshape(10 - start, -1, k).tolist() == expected.tolist()
    streamed = events(served, ids, {"ignore_eos": True, "max_new_tokens": 5, "temperature": 0}, **more)
    assert ["routed_experts" in event["meta_info"] for event in streamed] == [False] * (len(streamed) - 1) + [True]


def test_support_in_both_forms_holds_what_was_drawn(served: httpx.Client, model: PreTrainedModel) -> None:
    ids, params = prompt(7), {"top_p": 0.6, "ignore_eos": True}
    params["custom_params"] = {"return_top_p_token_ids": True}
    meta = generate(served, ids, params, **ASKED, return_sampling_mask=True)["meta_info"]
    drawn = [token_id for _, token_id, _ in meta["output_token_logprobs"]]
    table = teacher_forced(model, ids, drawn).softmax(-1)
    joined = np.frombuffer(base64.b64decode(meta["top_p_token_ids"]), np.int32)
    offsets = np.frombuffer(base64.b64decode(meta["top_p_token_offsets"]), np.int32)
    assert (offsets[0], offsets[-1], len(offsets)) == (0, len(joined), len(drawn) + 1)
    for index, mask in enumerate(meta["output_token_sampling_mask"]):
        assert joined[offsets[index] : offsets[index + 1]].tolist() == mask
        ranked = table[index].sort(descending=True)
        smallest = int((ranked.values.cumsum(0) < 0.6).sum()) + 1
        assert sorted(ranked.indices[:smallest].tolist()) == mask
        kept = torch.tensor(mask)
        expected = (table[index, drawn[index]] / table[index, kept].sum()).log()
        assert meta["output_token_logprobs"][index][0] == pytest.approx(expected.item(), abs=TOLERANCE)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("asked", "holds"),
    [
        ({"regex": "[0-9]{3}-[a-c]{2}"}, lambda text: re.fullmatch("[0-9]{3}-[a-c]{2}", text)),
        ({"json_schema": json.dumps(SCHEMA)}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
        ({"ebnf": 'root ::= pair+\npair ::= "ab" | "ba" digit\ndigit ::= [0-9]'}, EBNF.fullmatch),
        ({"regex": "", "json_schema": "", "ebnf": ""}, lambda text: not EBNF.fullmatch(text)),
    ],
    ids=["regex", "json_schema", "ebnf", "none"],
)
def test_answers_are_of_the_form_that_is_asked_for(
    served: httpx.Client, asked: dict[str, Any], holds: Callable[[str], object]
) -> None:
    known = tokenizer()
    blank = {i: -100.0 for i in range(len(known)) if not known.decode([i]).strip()}  # JSON may hold any amount of it
    params = {**asked, "max_new_tokens": 64, "temperature": 1.0, "n": 4, "sampling_seed": 3, "logit_bias": blank}
    for choice in generate(served, prompt(5), params):
        if choice["meta_info"]["finish_reason"]["type"] == "stop" or not any(asked.values()):
            assert holds(choice["text"]), choice["text"]
        else:  # a loop of the grammar may last longer than the answer
            assert "ebnf" in asked
            assert re.match(r"((ab|ba\d)*)", choice["text"])


def test_text_goes_in_and_comes_out(served: httpx.Client, tiny: Path) -> None:
    spoken = tokenizer()
    params = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    answer = ok(
        served.post("/generate", json={"text": "Hello", "sampling_params": params, "return_prompt_token_ids": 1})
    )
    assert answer["prompt_token_ids"] == spoken("Hello").input_ids
    assert generate(served, answer["prompt_token_ids"], params)["output_ids"] == answer["output_ids"]
    assert answer["text"] == spoken.decode(answer["output_ids"], skip_special_tokens=True)
    several = ok(served.put("/generate", json={"text": ["Hello", "Hello"], "sampling_params": params}))
    assert [one["text"] for one in several] == [answer["text"]] * 2


# -- the fake engine: its tokens after [7, b"a"] are bcdef…


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer().save_pretrained(folder)
    with running_server(ServerConfig(served_model_name="smol"), model=str(folder)) as running:
        yield running


A = [7, ord("a")]


def test_a_stream_repeats_what_came_before(client: httpx.Client) -> None:
    params = {"max_new_tokens": 6, "stop": "fg"}
    more = {**ASKED, "logprob_start_len": 1, "top_logprobs_num": 1}
    *begun, last = events(client, A, params, **more)
    whole = generate(client, A, params, **more)
    assert last["meta_info"].pop("id") != whole["meta_info"].pop("id")
    assert last == whole
    assert whole["text"] == "bcde"
    assert whole["output_ids"] == list(b"bcdefg")
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": "fg"}
    for event in begun:
        count = len(event["output_ids"])
        assert event["output_ids"] == whole["output_ids"][:count]
        assert whole["text"].startswith(event["text"])
        assert event["meta_info"]["finish_reason"] is None
        assert event["meta_info"]["completion_tokens"] == event["meta_info"]["output_token_logprobs_length"] == count
        assert event["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][:count]
        assert (
            event["meta_info"]["input_token_logprobs"]
            == whole["meta_info"]["input_token_logprobs"]
            == [[-1.0, ord("a"), None]]
        )


def test_streams_of_several_choices_tell_them_apart(client: httpx.Client) -> None:
    chunks = events(client, [A, [7, ord("A")]], {"n": 2, "max_new_tokens": 3})
    last = {event["index"]: event for event in chunks}
    assert {index: event["text"] for index, event in last.items()} == {0: "bcd", 1: "lmn", 2: "BCD", 3: "LMN"}
    assert all(event["meta_info"]["finish_reason"] == {"type": "length", "length": 3} for event in last.values())


@pytest.mark.parametrize(
    ("params", "text", "matched"),
    [
        ({"stop": ["de"], "no_stop_trim": True}, "bcde", "de"),
        ({"stop_token_ids": [ord("d")]}, "bc", ord("d")),
        ({"stop_token_ids": [ord("d")], "no_stop_trim": True}, "bcd", ord("d")),
    ],
)
def test_what_ended_it(client: httpx.Client, params: dict[str, Any], text: str, matched: Any) -> None:
    answer = generate(client, A, {"max_new_tokens": 9, **params})
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == (text, {"type": "stop", "matched": matched})


def test_eos_is_named_and_versions_are_told(client: httpx.Client) -> None:
    answer = generate(client, [7, fake_engine.EOS - 2], {"max_new_tokens": 9})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": fake_engine.EOS}
    meta = generate(client, [fake_engine.RELABEL, 20])["meta_info"]
    assert meta["weight_version"] == "v8"
    spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
    assert spans == [("v7", 0, 2), ("v8", 2, 3), ("v8", 3, 4)]


def test_an_aborted_answer_has_its_tokens_and_logprobs(server: RunningServer, client: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        body = [fake_engine.SLOW, 20], {"max_new_tokens": 900}
        answering = pool.submit(generate, client, *body, **ASKED, rid="mine")
        eventually(lambda: server.stats()["running"], 30)
        assert server.engine.abort(["mine"]) == 1
        meta = answering.result(30)["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert meta["id"] == "mine"
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]


def test_null_is_the_default_and_what_says_nothing_passes(server: RunningServer, client: httpx.Client) -> None:
    nulls = dict.fromkeys(
        ["temperature", "top_p", "top_k", "stop", "stop_token_ids", "sampling_seed", "n", "ignore_eos"]
    )
    passed = {"image_data": None, "lora_path": None, "session_id": "s", "return_logprob": None, "rid": None}
    body = {"input_ids": A, "sampling_params": nulls | {"top_k": -1}, **passed}
    answer = client.post("/generate", json=body)
    ok(answer)
    assert "x-ignored-parameters" not in answer.headers
    params = server.stats()["added"][-1]["sampling_params"]
    assert (params["max_tokens"], params["temperature"], params["n"]) == (128, 1.0, 1)
    ok(client.post("/generate", json={"input_ids": A, "sampling_params": {"max_new_tokens": None, "tempreture": 1}}))
    params = server.stats()["added"][-1]["sampling_params"]
    assert params["max_tokens"] == fake_engine.MAX_MODEL_LEN - 2
    answer = client.post("/generate", json={"input_ids": A, "hurry": 1, "sampling_params": {"tempreture": 1}})
    assert answer.headers["x-ignored-parameters"] == "hurry, sampling_params.tempreture"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_ids": A, "image_data": ["x"]}, "image_data"),
        ({"input_ids": A, "lora_path": "x-v1"}, "lora_path"),
        ({"input_ids": A, "custom_logit_processor": "gASV"}, "custom_logit_processor"),
        ({"input_ids": A, "sampling_params": {"regex": "a+("}}, "sampling_params.regex"),
        ({"input_ids": A, "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"input_ids": A, "sampling_params": {"ebnf": "root ::= other"}}, "sampling_params.ebnf"),
        ({"input_ids": A, "sampling_params": {"ebnf": "x" * 99_999}}, "sampling_params.ebnf"),
        ({"input_ids": A, "sampling_params": {"regex": "a+", "ebnf": 'root ::= "a"'}}, "sampling_params.ebnf"),
        ({"input_ids": A, "sampling_params": {"regex": "a+", "ignore_eos": True}}, "ignore_eos"),
        ({"input_ids": A, "sampling_params": {"structural_tag": "{}"}}, "sampling_params.structural_tag"),
        ({"input_ids": A, "sampling_params": {"stop_regex": "a+"}}, "sampling_params.stop_regex"),
        ({"input_ids": A, "sampling_params": {"beam_width": 2}}, "sampling_params.beam_width"),
        ({"input_ids": A, "text": "a"}, "input_ids"),
        ({}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [A, []]}, "prompt"),
        ({"input_ids": [[1]] * 2049}, "input_ids"),
        ({"input_ids": [A, A], "rid": ["x"]}, "rid"),
        ({"input_ids": A, "rid": ["x", "y"]}, "rid"),
        ({"input_ids": A, "return_logprob": True, "logprob_start_len": 3}, "logprob_start_len"),
        ({"input_ids": A, "return_routed_experts": True}, "return_routed_experts"),
        ({"input_ids": A, "token_ids_logprob": [1], "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"input_ids": A, "sampling_params": {"max_new_tokens": -1}}, "max_tokens"),
        ({"input_ids": A, "sampling_params": [{}]}, "body.sampling_params"),
        ({"input_ids": A, "data_parallel_rank": 7}, None),
    ],
)
def test_refusals_name_the_field(client: httpx.Client, body: dict[str, Any], param: str | None) -> None:
    status, named, _ = refusal(client.post("/generate", json=body))
    assert (status, named) == (400, param)


def test_without_a_tokenizer_there_is_no_text(tiny: Path) -> None:
    with (
        running_server(ServerConfig(tokens_only=True)) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        answer = generate(client, A)
        assert list(answer) == ["output_ids", "meta_info"]
        assert answer["output_ids"] == list(b"bcde")
        assert refusal(client.post("/generate", json={"text": "a"}))[0] == 400
        assert refusal(client.post("/generate", json={"input_ids": A, "sampling_params": {"stop": "x"}}))[:2] == (
            400,
            "stop",
        )


@pytest.mark.parametrize(("reason", "status"), [(NO_TOKEN_LEFT, 400), (NOT_FINITE, 500), (None, 500)])
def test_a_choice_that_its_own_request_leaves_no_token_is_a_400(reason: str | None, status: int) -> None:
    failed = Delta(0, [], finish_reason=FinishReason.ERROR, stop_reason=reason)
    with pytest.raises(ApiError) as caught:
        SGLangWriter.__new__(SGLangWriter)._finish(_Told(), failed)
    assert caught.value.status == status
