"""`/v1/completions` over the fake engine, whose next token is the byte that follows the last one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.support import fake_engine
from tests.support.server_harness import RunningServer
from tests.support.text_server import events, ok, refusal, text_server
from tests.support.wait import eventually

PATH = "/v1/completions"


def complete(client: httpx.Client, prompt: Any, **more: Any) -> Any:
    return ok(client.post(PATH, json={"prompt": prompt, "max_tokens": 3, **more}))


def stream(client: httpx.Client, prompt: Any, **more: Any) -> list[Any]:
    return events(client.post(PATH, json={"prompt": prompt, "max_tokens": 3, "stream": True, **more}))


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """The pieces of each choice put together, with the keys of a whole one."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "token_ids": [], "logprobs": None})
    for piece in (piece for chunk in chunks for piece in chunk["choices"]):
        so_far = choices[piece["index"]]
        assert so_far.get("finish_reason") is None, "nothing comes after the end"
        so_far["text"] += piece["text"]
        so_far["token_ids"] += piece["token_ids"] or []
        if piece["logprobs"] is not None:
            before = so_far["logprobs"] or {key: [] for key in piece["logprobs"]}
            so_far["logprobs"] = {key: before[key] + piece["logprobs"][key] for key in before}
        so_far["prompt_token_ids"] = so_far.get("prompt_token_ids") or piece["prompt_token_ids"]
        so_far |= {key: piece[key] for key in ("finish_reason", "stop_reason", "weight_versions") if piece.get(key)}
    return dict(sorted(choices.items()))


