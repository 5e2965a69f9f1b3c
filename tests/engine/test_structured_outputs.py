"""Structured outputs in the engine: answers follow their schema; logprobs are of the distribution under the mask."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine.engine import Engine
from rollout.messages import AbortRequests, AddRequest
from rollout.outputs import FinishReason, TokenOutput, mask_ids
from rollout.sampling.params import Thinking
from rollout.sampling.sampler import NO_TOKEN_LEFT
from tests.support import schemas, tiny_models, tiny_tokenizers
from tests.support.engine_utils import engine, ids, logprobs, prompt, run, teacher_forced
from trainer_bridge.score import replay

TOKENIZER = tiny_tokenizers.of_tiny_models()
PROCESSED = {"logprobs_mode": "processed_logprobs"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return schemas.build(tmp_path_factory.mktemp("structured") / "model")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_models.model("llama")


@pytest.fixture(scope="module")
def served(folder: Path) -> Engine:
    return engine(folder, **PROCESSED)


def text(outputs: list[TokenOutput]) -> str:
    decoded: str = TOKENIZER.decode(ids(outputs), skip_special_tokens=True)
    return decoded


def check_answers(served: Engine, seeds: range) -> None:
    """One answer for each of these seeds' schemas."""
    made = {f"s{seed}": schemas.top(random.Random(seed)) for seed in seeds}
    requests = [
        schemas.request(name, prompt(5, place), {"json": schema, "disable_any_whitespace": True}, max_tokens=230)
        for place, (name, schema) in enumerate(made.items())
    ]
    outputs = run(served, requests)
    for name, schema in made.items():
        answer = outputs[name, 0]
        assert answer[-1].finish_reason == FinishReason.STOP, (schema, text(answer))
        jsonschema.validate(json.loads(text(answer)), schema)


def test_answers_of_random_schemas_parse_and_validate(served: Engine) -> None:
    check_answers(served, range(30))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_answers_of_a_thousand_random_schemas_parse_and_validate(served: Engine) -> None:
    for start in range(100, 1100, 100):
        check_answers(served, range(start, start + 100))


STRUCTURES: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}},
    {"regex": "[a-d]{4,12}( and [x-z]+)?"},
    {"choice": ["ab", "aab", "ba", "true", "trunk"]},
]
MORE: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_p": 0.9}, {"frequency_penalty": 0.5, "logit_bias": {97: 2}}]


@pytest.mark.parametrize("more", MORE)
def test_the_ratio_of_an_unchanged_policy_under_the_recorded_mask_is_one(
    served: Engine, model: PreTrainedModel, more: dict[str, Any]
) -> None:
    requests = [
        schemas.request(f"r{i}", prompt(7, i), structure, n=3, max_tokens=24, **more)
        for i, structure in enumerate(STRUCTURES)
    ]
    outputs = run(served, requests)
    narrowed = 0
    for item in requests:
        sent = {"n": 3, "structured_outputs": STRUCTURES[int(item.request_id[1:])], **more}
        for index in range(3):
            choice = [output for output in outputs[item.request_id, index] if output.token_id is not None]
            masks = [None if o.sampling_mask is None else mask_ids(o.sampling_mask).tolist() for o in choice]
            assert None not in masks
            narrowed += sum(len(mask or ()) < 128 for mask in masks)
            logits = teacher_forced(model, item.prompt_token_ids, ids(choice))
            again = replay.logprobs(
                logits, ids(choice), sampling_params=sent, sampling_mask=masks, prompt_token_ids=item.prompt_token_ids
            )
            torch.testing.assert_close(again, logprobs(choice), atol=1e-4, rtol=0)
            ratios = replay.importance_ratios(again, logprobs(choice))
            assert ratios.mean().item() == pytest.approx(1, abs=1e-4)
    assert narrowed > 20


