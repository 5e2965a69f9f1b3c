"""Text beside tokens on `/inference/v1/generate`: output_mode text, and stop strings in either mode."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout.config import ServerConfig
from rollout.fleet.connection import run_engine
from tests.support import fake_engine, tiny_models, tiny_tokenizers
from tests.support.server_harness import RunningServer, running_server
from tests.support.wait import eventually

PATH = "/inference/v1/generate"
EXAMPLES = json.loads((Path(__file__).parents[1] / "data" / "wire_examples.json").read_text())
TEXT = {"output_mode": "text"}
# The fake engine's tokens after [7, b"z"] are the bytes that follow: {|}~ and so on; after "a" they are bcdef.
A = [7, ord("a")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bytes")
    tiny_tokenizers.byte_level().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def server(tokenizer: str) -> Iterator[RunningServer]:
    config = ServerConfig(served_model_name="smol", enable_scale_out=True, return_sampling_mask=True)
    with running_server(config, model=tokenizer) as running:
        yield running


def post(client: httpx.Client, token_ids: list[int], params: dict[str, Any] | None = None, **more: Any) -> Any:
    body = {"token_ids": token_ids, "sampling_params": {"max_tokens": 4, **(params or {})}, **more}
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(client: httpx.Client, token_ids: list[int], params: dict[str, Any], **more: Any) -> list[Any]:
    body = {"token_ids": token_ids, "sampling_params": params, "stream": True, **more}
    *chunks, done, end = client.post(PATH, json=body).text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """The pieces of a stream put together, by choice, as the whole answer has them."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "token_ids": [], "logprobs": []})
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        so_far = choices[choice["index"]]
        assert "finish_reason" not in so_far, "nothing comes after the end"
        so_far["text"] += choice.get("text", "")
        so_far["token_ids"] += choice["token_ids"]
        so_far["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        if choice["finish_reason"] is not None:
            so_far |= {key: choice[key] for key in ("finish_reason", "stop_reason", "weight_versions")}
    return dict(choices)


def test_text_of_a_choice_and_its_place_among_the_fields(client: httpx.Client) -> None:
    answer = post(client, A, {"logprobs": 1}, **TEXT)
    assert answer["output_mode"] == "text"
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"]) == ("bcde", [98, 99, 100, 101])
    (recorded,) = EXAMPLES["text_lp2"]["body"]["choices"]
    assert list(choice) == list(recorded)
    entry, like = choice["logprobs"]["content"][0], recorded["logprobs"]["content"][0]
    assert list(entry) == list(like)
    assert list(entry["top_logprobs"][0]) == list(like["top_logprobs"][0])


def test_text_logprobs_name_tokens_and_their_own_bytes(client: httpx.Client) -> None:
    (choice,) = post(client, [7, 255], {"max_tokens": 3, "logprobs": 1}, **TEXT)["choices"]
    assert (choice["token_ids"], choice["text"]) == ([256, 257, 258], "你😀a")
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["\ufffd", "\ufffd" * 2, "\ufffd" * 3 + "a"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "你😀a"
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["\ufffd", "\x00"]
    assert all({**entry["top_logprobs"][0], "top_logprobs": entry["top_logprobs"]} == entry for entry in content)


def test_tokens_as_token_ids(tokenizer: str) -> None:
    config = ServerConfig(served_model_name="smol", enable_scale_out=True, return_tokens_as_token_ids=True)
    with running_server(config, model=tokenizer) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        (choice,) = post(http, A, {"max_tokens": 1, "logprobs": 1}, **TEXT)["choices"]
        (entry,) = choice["logprobs"]["content"]
        assert choice["text"] == "b"
        assert [top["token"] for top in entry["top_logprobs"]] == ["token_id:98", "token_id:0"]
        assert (entry["token"], entry["bytes"]) == ("token_id:98", None)
        (choice,) = post(http, A, {"max_tokens": 1, "logprobs": 1})["choices"]
        assert choice["logprobs"]["content"][0]["token_id"] == 98


@pytest.mark.parametrize("mode", [{}, TEXT])
@pytest.mark.parametrize(
    ("params", "text", "count", "reason"),
    [
        ({"stop": ["d"]}, "bc", 3, "d"),
        ({"stop": "cde"}, "b", 4, "cde"),
        ({"stop": ["zz", "de", "cd"]}, "b", 3, "cd"),
        ({"stop": ["zz", "de", "bcde"]}, "bc", 4, "de"),
        ({"stop": ["d"], "include_stop_str_in_output": True}, "bcd", 3, "d"),
        ({"stop": ["b", "e"], "min_tokens": 3}, "bcd", 4, "e"),
        ({"stop": ["fx"], "max_tokens": 5}, "bcdef", 5, None),
        ({"stop": ["f"], "max_tokens": 5}, "bcde", 5, "f"),
        ({"stop": ["f"], "stop_token_ids": [100]}, "bc", 3, 100),
        ({"stop": ["f"], "stop_token_ids": [100], "include_stop_str_in_output": True}, "bcd", 3, 100),
    ],
)
def test_where_a_choice_ends(
    client: httpx.Client, params: dict[str, Any], text: str, count: int, reason: Any, mode: dict[str, Any]
) -> None:
    answer = post(client, [fake_engine.RELABEL, *A], {"max_tokens": 6, "logprobs": 0, **params}, **mode)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == list(range(98, 98 + count))
    assert choice.get("text") == (text if mode else None)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length" if reason is None else "stop", reason)
    assert len(choice["logprobs"]["content"]) == count
    assert choice["weight_versions"][-1]["end"] == count
    assert answer["usage"]["completion_tokens"] == count


def test_a_stop_string_ends_its_choice_alone_and_in_the_engine(server: RunningServer, client: httpx.Client) -> None:
    before = server.stats()["stopped"]
    params = {"n": 3, "stop": ["d", "n"], "max_tokens": 2000}
    choices = post(client, [fake_engine.SLOW, ord("a")], {**params, "stop_token_ids": [119]}, **TEXT)["choices"]
    assert [(c["text"], c["stop_reason"]) for c in choices] == [("bc", "d"), ("lm", "n"), ("v", 119)]
    eventually(lambda: server.stats()["running"] == 0)
    assert server.stats()["stopped"] == [*before, 0, 1]


def test_streamed_text_is_held_back_and_cut_and_adds_up(client: httpx.Client) -> None:
    prompt, params = [fake_engine.SLOW, ord("a")], {"n": 2, "max_tokens": 7, "stop": ["cdx", "fgh"], "logprobs": 1}
    whole = post(client, prompt, params, **TEXT)["choices"]
    chunks = events(client, prompt, params, **TEXT)
    assert {chunk["output_mode"] for chunk in chunks} == {"text"}
    parts = joined(chunks)
    for choice in whole:
        assert parts[choice["index"]] == {
            key: choice["logprobs"]["content"] if key == "logprobs" else choice[key] for key in parts[0]
        }
    # one token a chunk: the c and the d wait until an e comes, f and g for ever
    first = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == 0]
    assert [piece["text"] for piece in first] == ["b", "", "", "cde", "", "", ""]
    assert (first[-1]["finish_reason"], first[-1]["stop_reason"]) == ("stop", "fgh")


def test_text_held_back_comes_with_an_abort(server: RunningServer, client: httpx.Client) -> None:
    body = {
        "token_ids": [fake_engine.SLOW, 97],
        "sampling_params": {"max_tokens": 2000, "stop": ["cd~"]},
        "stream": True,
    }
    with client.stream("POST", PATH, json={**body, **TEXT}, headers={"X-Request-Id": "held"}) as response:
        chunks = []
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
                if chunks[-1]["choices"][0]["token_ids"] == [99]:
                    server.loop.call_soon_threadsafe(server.engine.abort, ["generate-tokens-held"])
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("abort", None)
    assert (
        "".join(chunk["choices"][0]["text"] for chunk in chunks)
        == bytes(i for chunk in chunks for i in chunk["choices"][0]["token_ids"]).decode()
    )


@pytest.mark.parametrize(
    ("last", "pieces"),
    [(255, ["", "你", "😀a"]), (225, ["", "\ufffd", "\ufffd\ufffd"])],  # 226, 227, 228 each begin a character
)
def test_characters_of_several_tokens_stream_whole(client: httpx.Client, last: int, pieces: list[str]) -> None:
    chunks = events(client, [fake_engine.SLOW, last], {"max_tokens": 3}, **TEXT)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == pieces
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1, 1, 1]