@pytest.mark.parametrize(
    ("prompt", "texts", "prompt_tokens"),
    [
        ("xa", ["bcd"], 2),
        ([120, 97], ["bcd"], 2),
        (["a", "xp", "e"], ["bcd", "qrs", "fgh"], 4),
        ([[97], [120, 112]], ["bcd", "qrs"], 3),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_either(
    client: httpx.Client, prompt: Any, texts: list[str], prompt_tokens: int
) -> None:
    answer = complete(client, prompt)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": 3 * len(texts)}
    assert answer["usage"].items() >= (counts | {"total_tokens": sum(counts.values())}).items()
    assert answer["id"].startswith("cmpl-")
    assert {number: choice["text"] for number, choice in joined(stream(client, prompt)).items()} == dict(
        enumerate(texts)
    )


def test_without_a_limit_sixteen_tokens_come_and_null_means_all_there_is_room_for(client: httpx.Client) -> None:
    assert len(complete(client, "!", max_tokens=16)["choices"][0]["text"]) == 16
    body = {"prompt": "!"}
    assert ok(client.post(PATH, json=body))["usage"]["completion_tokens"] == 16
    answer = ok(client.post(PATH, json=body | {"max_tokens": None, "stop": ["*"]}))
    assert answer["choices"][0]["text"] == "\"#$%&'()"
    params = fake_params(client, body | {"max_tokens": None, "stop": "*"})
    assert params["max_tokens"] == fake_engine.MAX_MODEL_LEN - 1


def fake_params(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters that /v1/completions/render makes of a body."""
    return ok(client.post(f"{PATH}/render", json=body))[0]["sampling_params"]


def test_choices_are_numbered_prompt_by_prompt(client: httpx.Client) -> None:
    answer = complete(client, ["a", "A"], n=2, return_token_ids=True, logprobs=0)
    # choice c of the fake engine starts ten bytes further on
    assert [choice["text"] for choice in answer["choices"]] == ["bcd", "lmn", "BCD", "LMN"]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[97], [97], [65], [65]]
    pieces = joined(stream(client, ["a", "A"], n=2, return_token_ids=True, logprobs=0))
    for choice in answer["choices"]:
        assert pieces[choice["index"]].items() <= choice.items()


def test_logprobs_name_the_sampled_token_and_the_top_k(client: httpx.Client) -> None:
    logprobs = complete(client, "b", logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["c", "d", "e"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] == {"c": -0.5, "\x00": -1.0, "\x01": -1.5}
    by_id = complete(client, "b", logprobs=0, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert by_id["tokens"] == ["token_id:99", "token_id:100", "token_id:101"]
    assert by_id["text_offset"] == [0, 1, 2]  # into the text, whatever tokens are called
    assert by_id["top_logprobs"][2] == {"token_id:101": -0.5}


@pytest.mark.parametrize("prompt", ["xa", [120, 97]])
def test_echo_puts_the_prompt_in_front_and_its_logprobs_too(client: httpx.Client, prompt: Any) -> None:
    (choice,) = complete(client, prompt, echo=True, logprobs=1, return_token_ids=True)["choices"]
    assert choice["text"] == "xabcd"
    assert choice["token_ids"] == [98, 99, 100]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["x", "a", "b", "c", "d"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"] == [None, -1.0, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][:2] == [None, {"a": -1.0, "\x03": -0.5}]
    assert joined(stream(client, prompt, echo=True, logprobs=1, return_token_ids=True))[0].items() <= choice.items()


@pytest.mark.parametrize("as_ids", [False, True])
def test_text_offsets_of_an_echo_drifted_at_characters_of_several_tokens(client: httpx.Client, as_ids: bool) -> None:
    body: dict[str, Any] = {"echo": True, "logprobs": 0, "return_tokens_as_token_ids": as_ids}
    for prompt in ("xé", [*"xé".encode()]):
        (choice,) = complete(client, prompt, **body)["choices"]
        assert choice["text"] == "xé\ufffd\ufffd\ufffd"  # what follows 0xA9 is no beginning of a character
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 4]
        assert joined(stream(client, prompt, **body))[0]["logprobs"] == choice["logprobs"]


def test_only_the_prompt_may_be_asked_back_for_its_likelihood(client: httpx.Client) -> None:
    body: dict[str, Any] = {"echo": True, "max_tokens": 0, "logprobs": 1, "return_token_ids": True}
    answer = complete(client, "xa", **body, return_weight_versions=True)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("xa", [], "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
    assert choice["weight_versions"] == []
    assert answer["usage"].items() >= {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}.items()
    pieces = stream(client, "xa", **body, stream_options={"include_usage": True})
    assert pieces.pop()["usage"] == {"prompt_tokens": 2, "total_tokens": 2, "completion_tokens": 0}
    assert joined(pieces)[0].items() <= choice.items()


def test_prompt_logprobs_beside_the_choices(client: httpx.Client) -> None:
    (choice,) = complete(client, "xa", prompt_logprobs=1)["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["97"] == {"logprob": -1.0, "rank": 7, "decoded_token": "a"}
    assert choice["logprobs"] is None


def test_versions_and_masks_come_with_a_choice_that_asks_for_them(client: httpx.Client) -> None:
    asked: dict[str, Any] = {"return_weight_versions": True, "return_token_ids": True, "max_tokens": 4}
    (choice,) = complete(client, [fake_engine.RELABEL, 97], **asked)["choices"]
    assert [(s["version"], s["start"], s["end"], s["epoch"], s["kv"]) for s in choice["weight_versions"]] == [
        ("v7", 0, 2, 0, "current"),
        ("v8", 2, 3, 1, "current"),
        ("v8", 3, 4, 1, "mixed"),
    ]
    pieces = stream(client, [fake_engine.RELABEL, 97], **asked)
    assert [p["choices"][0].get("weight_versions") for p in pieces][:-1] == [None] * (len(pieces) - 1)
    assert pieces[-1]["choices"][0]["weight_versions"] == choice["weight_versions"]
    (choice,) = complete(client, [fake_engine.MASKED, 97], **asked)["choices"]
    assert choice["sampling_mask"] == [None, [5, 99], None, [5, 101]]
    plain = complete(client, [fake_engine.MASKED, 97])["choices"][0]
    assert not plain.keys() & {"weight_versions", "sampling_mask"}
    assert plain["token_ids"] is plain["prompt_token_ids"] is None


def test_a_stop_string_ends_one_choice_and_its_tokens_stay(client: httpx.Client) -> None:
    body: dict[str, Any] = {"stop": ["def", "q"], "max_tokens": 8, "return_token_ids": True}
    first, second = complete(client, ["a", "f"], **body)["choices"]
    assert (first["text"], first["stop_reason"], first["token_ids"]) == ("bc", "def", [98, 99, 100, 101, 102])
    assert (second["text"], second["finish_reason"], second["stop_reason"]) == ("ghijklmn", "length", None)
    pieces = joined(stream(client, ["a", "f"], **body))
    assert (pieces[0]["text"], pieces[0]["stop_reason"]) == ("bc", "def")
    assert (pieces[1]["text"], pieces[1]["finish_reason"]) == ("ghijklmn", "length")
    kept = complete(client, "a", **body, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == "bcdef"


def test_usage_of_a_stream_as_its_options_ask(client: httpx.Client) -> None:
    chunks = stream(client, ["a", "xx"], stream_options={"include_usage": True})
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "total_tokens": 9, "completion_tokens": 6}
    running = stream(client, "a", stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in running]
    assert counts == sorted(counts)
    assert counts[-2:] == [3, 3]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": "a", "suffix": "b"}, "suffix", "suffix is not supported"),
        ({"prompt": "a", "best_of": 2}, "best_of", "best_of is not supported"),
        ({"prompt": "a", "structured_outputs": {"regex": "a" * 99_999}}, "structured_outputs", "got 99999"),
        ({"prompt": "a", "structured_outputs": {}}, "structured_outputs", "exactly one of json"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format", "this model has none"),
        ({"prompt": "a", "structured_outputs": {"backend": "x"}}, "body.structured_outputs.backend", "Unexpected"),
        ({"prompt": "a", "structured_outputs": {"json_object": True}, "ignore_eos": True}, "ignore_eos", "only EOS"),
        ({"prompt": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "leave it out"),
        ({"prompt": "a", "kv_transfer_params": {}}, "kv_transfer_params", "not supported"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "`stream=True`"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "`stream=True`"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "greater than max allowed: 20"),
        ({"prompt": "a", "n": 2, "temperature": 0}, None, "greedy sampling, got 2"),
        ({"prompt": "a", "stop": [""]}, None, "empty string"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt", "non-empty"),
        ({"prompt": ""}, "prompt", "cannot be empty"),
        ({"prompt": []}, "prompt", "got 0"),
        ({"prompt": ["a", ""]}, "prompt", "cannot be empty"),
        ({"prompt": [[97], []]}, "prompt", "cannot be empty"),
        ({"prompt": [[97]] * 2049}, "prompt", "got 2049"),
        ({"prompt": [fake_engine.VOCAB_SIZE]}, None, "out of vocabulary"),
        ({"prompt": [97] * fake_engine.MAX_MODEL_LEN}, None, "2048"),
        ({"prompt": "a" * 3000}, None, "length 3000"),
        ({"prompt": "a" * 1_000_000}, None, "1000000 characters"),
    ],
)
def test_refusals_name_the_field_and_what_is_wrong(
    client: httpx.Client, body: dict[str, Any], param: str | None, says: str
) -> None:
    status, at, message = refusal(client.post(PATH, json=body))
    assert (status, at) == (400, param)
    assert says in message


@pytest.mark.parametrize("prompt", [b'"\\ud800"', b'["a", "\\ud800"]', b"[-1]", b'{"a": 1}', b"[97, [98]]", b"[1e400]"])
def test_prompts_that_are_none_are_a_400(client: httpx.Client, prompt: bytes) -> None:
    json_header = {"content-type": "application/json"}
    response = client.post(PATH, content=b'{"max_tokens": 1, "prompt": ' + prompt + b"}", headers=json_header)
    status, param, _ = refusal(response)
    assert status == 400
    assert param is not None
    assert param.startswith("body.")


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": [*range(200), *[-1] * 50_000]},
        {"prompt": "a", "stop_token_ids": ["x"] * 50_000},
        {"prompt": "a", "logit_bias": {f"x{number}": 1 for number in range(50_000)}},
    ],
)
def test_thousands_of_wrong_values_are_told_in_few_words(client: httpx.Client, wrong: dict[str, Any]) -> None:
    response = client.post(PATH, json=wrong)
    assert refusal(response)[0] == 400
    assert len(response.content) < 3000
    assert response.json()["error"]["message"].count("\n") <= 4


def test_another_model_is_a_404(client: httpx.Client) -> None:
    assert refusal(client.post(PATH, json={"prompt": "a", "model": "gpt"}))[:2] == (404, "model")


MISSPELT: dict[str, Any] = {"top_pp": 0.5, "a\r\nSet-Cookie: b": 1, "é" * 70: 1, "null": None}


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"max_tokens": 1, **MISSPELT}},
         "sampling_params."),
        ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {"max_tokens": 1}, **MISSPELT}, ""),
        (PATH, {"prompt": "a", "max_tokens": 1, "best_of": 1, **MISSPELT}, ""),
        (f"{PATH}/render", {"prompt": "a", **MISSPELT}, ""),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **MISSPELT}, ""),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **MISSPELT}, ""),
    ],
)  # fmt: skip
def test_misspelt_parameters_were_ignored_in_silence(
    client: httpx.Client, path: str, body: dict[str, Any], prefix: str
) -> None:
    cut = quote((prefix + "é" * 70)[:64])
    expected = f"{prefix}top_pp, {prefix}a%0D%0ASet-Cookie%3A%20b, {cut}"
    for stream in (False, True):
        response = client.post(path, json={**body, "stream": stream})
        assert response.status_code == 200
        assert response.headers["x-ignored-parameters"] == expected
        assert "set-cookie" not in response.headers


def test_names_of_what_is_ignored_are_bounded_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with text_server() as server, httpx.Client(base_url=server.url, timeout=60) as client, caplog.at_level("WARNING"):
        for _ in range(2):
            response = client.post(PATH, json={"prompt": "a", "max_tokens": 1, "mistake": 1})
            assert response.headers["x-ignored-parameters"] == "mistake"
        assert [record.getMessage().count("mistake") for record in caplog.records].count(1) == 1
        for batch in range(30):
            many = {f"{batch}-{i}{'x' * 1000}": 1 for i in range(1000)}
            response = client.post(PATH, json={"prompt": "a", "max_tokens": 1, **many})
            assert response.headers["x-ignored-parameters"].endswith(", and 984 more")
            assert len(response.headers["x-ignored-parameters"]) < 1200
        assert len(caplog.records) <= 256
        rendered = ok(client.post(f"{PATH}/render", json={"prompt": "a"}))[0]
        sent = client.post("/inference/v1/generate", json=rendered)
        assert (sent.status_code, sent.headers.get("x-ignored-parameters")) == (200, None)


def test_sixteen_thousand_choices_were_submitted_at_once(server: RunningServer, client: httpx.Client) -> None:
    before = len(server.stats()["added"])
    body = {"prompt": [[fake_engine.NEVER, 97]] * 2048, "n": fake_engine.MAX_NUM_SEQS}
    status, param, message = refusal(client.post(PATH, json=body, timeout=30))
    assert (status, param) == (400, "n")
    assert f"16384 choices can never be taken: at most {8192 + fake_engine.MAX_NUM_SEQS}" in message
    assert len(server.stats()["added"]) == before


def test_a_client_that_leaves_frees_the_blocks_of_every_prompt(server: RunningServer, client: httpx.Client) -> None:
    before = len(server.stats()["aborted"])
    prompts = [[fake_engine.SLOW, number] for number in (1, 2, 3)]
    body = {"prompt": prompts, "max_tokens": 2000, "stream": True}
    with client.stream("POST", PATH, json=body) as response:
        next(response.iter_lines())
    eventually(lambda: len(server.stats()["aborted"]) == before + 3)
    with pytest.raises(httpx.ReadTimeout):
        client.post(PATH, json={**body, "stream": False}, timeout=0.5)
    eventually(lambda: len(server.stats()["aborted"]) == before + 6)
    assert server.stats()["running"] == 0


def test_ids_of_the_caller_come_back_and_abort(server: RunningServer, client: httpx.Client) -> None:
    assert ok(client.post(PATH, json={"prompt": "a"}, headers={"X-Request-Id": "7"}))["id"] == "cmpl-7"
    body = {"prompt": [[fake_engine.SLOW, 97]] * 2, "max_tokens": 2000, "stream": True, "request_id": "8"}
    with client.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert ok(client.post("/abort_requests", json={"request_ids": ["cmpl-8"]}))["aborted"] == 2
        rest = [line for line in lines if line]
    assert sum('"finish_reason":"abort"' in line for line in rest) == 2


def test_an_abort_pause_is_a_503_before_any_work(client: httpx.Client) -> None:
    assert client.post("/pause?mode=abort").status_code == 200
    try:
        response = client.post(PATH, json={"prompt": "a"})
        assert refusal(response)[0] == 503
        assert response.headers["retry-after"]
    finally:
        client.post("/resume")


def test_an_engine_that_dies_in_a_stream_is_told_in_it() -> None:
    with text_server() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        chunks = stream(client, [fake_engine.DIE, 97], max_tokens=50)
        assert chunks[-1]["error"]["code"] == 503


def test_without_a_tokenizer_text_is_refused() -> None:
    with text_server(skip_tokenizer_init=True) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for path, body in (
            (PATH, {"prompt": "a"}),
            (PATH, {"prompt": [97]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [97]}),
            (f"{PATH}/render", {"prompt": "a"}),
        ):
            status, _, message = refusal(client.post(path, json=body))
            assert (status, "tokenizer" in message) == (400, True), path
