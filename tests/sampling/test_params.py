"""Which sampling parameters are served, and how a refusal names the field and the value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rollout.sampling.params import MAX_SEED, ParameterError, SamplingParams

LIMITS = {"vocab_size": 100, "max_logprobs": 20, "max_num_seqs": 8}


def refusal(values: dict[str, Any], **limits: int) -> ParameterError | None:
    """None where they are served."""
    try:
        SamplingParams(**values).validate(**{**LIMITS, **limits})
    except ParameterError as error:
        return error
    return None


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 1, "seed": MAX_SEED},
        {"temperature": 2, "top_p": 1e-9, "top_k": 10**6, "presence_penalty": -2, "frequency_penalty": 2},
        {"n": 8, "max_tokens": 3, "min_tokens": 3, "logprobs": 20, "prompt_logprobs": 0, "repetition_penalty": 1e-3},
        {"allowed_token_ids": [0, 99], "stop_token_ids": [99], "logit_bias": {99: -100.0}, "stop": ["x"]},
    ],
)
def test_served(values: dict[str, Any]) -> None:
    assert refusal(values) is None


@pytest.mark.parametrize(
    ("values", "param", "said"),
    [
        ({"temperature": 2.01}, "temperature", "2.01"),
        ({"temperature": -1e-9}, "temperature", "-1e-09"),
        ({"temperature": math.nan}, "temperature", "nan"),
        ({"top_p": 0.0}, "top_p", "top_p must be in (0, 1], got 0.0. (parameter=top_p, value=0.0)"),
        ({"top_p": 1.1}, "top_p", "1.1"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"min_p": 1.5}, "min_p", "1.5"),
        ({"presence_penalty": 2.5}, "presence_penalty", "2.5"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "-2.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty", "inf"),
        ({"seed": MAX_SEED + 1}, "seed", "2^63"),
        ({"seed": -2}, "seed", "-1"),
        ({"n": 0}, None, "n must be at least 1, got 0."),
        ({"n": 3, "temperature": 0}, None, "n must be 1 when using greedy sampling, got 3."),
        ({"n": 9}, "n", "max_num_seqs (8)"),
        ({"max_tokens": 0}, "max_tokens", "(parameter=max_tokens, value=0)"),
        ({"min_tokens": -1}, "min_tokens", "-1"),
        ({"min_tokens": 20, "max_tokens": 5}, None, "less than or equal to max_tokens=5, got 20."),
        ({"logprobs": 25}, "logprobs", "Requested sample logprobs of 25, which is greater than max allowed: 20"),
        ({"logprobs": -1}, "logprobs", "Requested sample logprobs of 100, which is greater than max allowed: 20"),
        ({"logprobs": -2}, "logprobs", "-2"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "Requested prompt logprobs of 21"),
        ({"stop_token_ids": [1, 100]}, "stop_token_ids", "[100]"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "[-1]"),
        ({"logit_bias": {1: math.inf}}, "logit_bias", "inf"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
        ({"allowed_token_ids": [100]}, "allowed_token_ids", "[100]"),
        ({"stop": ["a", ""]}, None, "stop cannot contain an empty string."),
        ({"stop": ["a"], "detokenize": False}, None, "Set detokenize=True to use stop."),
        ({"bad_words": [""]}, "bad_words", "empty"),
    ],
)
def test_refused(values: dict[str, Any], param: str | None, said: str) -> None:
    error = refusal(values)
    assert error is not None
    assert error.param == param
    assert said in str(error)


def test_the_whole_vocabulary_of_logprobs_needs_a_limit_that_allows_it() -> None:
    whole = {"logprobs": -1, "prompt_logprobs": -1}
    refused = {allowed: refusal(whole, max_logprobs=allowed) is not None for allowed in (-1, 99, 100)}
    assert refused == {-1: False, 99: True, 100: False}


@pytest.mark.parametrize(
    "values",
    [
        {"allowed_token_ids": [5] * 101},
        {"stop_token_ids": [5] * 101},
        {"bad_words": ["x"] * 4097},
        {"bad_words": ["x" * 257]},
    ],
)
def test_a_list_that_every_step_would_pay_for_is_bounded(values: dict[str, Any]) -> None:
    (name,) = values
    error = refusal(values)
    assert error is not None
    assert error.param == name
    assert "101 ids" in str(error) or "at most" in str(error)