def test_thinking_is_free_and_the_grammar_holds_after_its_end(
    served: Engine, model: PreTrainedModel, folder: Path
) -> None:
    free = AddRequest(
        request_id="free",
        prompt_token_ids=prompt(7),
        sampling_params=schemas.SamplingParams(max_tokens=16, seed=3, logprobs=0, n=2),
        return_sampling_mask=True,
    )
    spoken = run(served, [free])
    end = next(token for token in ids(spoken["free", 0])[4:] if token not in ids(spoken["free", 0])[:4])
    held = schemas.request("held", prompt(7), {"regex": "[a-d]{6}"}, n=2, max_tokens=40, seed=3)
    held.thinking = Thinking(end)
    beside = schemas.request("beside", prompt(7), {"regex": "[a-d]{6}"}, n=2, max_tokens=40, seed=3)
    outputs = run(served, [held, beside])
    thought = ids(outputs["held", 0]).index(end) + 1
    assert 4 < thought <= 16
    for got, expected in zip(outputs["held", 0][:thought], spoken["free", 0], strict=False):
        assert (got.token_id, got.sampling_mask) == (expected.token_id, None)
        assert got.logprobs
        assert expected.logprobs
        assert got.logprobs[0].logprob == pytest.approx(expected.logprobs[0].logprob, abs=1e-4)
    answer = outputs["held", 0][thought:]
    assert re.fullmatch("[a-d]{6}", text(answer))
    assert all(output.sampling_mask is not None for output in [*answer, *outputs["beside", 0]])
    masks = [None if o.sampling_mask is None else mask_ids(o.sampling_mask).tolist() for o in outputs["held", 0]]
    again = replay.logprobs(
        teacher_forced(model, held.prompt_token_ids, ids(outputs["held", 0])),
        ids(outputs["held", 0]),
        sampling_params={"structured_outputs": {"regex": "[a-d]{6}"}},
        sampling_mask=masks,
    )
    torch.testing.assert_close(again, logprobs(outputs["held", 0]), atol=1e-4, rtol=0)

    held.request_id, held.thinking = "begins", Thinking(end, begin=ord("Z"))
    held.sampling_params.logit_bias = {ord("Z"): 100.0}
    (first, *rest) = run(served, [held])["begins", 0]
    assert first.token_id == ord("Z")
    held_only = mask_ids(outputs["beside", 0][0].sampling_mask or b"").tolist()
    assert mask_ids(first.sampling_mask or b"").tolist() == sorted([*held_only, ord("Z")])
    assert rest[0].sampling_mask is not None  # of the bias
    assert len(mask_ids(rest[0].sampling_mask)) == 256


def test_a_trainer_without_the_mask_is_told_that_tokens_were_dropped() -> None:
    asked = {"structured_outputs": {"regex": "a+"}}
    with pytest.raises(ValueError, match="structured_outputs dropped tokens"):
        replay.logprobs(torch.zeros(1, 8), [1], sampling_params=asked)
    with pytest.raises(ValueError, match="structured_outputs="):
        replay.check_logprobs_mode("raw_logprobs", asked)


def test_raw_logprobs_are_those_of_the_logits_as_they_came(folder: Path, model: PreTrainedModel) -> None:
    item = schemas.request("r", prompt(7), {"regex": "[a-c]{6}"})
    choice = run(engine(folder), [item])["r", 0]
    expected = teacher_forced(model, item.prompt_token_ids, ids(choice)).log_softmax(-1)
    expected = expected.gather(-1, torch.tensor(ids(choice))[:, None])[:, 0]
    torch.testing.assert_close(logprobs(choice), expected, atol=1e-4, rtol=0)
    assert len(text(choice)) == 6
    assert choice[-1].token_id == tiny_models.EOS_TOKEN_ID


