"""Logprobs of the tokens a request names, against the log-softmax of transformers' logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rollout.fleet.connection import run_engine
from rollout.sampling.logprobs import NO_LOGPROB
from rollout.sampling.params import ParameterError, SamplingParams
from rollout.sampling.rows import RequestFilters, SamplingRow
from rollout.sampling.sampler import Sampler
from tests.support import tiny_models
from tests.support.engine_utils import TOLERANCE, engine, ids, prompt, request, run, teacher_forced
from tests.support.server_harness import RunningServer, running_server

NAMED = [9, 200, 9, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("llama"))


def test_the_sampled_token_then_the_named_ones_with_their_ranks(folder: Path) -> None:
    items = [
        request("named", prompt(9), logprobs=None, logprob_token_ids=NAMED),
        request("top", prompt(9, 1), logprobs=3),
        request("other", prompt(9, 2), logprobs=1, logprob_token_ids=[7]),
    ]
    outputs = run(engine(folder), items)
    model = tiny_models.model("llama")
    for item, named in ((items[0], NAMED), (items[2], [7])):
        choice = outputs[item.request_id, 0]
        expected = teacher_forced(model, item.prompt_token_ids, ids(choice)).log_softmax(-1)
        for output, row in zip(choice, expected, strict=True):
            assert output.logprobs is not None
            assert [e.token_id for e in output.logprobs] == list(dict.fromkeys([output.token_id, *named]))
            for entry in output.logprobs:
                assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=TOLERANCE)
                assert entry.rank == 1 + (row > row[entry.token_id]).sum()
    assert all(len(output.logprobs or []) in (3, 4) for output in outputs["top", 0])


def test_of_the_filtered_distribution_in_that_mode() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]])
    params = SamplingParams(top_k=2, temperature=0.5, logprob_token_ids=[0, 3, 2])
    (sampled,) = Sampler("processed_logprobs").sample(logits, [SamplingRow(RequestFilters(params, [5]), 1, 0)])
    assert sampled.logprobs is not None
    entries = {entry.token_id: (round(entry.logprob, 4), entry.rank) for entry in sampled.logprobs}
    expected = torch.tensor([4.0, 6.0]).log_softmax(-1)
    assert entries == {
        0: (NO_LOGPROB, 3),
        3: (round(expected[0].item(), 4), 2),
        2: (round(expected[1].item(), 4), 1),
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprob_token_ids": [256]}, "outside the vocabulary of 256"),
        ({"logprob_token_ids": [-1]}, "outside the vocabulary"),
        ({"logprob_token_ids": [5] * 129}, "length 129, which is greater than max allowed: 128"),
        ({"logprob_token_ids": [5, 6], "logprobs": 3}, r"logprobs=3, len\(logprob_token_ids\)=2"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message) as refused:
        SamplingParams(**fields).validate(vocab_size=256, max_logprobs=20, max_num_seqs=8)
    assert refused.value.param == "logprob_token_ids"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(model=str(folder), target=run_engine, dtype="float32", num_threads=1) as running:
        yield running


def test_over_http_beyond_max_logprobs(server: RunningServer) -> None:
    named = list(range(10, 40))
    params = {"max_tokens": 3, "temperature": 0, "logprob_token_ids": named}
    body = {"token_ids": prompt(6), "sampling_params": params}
    answer = httpx.post(f"{server.url}/inference/v1/generate", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    for entry in choice["logprobs"]["content"]:
        told = [top["token_id"] for top in entry["top_logprobs"]]
        assert told == list(dict.fromkeys([entry["token_id"], *named]))
    body["sampling_params"] = {**params, "logprobs": 2}
    assert httpx.post(f"{server.url}/inference/v1/generate", json=body).json()["error"]["param"] == "logprob_token_ids"
