"""Choices that end because there is no token to sample: filters that leave none, logits that aren't numbers."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.engine.engine import Engine
from rollout.messages import AddRequest
from rollout.outputs import FinishReason, TokenOutput
from rollout.sampling import sampler
from rollout.sampling.params import SamplingParams
from tests.support import tiny_models
from tests.support.engine_utils import engine, ids, prompt, request, run


@pytest.fixture
def served(tmp_path: Path) -> Engine:
    return engine(tiny_models.build("llama", tmp_path / "model"))


def ended(outputs: list[TokenOutput]) -> tuple[int | None, FinishReason | None, int | str | None]:
    last = outputs[-1]
    return last.token_id, last.finish_reason, last.stop_reason


def test_a_choice_whose_filters_leave_no_token_ends_with_an_error_and_not_with_token_0(served: Engine) -> None:
    params = SamplingParams(max_tokens=8, allowed_token_ids=[65, 66], bad_words=["AA", "AB", "BA", "BB"], n=2)
    words = [[65, 65], [65, 66], [66, 65], [66, 66]]
    hopeless = AddRequest(request_id="a", prompt_token_ids=[5], sampling_params=params, bad_words_token_ids=words)
    outputs = run(served, [hopeless, request("b", prompt(9))])
    for index in range(2):
        first, *_ = ids(outputs["a", index])
        assert ids(outputs["a", index]) == [first]
        assert first in (65, 66)
        assert ended(outputs["a", index]) == (None, FinishReason.ERROR, sampler.NO_TOKEN_LEFT)
    assert len(ids(outputs["b", 0])) == 8
    assert served.stats["finished_error"] == 2


@torch.inference_mode()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_overflow_end_a_choice_with_an_error_and_one_warning_an_epoch(
    served: Engine, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = served.runner.model
    model.get_output_embeddings().weight[7] = 3e38  # finite, as a push asks
    model.get_output_embeddings().weight[8] = -3e38  # one of the two is +inf
    model.get_decoder().norm.weight *= 1e4  # in whatever order the products are summed
    served.runner.packed.pack(served.runner.parameters.live)
    with caplog.at_level(logging.WARNING):
        for name in "ab":
            outputs = run(served, [request(name, prompt(9), temperature=temperature)])
            assert ended(outputs[name, 0]) == (None, FinishReason.ERROR, sampler.NOT_FINITE)
            assert ids(outputs[name, 0]) == []
        assert len(caplog.records) == 1
        assert sampler.NOT_FINITE in caplog.text
        served.store.epoch += 1
        run(served, [request("c", prompt(9), temperature=temperature)])
        assert len(caplog.records) == 2
    assert served.stats["finished_error"] == 3


@torch.inference_mode()
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"logprobs": 2}, {"top_p": 0.9}, {"allowed_token_ids": [3]}])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_one_logit_that_is_no_number_ends_a_choice_whatever_is_asked_of_it(
    served: Engine, broken: float, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single -inf, which is an overflow too, used to be a token that is not sampled."""
    forward = served.runner.forward

    def overflowing(*arguments: Any) -> torch.Tensor:
        logits = forward(*arguments).clone()
        logits[:, 7] = broken
        return logits

    monkeypatch.setattr(served.runner, "forward", overflowing)
    outputs = run(served, [request("a", prompt(9), **params)])
    assert ended(outputs["a", 0]) == (None, FinishReason.ERROR, sampler.NOT_FINITE)
    assert served.stats["finished_error"] == 1


@torch.inference_mode()
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_logprobs_of_prompt_rows_that_are_no_numbers_were_told_as_if_they_were(
    served: Engine, broken: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = served.runner.forward

    def overflowing(*arguments: Any) -> torch.Tensor:
        logits = forward(*arguments)
        if len(logits) > 2:  # the prompt's rows; the last, which samples, stays as it is
            logits[2] = broken
        return logits

    monkeypatch.setattr(served.runner, "forward", overflowing)
    outputs = run(served, [request("a", prompt(9), n=2, prompt_logprobs=0)])
    for index in range(2):
        assert ended(outputs["a", index]) == (None, FinishReason.ERROR, sampler.NOT_FINITE)
        assert [output.prompt_logprobs for output in outputs["a", index]] == [None]
    assert served.stats["finished_error"] == 2
    assert len(ids(run(served, [request("b", prompt(9))])["b", 0])) == 8
