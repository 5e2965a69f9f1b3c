"""examples/token_generation_client.py, run as it is and used as a module, against live servers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import token_generation_client
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.launch import serve
from tests.support import fake_engine, text_server
from tests.support.server_harness import RunningServer
from tests.support.wait import eventually

FILE = Path(__file__).parents[2] / "examples" / "token_generation_client.py"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with text_server.text_server(api_key=("secret",)) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Any:
    return token_generation_client.TokenClient(server.url, text_server.tokenizer(), "secret")


def test_its_prompt_is_the_template_without_a_second_bos(client: Any) -> None:
    ids = client.encode([{"role": "user", "content": "hi"}])
    eos = client.tokenizer.eos_token
    assert client.tokenizer.decode(ids) == f"[user]hi{eos}[assistant]"


def test_whole_answers_and_streams_say_the_same(client: Any) -> None:
    first, second = client.generate([7, 20], n=2, max_tokens=5)
    assert first.token_ids == [21, 22, 23, 24, 25]
    assert second.token_ids == [31, 32, 33, 34, 35]
    assert first.logprobs == [-0.5] * 5
    assert first.weight_versions == [{"version": "default", "start": 0, "end": 5, "epoch": 0, "kv": "current"}]
    streamed = [len(piece.token_ids) for piece in client.stream([7, 20], "once", max_tokens=5)]
    assert streamed == sorted(streamed)
    *_, last = client.stream([7, 20], "again", max_tokens=5)
    assert last == first


def test_versions_of_an_update_in_between(client: Any) -> None:
    *_, last = client.stream([fake_engine.RELABEL, 20], "crosses", max_tokens=4)
    spans = [(span["version"], span["start"], span["end"]) for span in last.weight_versions]
    assert spans == [("v7", 0, 2), ("v8", 2, 3), ("v8", 3, 4)]


def test_an_abort_keeps_what_there_is(client: Any, server: RunningServer) -> None:
    for piece in client.stream([fake_engine.SLOW, 20], "doomed", max_tokens=1000):
        if len(piece.token_ids) == 2:
            client.abort("doomed")
        last = piece
    assert last.finish_reason == "abort"
    assert 2 <= len(last.token_ids) == len(last.logprobs) == last.weight_versions[-1]["end"] < 1000
    eventually(lambda: server.stats()["running"] == 0)


def test_leaving_the_loop_ends_the_request(client: Any, server: RunningServer) -> None:
    stream = client.stream([fake_engine.SLOW, 20], "left", max_tokens=1000)
    next(stream)
    before = server.stats()["aborted"]
    stream.close()
    eventually(lambda: server.stats()["running"] == 0)
    assert len(server.stats()["aborted"]) == len(before) + 1, "it did not end by itself"


def test_refusals_are_told_in_the_servers_words(client: Any) -> None:
    with pytest.raises(RuntimeError, match=r"400: .*max_tokens must be at least 1, got 0"):
        client.generate([7], max_tokens=0)
    with pytest.raises(RuntimeError, match=r"400: .*max_tokens must be at least 1, got 0"):
        next(client.stream([7], "refused", max_tokens=0))
    with pytest.raises(RuntimeError, match="engine"):
        list(client.stream([fake_engine.DIE, 20], "dies", max_tokens=100))


@pytest.mark.long
@pytest.mark.smollm2
def test_it_asks_a_real_model(smollm2: Path, tmp_path: Path) -> None:
    question = "What is the capital of France?"
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    greedy = model.generate(**prompt, max_new_tokens=10, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    with serve(smollm2, tmp_path / "log", "--enable-scale-out", "--dtype", "float32", "--num-threads", "1") as url:
        command = [sys.executable, FILE, smollm2, question, "--url", url, "--max-tokens", "10"]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(tokenizer.decode(greedy, skip_special_tokens=True) + "\n\n")
    assert f"\n{len(greedy)} tokens, finish_reason " in result.stdout
    assert f"tokens 0 to {len(greedy)}: weights default" in result.stdout