def test_groups_and_preempted_choices_say_what_they_say_in_peace(folder: Path) -> None:
    requests = [
        schemas.request(f"r{i}", prompt(9, i), structure, n=4, seed=i, max_tokens=40)
        for i, structure in enumerate([*STRUCTURES, *STRUCTURES])
    ]
    exact: dict[str, Any] = {"batch_invariant": True, "attention_backend": "torch", **PROCESSED}
    tight = engine(
        folder, num_gpu_blocks_override=36, max_model_len=64, max_num_seqs=10, max_num_batched_tokens=16, **exact
    )
    crowded = run(tight, requests)
    assert tight.stats["preemptions"] > 0
    assert tight.stats["forked_sequences"] > 0
    roomy = engine(folder, num_gpu_blocks_override=600, max_model_len=64, max_num_seqs=24, **exact)
    for item in requests:
        for key, choice in run(roomy, [item]).items():
            assert [(o.token_id, o.logprobs, o.sampling_mask) for o in choice] == [
                (o.token_id, o.logprobs, o.sampling_mask) for o in crowded[key]
            ]


def test_rows_without_a_grammar_sample_what_they_sample_alone(folder: Path, served: Engine) -> None:
    free = [AddRequest(request_id=f"f{i}", prompt_token_ids=prompt(6, i), sampling_params=params()) for i in range(3)]
    held = [schemas.request("h", prompt(6), STRUCTURES[0], n=2)]
    mixed, alone = run(served, [*free, *held]), run(served, free)
    for i in range(3):
        assert ids(mixed[f"f{i}", 0]) == ids(alone[f"f{i}", 0])


def params() -> Any:
    return schemas.SamplingParams(max_tokens=30, seed=5)


def test_min_tokens_beyond_the_grammar_leave_no_token(served: Engine) -> None:
    last = run(served, [schemas.request("r", prompt(5), {"choice": ["ab"]}, min_tokens=9)])["r", 0][-1]
    assert (last.token_id, last.finish_reason, last.stop_reason) == (None, FinishReason.ERROR, NO_TOKEN_LEFT)


def test_a_stop_token_that_the_grammar_has_ends_a_choice_within_it(served: Engine) -> None:
    item = schemas.request("r", prompt(5), {"regex": "a{3}z{90}"}, stop_token_ids=[ord("z")])
    choice = run(served, [item])["r", 0]
    assert text(choice) == "aaaz"
    assert choice[-1].stop_reason == ord("z")


def test_a_grammar_that_reaches_a_limit_ends_its_choice_and_says_so(served: Engine) -> None:
    rules = "\n".join(f'r{i}: "a" r{i * 7 % 500}?' for i in range(500))
    wild = schemas.request("w", prompt(5), {"grammar": f"start: {' '.join(f'r{i}?' for i in range(500))}\n{rules}"})
    outputs = run(served, [wild, schemas.request("r", prompt(5), {"choice": ["ab"]})])
    assert text(outputs["r", 0]) == "ab"
    last = outputs["w", 0][-1]
    assert last.finish_reason == FinishReason.ERROR
    assert str(last.stop_reason).startswith("no token is left by structured_outputs: ")


def test_a_request_whose_grammar_cannot_be_had_ends_alone(served: Engine) -> None:
    broken = schemas.request("b", prompt(5), {"choice": ["ab"]}, n=2)
    broken.grammar = "start: missing"
    outputs = run(served, [broken, schemas.request("r", prompt(5), {"choice": ["ab"]})])
    assert text(outputs["r", 0]) == "ab"
    for index in range(2):
        (only,) = outputs["b", index]
        assert only.finish_reason == FinishReason.ERROR
        assert "structured_outputs can't be served: " in str(only.stop_reason)


def test_a_request_is_aborted_while_its_grammar_is_compiled(served: Engine) -> None:
    served.add_request(schemas.request("a", prompt(5), {"regex": "a+"}, n=2))
    assert served.has_work
    ended = served.abort(AbortRequests(["a", "unknown"]))
    assert [(o.request_id, o.index, o.finish_reason) for o in ended] == [("a", i, FinishReason.ABORT) for i in range(2)]
    assert not served.has_work
    assert served.step() == []