def test_masks_and_spans_of_a_stopped_stream(client: httpx.Client) -> None:
    chunks = events(client, [fake_engine.MASKED, 97], {"max_tokens": 9, "stop": ["e"]}, **TEXT)
    masks = [mask for chunk in chunks for mask in chunk["choices"][0]["sampling_mask"] or [None]]
    assert masks == [None, [5, 99], None, [5, 101]]
    spans = [chunk["choices"][0]["weight_versions"] for chunk in chunks]
    assert spans[:-1] == [None] * (len(chunks) - 1)
    assert spans[-1][0]["end"] == 4


def test_special_tokens_are_skipped_unless_asked_for(client: httpx.Client) -> None:
    end = tiny_tokenizers.byte_level().get_vocab()[tiny_tokenizers.SPECIAL]
    params = {"max_tokens": 2}
    assert post(client, [7, end - 1], params, **TEXT)["choices"][0]["text"] == tiny_tokenizers.ADDED
    shown = post(client, [7, end - 1], {**params, "skip_special_tokens": False}, **TEXT)
    assert shown["choices"][0]["text"] == tiny_tokenizers.SPECIAL + tiny_tokenizers.ADDED


@pytest.mark.parametrize(
    ("params", "more", "param"),
    [
        ({}, TEXT, "output_mode"),
        ({"stop": ["x"]}, {}, "stop"),
        ({"bad_words": ["x"]}, {}, "bad_words"),
    ],
)
@pytest.mark.parametrize("flags", [{"tokens_only": True}, {"skip_tokenizer_init": True, "enable_scale_out": True}])
def test_without_a_tokenizer_text_is_refused(
    tokenizer: str, flags: dict[str, Any], params: dict[str, Any], more: dict[str, Any], param: str
) -> None:
    with (
        running_server(ServerConfig(**flags), model=tokenizer) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 1, **params}}
        response = http.post(PATH, json=body | more)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (400, "BadRequestError", param)
        assert "tokenizer" in error["message"]
        assert http.post(PATH, json={**body, "sampling_params": {"max_tokens": 1}}).status_code == 200


