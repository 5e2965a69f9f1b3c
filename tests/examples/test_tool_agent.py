"""examples/tool_agent.py: a training sequence of several turns is what was sampled, and every list stays aligned."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import tool_agent as agent
import torch
from transformers import AutoTokenizer

from rollout.launch import serve
from tests.support import tiny_models
from tests.support.engine_utils import TOLERANCE, prompt
from tests.support.push_reference import single
from trainer_bridge import RolloutClient
from trainer_bridge.loop import metrics
from trainer_bridge.push.publisher import Publisher

FLAGS = ["--enable-scale-out", "--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--max-model-len", "512"]
BLOCK = 4


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutClient]:
    folder = tmp_path_factory.mktemp("agent")
    model = tiny_models.build("llama", folder / "model")
    with serve(model, folder / "log", *FLAGS, "--block-size", str(BLOCK)) as url, RolloutClient(url) as client:
        yield client


def cached_tokens(client: RolloutClient) -> float:
    """Prompt tokens that the prefix cache gave, in all."""
    return metrics.of_server(client)["server/prefix_hit_tokens"]


def test_turns_with_a_tool_make_one_aligned_sequence(client: RolloutClient) -> None:
    """The weights change after the second of four turns: every logprob is that of the weights its version names."""
    models = {"step-0": tiny_models.model("llama", 0), "step-1": tiny_models.model("llama", 1)}
    first, inserted = prompt(21), [prompt(length, seed=7) for length in (5, 3, 9)]
    turns: list[tuple[list[int], float]] = []

    with Publisher(client, models["step-0"]) as before, Publisher(client, models["step-1"]) as after:
        before.publish(0)

        def reply(answer: list[int]) -> list[int] | None:
            turns.append((answer, cached_tokens(client)))
            if len(turns) == 2:
                after.publish(1)
            return inserted[len(turns) - 1] if len(turns) <= len(inserted) else None

        params = {"max_tokens": 80, "stop_token_ids": list(range(2, 256, 9)), "seed": 5}
        start = cached_tokens(client)
        sequence = agent.run_episode(client, first, reply, params)

    pieces: list[tuple[bool, list[int]]] = [(False, first)]
    for (answer, _), said in zip(turns, [*inserted, []], strict=False):
        pieces += [(True, answer), (False, said)]
    assert len(turns) == 4
    assert sequence.token_ids == [token for _, piece in pieces for token in piece]
    assert sequence.loss_mask == [sampled for sampled, piece in pieces for _ in piece]
    versions = [version for version, _ in groupby(v for v in sequence.versions if v is not None)]
    assert versions == ["step-0", "step-1"]
    for at, (sampled, version, logprob) in enumerate(
        zip(sequence.loss_mask, sequence.versions, sequence.logprobs, strict=True)
    ):
        assert sampled == (version is not None)
        if version is None:
            assert logprob == 0
            continue
        expected = single(models[version], sequence.token_ids[:at], sequence.token_ids[at : at + 1])
        torch.testing.assert_close(torch.tensor([logprob]), expected, atol=TOLERANCE, rtol=0)

    counts = [start, *(count for _, count in turns)]
    hits = [now - then for then, now in pairwise(counts)]
    ends = [len(first) + len(turns[0][0])]  # of each turn, in the sequence
    for (answer, _), said in zip(turns[1:], inserted, strict=True):
        ends.append(ends[-1] + len(said) + len(answer))
    known = [
        0,
        ends[0] - 1,
        0,
        ends[2] - 1,
    ]  # the last token wasn't computed; new weights start anew
    assert hits == [tokens // BLOCK * BLOCK for tokens in known]


def test_an_answer_that_is_cut_off_ends_the_episode(client: RolloutClient) -> None:
    def reply(answer: list[int]) -> list[int]:
        raise AssertionError("it asked for more")

    sequence = agent.run_episode(client, prompt(5), reply, {"max_tokens": 3, "ignore_eos": True})
    assert sequence.loss_mask == [False] * 5 + [True] * 3


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens came with 2 logprobs and 3 versions"):
        agent.Trajectory().append([1, 2, 3], [-1.0, -2.0], ["a", "a", "a"])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("calc(17*24)", "calc(17*24) = 408"),
        ("Let me see: calc( -3 + 2.5/4 ).", "calc( -3 + 2.5/4 ) = -2.375"),
        ("The result is 408.", None),
        ("calc(1/0)", "calc(1/0) failed: division by zero"),
        ("calc(9**9**9)", "calc(9**9**9) failed: only numbers and + - * / are understood, not '9 ** 9 ** 9'"),
        ("calc(x)", "calc(x) failed: only numbers and + - * / are understood, not 'x'"),
    ],
)
def test_the_calculator_calculates_and_does_nothing_else(answer: str, said: str | None) -> None:
    assert agent.calculator(answer) == said


class Chat:
    """Answers of a chat endpoint, one after the other."""

    def __init__(self, *turns: tuple[list[int], list[int]]) -> None:
        self._turns = list(turns)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        prompt, answer = self._turns.pop(0)
        choice = {
            "token_ids": answer,
            "logprobs": {"content": [{"logprob": -1.0} for _ in answer]},
            "weight_versions": [{"version": "v", "start": 0, "end": len(answer)}],
            "message": {"content": "calc(1+1)"},
            "finish_reason": "stop",
        }
        return {"prompt_token_ids": prompt, "choices": [choice]}


def test_a_chat_that_was_tokenized_to_other_tokens_is_refused() -> None:
    fine = Chat(([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]))
    assert agent.run_chat_episode(fine, [], agent.calculator, {}, max_turns=2).token_ids == [1, 2, 3, 4, 5, 6]
    merged = Chat(([1, 2], [3, 4]), ([1, 2, 34, 5], [6]))
    with pytest.raises(ValueError, match="turn 1: the chat was tokenized to other tokens than were sampled, from 2 on"):
        agent.run_chat_episode(merged, [], agent.calculator, {}, max_turns=2)


@pytest.mark.long
@pytest.mark.smollm2
def test_a_real_model_uses_the_calculator_and_chat_gives_the_same_sequence(smollm2: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [*agent.SHOTS, {"role": "user", "content": "What is 17 times 24?"}]
    params = {"max_tokens": 24, "temperature": 0.0}

    def reply(answer: list[int]) -> list[int] | None:
        said = agent.calculator(tokenizer.decode(answer, skip_special_tokens=True))
        return None if said is None else agent.ids_between(tokenizer, said)

    with serve(smollm2, tmp_path / "log", *FLAGS) as url, RolloutClient(url) as client:
        by_tokens = agent.run_episode(client, agent.chat_ids(tokenizer, messages), reply, params)
        by_chat = agent.run_chat_episode(client, messages, agent.calculator, params)
    text = tokenizer.decode(by_tokens.token_ids)
    assert "assistant\ncalc(17*24)<|im_end|>\n<|im_start|>user\ncalc(17*24) = 408<|im_end|>" in text
    assert text.rpartition("assistant\n")[2].count("408") == 1
    assert by_chat.token_ids == by_tokens.token_ids
    assert by_chat.loss_mask == by_tokens.loss_mask
    assert by_chat.versions == by_tokens.versions
    torch.testing.assert_close(torch.tensor(by_chat.logprobs), torch.tensor(by_tokens.logprobs), atol=1e-4, rtol=0)
