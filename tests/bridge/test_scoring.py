"""A group scored in one row: the logits, bits and gradients of a pass of its own for each answer."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from tests.support import tiny_models
from trainer_bridge.client import Choice
from trainer_bridge.rollouts import Prompt, RolloutGroup
from trainer_bridge.score import exact, replay
from trainer_bridge.score.groups import current_gap, group_logits, score_group

LENGTHS = (7, 1, 140, 2)
PROCESSED = "processed_logprobs"
PARTS = (slice(0, 5), slice(5, 8))


def group(prompt_length: int = 11, lengths: tuple[int, ...] = LENGTHS) -> tuple[list[int], list[list[int]]]:
    rng = random.Random(0)
    prompt = [rng.randrange(2, 256) for _ in range(prompt_length)]
    return prompt, [[rng.randrange(2, 256) for _ in range(length)] for length in lengths]


def one_by_one(model: PreTrainedModel, prompt: list[int], answers: list[list[int]]) -> torch.Tensor:
    rows = [model(torch.tensor([prompt + a]), use_cache=False).logits[0, len(prompt) - 1 : -1] for a in answers]
    return torch.cat(rows)


def choice(answer: list[int]) -> Choice:
    return Choice(0, answer, [-1.0] * len(answer), None, [], "stop", None)


def sampled(prompt: list[int], answers: list[list[int]], params: dict[str, Any]) -> RolloutGroup:
    return RolloutGroup(Prompt(prompt), params, [choice(a) for a in answers], [0.0] * len(answers), PROCESSED)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_stock_model_gives_the_logits_of_a_pass_for_each_answer(name: str) -> None:
    model = tiny_models.model(name)
    with torch.no_grad():
        together, hidden = group_logits(model, *group(), hidden=True)
        torch.testing.assert_close(together, one_by_one(model, *group()), atol=1e-4, rtol=0)
        assert hidden is not None
        torch.testing.assert_close(model.get_output_embeddings()(hidden), together)  # what the head was given


@pytest.mark.parametrize(
    ("name", "implementation"), [("llama", "eager"), ("llama", "sdpa"), ("gemma2", "eager"), ("qwen3_moe", "eager")]
)
def test_eager_attention_had_a_bool_mask_added_to_its_scores(name: str, implementation: str) -> None:
    """Gemma 2 takes eager attention unless told otherwise; its row is shorter than its sliding windows here."""
    model = tiny_models.model(name)
    model.set_attn_implementation(implementation)
    prompt, answers = group(4, (3, 1, 2))
    with torch.no_grad():
        together, _ = group_logits(model, prompt, answers)
        torch.testing.assert_close(together, one_by_one(model, prompt, answers), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_an_exact_model_gives_the_bits_of_right_padded_rows(name: str) -> None:
    """These are the server's (tests/test_exact_*); sliding windows and prompts of several chunks included."""
    model = exact.install(tiny_models.model(name))
    for prompt, answers in (group(), group(150, (30, 1, 3)), group(1, (20, 9))):
        ids = pad_sequence([torch.tensor(prompt + answer) for answer in answers], batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(prompt + answer) for answer in answers])[:, None]
        with torch.no_grad():
            together, _ = group_logits(model, prompt, answers)
            tables = model(input_ids=ids, attention_mask=mask.long()).logits[:, len(prompt) - 1 :]
        padded = torch.cat([table[: len(answer)] for table, answer in zip(tables, answers, strict=True)])
        assert torch.equal(together, padded)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_gradients_of_the_shared_prompt_add_up(name: str) -> None:
    plain, shared = tiny_models.model(name), exact.install(tiny_models.model(name))
    plain.set_attn_implementation("eager")
    prompt, answers = group(lengths=(7, 1, 12, 2))
    target = torch.tensor([token for answer in answers for token in answer])
    torch.nn.functional.cross_entropy(one_by_one(plain, prompt, answers), target).backward()
    torch.nn.functional.cross_entropy(group_logits(shared, prompt, answers)[0], target).backward()
    for (parameter, expected), got in zip(plain.named_parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(
            got.grad, expected.grad, atol=2e-5, rtol=1e-3, msg=lambda m, p=parameter: f"{p}: {m}"
        )


def test_logprobs_are_replayed_and_entropies_are_the_policys_own() -> None:
    model = tiny_models.model("llama")
    prompt, answers = group(lengths=(5, 3))
    params = {"temperature": 0.7, "repetition_penalty": 1.2, "seed": 3}
    scores = score_group(model, sampled(prompt, answers, params))
    tables = one_by_one(model, prompt, answers)
    bounds = [0, 5, 8]
    expected = [
        replay.logprobs(tables[start:end], answer, sampling_params=params, prompt_token_ids=prompt)
        for (start, end), answer in zip(pairwise(bounds), answers, strict=True)
    ]
    torch.testing.assert_close(scores.logprobs, torch.cat(expected), atol=1e-4, rtol=0)
    assert scores.logprobs.requires_grad
    own = torch.distributions.Categorical(logits=tables).entropy()
    torch.testing.assert_close(scores.entropies, own, atol=1e-4, rtol=0)
    assert not scores.entropies.requires_grad
    assert scores.hidden is None


def test_the_current_gap_is_that_of_tokens_without_a_lag() -> None:
    model = tiny_models.model("llama")
    prompt, answers = group(lengths=(5, 3))
    params = {"temperature": 0.9}
    own = score_group(model, sampled(prompt, answers, params)).logprobs.detach()
    off = torch.tensor([0.5, 0.0, 0.25, 0.0, 0.0, 0.0, -0.125, 0.0])
    lags = torch.tensor([1.0, 0, 2, 0, 0, 0, 0, float("inf")])
    choices = [replace(choice(a), logprobs=(own + off).tolist()[s]) for a, s in zip(answers, PARTS, strict=True)]
    current = RolloutGroup(Prompt(prompt), params, choices, [0.0, 1.0], PROCESSED)
    assert current_gap(model, current, lambda _: lags) == pytest.approx(0.125, abs=1e-6)
    assert current_gap(model, current, lambda _: lags + 1) is None
    assert current_gap(model, None, lambda _: lags) is None


def test_a_stock_model_with_sliding_windows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Mistral.* sliding windows of 12 positions, and the group's row has 157"):
        group_logits(tiny_models.model("mistral"), *group())


def test_attention_that_may_not_take_the_mask_is_refused_by_name() -> None:
    model = tiny_models.model("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has the attention 'flex_attention', .*'sdpa' or 'eager'"):
        group_logits(model, *group())
    model = tiny_models.model("gemma2")
    model.config.layer_types = ["linear_attention", *model.config.layer_types[1:]]
    with pytest.raises(ValueError, match="Gemma2ForCausalLM has layers of kind linear_attention"):
        group_logits(model, *group(4, (3, 1)))


@pytest.mark.parametrize("mode", ["raw_logprobs", None])
def test_logprobs_of_another_distribution_were_scored_silently(mode: str | None) -> None:
    model = tiny_models.model("llama")
    prompt, answers = group(lengths=(3, 2))
    odd = {"temperature": 0.5, "top_p": 0.9, "frequency_penalty": 0.1}
    with pytest.raises(ValueError, match=r"temperature=0\.5, frequency_penalty=0\.1, top_p=0\.9: .*processed_logprobs"):
        score_group(model, replace(sampled(prompt, answers, odd), logprobs_mode=mode))
    plain = replace(sampled(prompt, answers, {"temperature": 1.0, "top_p": 1, "max_tokens": 3}), logprobs_mode=mode)
    assert len(score_group(model, plain).logprobs) == 5


def test_a_piece_that_continues_more_than_there_is_is_refused() -> None:
    model = exact.install(tiny_models.model("llama"))
    with pytest.raises(ValueError, match="restarts at position 9, but the last one that began at 0 has only 3 tokens"):
        model(input_ids=torch.tensor([[3, 4, 5, 6]]), position_ids=torch.tensor([[0, 1, 2, 9]]))