@pytest.mark.parametrize("mode", ["Text", "", 1])
def test_other_output_modes_are_refused(client: httpx.Client, mode: Any) -> None:
    response = client.post(PATH, json={"token_ids": [1], "sampling_params": {}, "output_mode": mode})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "body.output_mode")


def test_stop_strings_cannot_be_many_or_endless(client: httpx.Client) -> None:
    for stop in (["x"] * 65, ["x" * 4097]):
        response = client.post(PATH, json={"token_ids": [1], "sampling_params": {"stop": stop}})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stop")


# -- the real engine

PROMPT = [ord(char) for char in "once upon"]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tiny_models.build("llama", tmp_path_factory.mktemp("real"))
    tiny_tokenizers.byte_level().save_pretrained(folder)
    config = ServerConfig(served_model_name="smol", enable_scale_out=True)
    options = {"num_gpu_blocks_override": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
    with running_server(config, model=str(folder), target=run_engine, **options) as running:
        yield running


def test_stopped_choices_are_the_unstopped_ones_cut_short(real: RunningServer) -> None:
    with httpx.Client(base_url=real.url, timeout=60) as http:
        params = {"n": 4, "seed": 3, "temperature": 1.5, "max_tokens": 60, "allowed_token_ids": list(range(97, 123))}
        full = post(http, PROMPT, params, **TEXT)["choices"]
        texts = [choice["text"] for choice in full]
        assert texts == [bytes(choice["token_ids"]).decode() for choice in full]
        stops = [texts[0][20:22], texts[1][30:32], texts[2][3:5]]
        stopped = post(http, PROMPT, {**params, "stop": stops}, **TEXT)["choices"]
        assert len({choice["stop_reason"] for choice in stopped}) > 1
        ended = 0
        for choice, text in zip(stopped, texts, strict=True):
            ends = [text.find(stop) + 2 for stop in stops if stop in text]
            length = min(ends, default=60)
            ended += bool(ends)
            assert choice["token_ids"] == list(text[:length].encode())
            assert choice["text"] == (text[: length - 2] if ends else text)
            assert choice["stop_reason"] == (text[length - 2 : length] if ends else None)
            assert [span["end"] for span in choice["weight_versions"]] == [length]
        eventually(lambda: real.stats()["running"] == 0)
        stats = real.stats()
        assert stats["free_blocks"] == stats["num_blocks"]
        assert (stats["finished_stop"], "finished_abort" in stats) == (ended, False)


@pytest.mark.smollm2
def test_recorded_text_streams(smollm2: Path) -> None:
    config = ServerConfig(served_model_name="smol", enable_scale_out=True)
    with (
        running_server(config, model=str(smollm2), target=run_engine, max_model_len=256, max_num_seqs=4) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        request = EXAMPLES["stream_text_stop_hit"]["request"]["json"]
        chunks = events(http, request["token_ids"], request["sampling_params"], **TEXT)
        ours, theirs = joined(chunks)[0], joined(EXAMPLES["stream_text_stop_hit"]["body"][:-1])[0]
        for span in ours["weight_versions"]:
            del span["epoch"], span["kv"]
        assert ours == theirs
        for name in ("stop_str_text", "stop_str_incl", "stop_multi", "text_lp2"):
            (expected,) = EXAMPLES[name]["body"]["choices"]
            (choice,) = http.post(PATH, json=EXAMPLES[name]["request"]["json"]).json()["choices"]
            for key in ("text", "token_ids", "finish_reason", "stop_reason"):
                assert choice[key] == expected[key], (name, key)
