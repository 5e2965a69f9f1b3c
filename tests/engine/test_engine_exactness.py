"""What the engine samples, and what it says of it, against transformers' eager teacher-forced forward in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from rollout.engine.engine import Engine
from rollout.messages import AbortRequests, AddRequest
from rollout.outputs import FinishReason, TokenOutput, mask_ids
from tests.support import tiny_models
from tests.support.engine_utils import (
    TOLERANCE,
    Outputs,
    assert_exact,
    engine,
    ids,
    logprobs,
    prompt,
    request,
    run,
    teacher_forced,
)

SECOND_EOS = 77
SMALL = {"num_gpu_blocks_override": 24, "max_model_len": 90, "max_num_seqs": 8}  # a cache of 96 tokens


@dataclass(frozen=True)
class Tiny:
    """A tiny model's folder, and the model as transformers runs it."""

    path: Path
    reference: PreTrainedModel


def tiny(name: str, folder: Path) -> Tiny:
    path = tiny_models.build(name, folder / name)
    GenerationConfig(eos_token_id=[tiny_models.EOS_TOKEN_ID, SECOND_EOS]).save_pretrained(path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return Tiny(path, reference.eval())


@pytest.fixture(scope="module", params=tiny_models.NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def chunking(llama: Tiny) -> Engine:
    """An engine that computes at most 24 tokens a step."""
    return engine(llama.path, max_num_batched_tokens=24)


@pytest.fixture(scope="module")
def crowded(llama: Tiny) -> Engine:
    """An engine whose cache holds 96 tokens."""
    return engine(llama.path, max_num_batched_tokens=16, **SMALL)


@pytest.fixture(scope="module")
def processed(llama: Tiny) -> Engine:
    return engine(llama.path, max_num_batched_tokens=24, logprobs_mode="processed_logprobs")


def counted(engine: Engine, requests: Iterable[AddRequest]) -> tuple[Outputs, Counter[str]]:
    """Run the requests; their outputs, and by how much each counter rose."""
    before = Counter(engine.stats)
    outputs = run(engine, requests)
    return outputs, Counter(engine.stats) - before


# -- the same logprobs, whatever the engine does to be fast


def test_chunks_groups_and_prefix_hits_are_exact(model: Tiny) -> None:
    e = engine(model.path, max_num_batched_tokens=24)
    long = prompt(61)
    assert len(long) > 2 * tiny_models.SLIDING_WINDOW
    first = [request("group", long, n=3, max_tokens=15), request("short", prompt(5)), request("one", prompt(1))]
    outputs, rose = counted(e, first)
    assert_exact(model.reference, first, outputs)
    assert rose["partial_chunks"] >= 2  # 61 tokens, 24 a step
    assert (rose["forked_sequences"], rose["shared_blocks"]) == (2, 2 * (61 // 4))

    again = [request("again", long, n=2), request("longer", long[:41] + prompt(30, seed=1), max_tokens=20)]
    outputs, rose = counted(e, again)
    assert_exact(model.reference, again, outputs)
    assert rose["prefix_hit_tokens"] == 60 + 40
    assert {o.cached_tokens for o in outputs["again", 0] + outputs["again", 1]} == {60}
    assert {o.cached_tokens for o in outputs["longer", 0]} == {40}


def test_requests_of_one_prompt_that_arrive_together_are_those_that_come_alone(model: Tiny) -> None:
    tokens = prompt(61)
    requests = [
        request("greedy", tokens, temperature=0, max_tokens=12),
        request("seeded", tokens, seed=7, logprobs=3, n=2),
        request("short", tokens, temperature=0, max_tokens=1),
        request("masked", tokens, seed=7, top_k=5, mask=True),
        request("stops", tokens, temperature=0, stop_token_ids=[5], logit_bias={5: 100.0}),
    ]
    e = engine(model.path, max_num_batched_tokens=24)
    together, rose = counted(e, requests)
    assert (rose["computed_tokens"], rose["forked_sequences"]) == (61 + rose["sampled_tokens"] - 6, 5)
    assert rose["prefix_hit_tokens"] == 4 * 61
    assert_exact(model.reference, [item for item in requests if item.request_id not in ("masked", "stops")], together)
    plain = engine(model.path, enable_prefix_caching=False)
    for item in requests:
        for index in range(item.sampling_params.n):
            (alone, choice) = run(plain, [item])[item.request_id, index], together[item.request_id, index]
            assert ids(choice) == ids(alone)
            assert [o.sampling_mask for o in choice] == [o.sampling_mask for o in alone]
            assert [len(o.logprobs or ()) for o in choice] == [len(o.logprobs or ()) for o in alone]
            assert choice[-1].finish_reason == alone[-1].finish_reason
            assert {o.cached_tokens for o in choice} == {0 if item is requests[0] else 61}


def test_preemption_is_exact(model: Tiny) -> None:
    e = engine(model.path, max_num_batched_tokens=16, **SMALL)
    requests = [request("group", prompt(30), n=4, max_tokens=20)]
    requests += [request(f"r{i}", prompt(20, seed=i), max_tokens=25) for i in range(3)]
    outputs, rose = counted(e, requests)
    assert rose["preemptions"] > 0
    assert_exact(model.reference, requests, outputs)
    assert {(o.version, o.epoch, o.kv) for choice in outputs.values() for o in choice} == {("default", 0, "current")}


def test_greedy_ids_are_the_same_whatever_the_engine_does(model: Tiny) -> None:
    prompts = [prompt(50), prompt(50)[:33] + prompt(9, seed=1), prompt(40, seed=2), prompt(13, seed=3), prompt(1)]
    requests = [request(str(i), tokens, temperature=0, max_tokens=14) for i, tokens in enumerate(prompts)]

    plain = engine(model.path, enable_prefix_caching=False)
    alone: Outputs = {}
    for item in requests:
        outputs, rose = counted(plain, [item])
        assert not rose["partial_chunks"]
        assert not rose["prefix_hit_tokens"]
        alone |= outputs
    assert_exact(model.reference, requests, alone)

    def assert_same(outputs: Outputs) -> None:
        assert {key: ids(choice) for key, choice in outputs.items()} == {key: ids(alone[key]) for key in alone}

    outputs, rose = counted(plain, requests)
    assert rose["steps"] == 14  # all in one batch
    assert_same(outputs)
    chunking = engine(model.path, max_num_batched_tokens=16)
    outputs, rose = counted(chunking, requests)
    assert rose["partial_chunks"] > 4
    assert_same(outputs)
    outputs, rose = counted(chunking, requests[::-1])
    assert rose["prefix_hit_tokens"] >= 48 + 40 + 36 + 12
    assert_same(outputs)
    outputs, rose = counted(engine(model.path, max_num_batched_tokens=16, **SMALL), requests)
    assert rose["preemptions"] > 0
    assert_same(outputs)


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(
    llama: Tiny, chunking: Engine, crowded: Engine
) -> None:
    seeded = request("seeded", prompt(30), seed=7, n=3, max_tokens=25)
    others = [request(f"o{i}", prompt(20, seed=i), max_tokens=25, temperature=1.5) for i in range(4)]
    alone = run(chunking, [seeded])
    choices = [ids(alone["seeded", index]) for index in range(3)]
    assert len({tuple(choice) for choice in choices}) == 3
    batched = run(chunking, [others[0], seeded, *others[1:]])
    assert [ids(batched["seeded", index]) for index in range(3)] == choices
    squeezed, rose = counted(crowded, [*others, seeded])
    assert rose["preemptions"] > 0
    assert [ids(squeezed["seeded", index]) for index in range(3)] == choices
    other = run(chunking, [request("seeded", prompt(30), seed=8, n=3, max_tokens=25)])
    assert all(ids(other["seeded", index]) != choices[index] for index in range(3))


# -- where a choice ends


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"logit_bias": {1: 100.0}}, (1, FinishReason.STOP, None)),
        ({"logit_bias": {SECOND_EOS: 100.0}}, (1, FinishReason.STOP, SECOND_EOS)),
        ({"logit_bias": {1: 100.0}, "ignore_eos": True}, (8, FinishReason.LENGTH, None)),
        ({"logit_bias": {1: 100.0}, "ignore_eos": True, "stop_token_ids": [1]}, (1, FinishReason.STOP, 1)),
        ({"logit_bias": {1: 100.0}, "stop_token_ids": [1]}, (1, FinishReason.STOP, None)),
        ({"logit_bias": {9: 100.0}, "stop_token_ids": [8, 9]}, (1, FinishReason.STOP, 9)),
        ({"logit_bias": {9: 100.0}, "stop_token_ids": [8]}, (8, FinishReason.LENGTH, None)),
        ({"logit_bias": {1: 100.0}, "min_tokens": 3}, (4, FinishReason.STOP, None)),
        ({"logit_bias": {9: 100.0}, "min_tokens": 3, "stop_token_ids": [9]}, (4, FinishReason.STOP, 9)),
        ({"logit_bias": {1: 100.0}, "min_tokens": 8}, (8, FinishReason.LENGTH, None)),
        ({"logit_bias": {1: 100.0}, "max_tokens": 1}, (1, FinishReason.STOP, None)),
        ({"max_tokens": 1}, (1, FinishReason.LENGTH, None)),
    ],
)
def test_where_a_choice_ends(chunking: Engine, params: dict[str, Any], expected: tuple[object, ...]) -> None:
    choice = run(chunking, [request("r", prompt(9), temperature=0, **params)])["r", 0]
    assert (len(choice), choice[-1].finish_reason, choice[-1].stop_reason) == expected
    early = {1, SECOND_EOS, 9} if "min_tokens" in params else set()
    assert not early & set(ids(choice)[: params.get("min_tokens", 0)])


@pytest.mark.parametrize("params", [{"max_tokens": None}, {"max_tokens": 50}, {"max_tokens": None, "min_tokens": 50}])
def test_output_is_cut_at_max_model_len(crowded: Engine, llama: Tiny, params: dict[str, Any]) -> None:
    item = request("r", prompt(84), temperature=0, **params)
    outputs = run(crowded, [item])
    assert len(outputs["r", 0]) == 90 - 84
    assert outputs["r", 0][-1].finish_reason == FinishReason.LENGTH
    assert_exact(llama.reference, [item], outputs)


def steps(engine: Engine, count: int) -> list[TokenOutput]:
    return [output for _ in range(count) for output in engine.step()]


def test_abort(chunking: Engine) -> None:
    item = request("stays", prompt(30), temperature=0, max_tokens=20)
    alone = ids(run(chunking, [item])["stays", 0])
    for r in (item, request("goes", prompt(9), n=3, max_tokens=99), request("late", prompt(200), n=2)):
        chunking.add_request(r)
    seen = steps(chunking, 4)
    assert {o.request_id for o in seen} == {"stays", "goes"}  # the long prompt is not computed yet
    assert chunking.abort(AbortRequests(["unknown"])) == []
    assert chunking.abort(AbortRequests(["goes"], index=1)) == [
        TokenOutput("goes", 1, finish_reason=FinishReason.ABORT)
    ]
    assert {o.index for o in chunking.step() if o.request_id == "goes"} == {0, 2}
    assert chunking.abort(AbortRequests(["goes"], silent=True)) == []
    ended = chunking.abort(AbortRequests(["late"]))
    assert [(o.index, o.token_id, o.finish_reason) for o in ended] == [(i, None, "abort") for i in range(2)]
    seen += steps(chunking, 30)
    assert not chunking.has_work
    assert chunking.stats["free_blocks"] == chunking.stats["num_blocks"]
    stays = ids([o for o in seen if o.request_id == "stays"])
    assert stays == [token for i, token in enumerate(alone) if i != 4]  # the step whose outputs went by above

    chunking.add_request(item)
    chunking.add_request(request("waits", prompt(9)))
    assert {o.request_id for o in chunking.abort(AbortRequests(None))} == {"stays", "waits"}
    assert not chunking.has_work


def test_how_long_a_request_waited_is_told_once(chunking: Engine) -> None:
    counted = chunking.scheduler.waited_s
    outputs = run(chunking, [request("first", prompt(9), n=2), request("then", prompt(40, 1)), request("last", [5])])
    told = {key: [o.waited_s for o in choice if o.waited_s is not None] for key, choice in outputs.items()}
    assert sum(map(len, told.values())) == 3
    assert all(outputs[name, 0][0].waited_s is not None for name in ("first", "then", "last"))
    assert sum(waits[0] for waits in told.values() if waits) == pytest.approx(chunking.scheduler.waited_s - counted)


# -- prompt logprobs


def assert_prompt_logprobs(model: PreTrainedModel, item: AddRequest, outputs: Outputs) -> None:
    """On the first output of choice 0 alone: each prompt token and the top two, as transformers has them."""
    first, *rest = outputs[item.request_id, 0]
    others = [o for index in range(1, item.sampling_params.n) for o in outputs[item.request_id, index]]
    assert all(o.prompt_logprobs is None for o in rest + others)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    tokens = item.prompt_token_ids
    assert len(first.prompt_logprobs) == len(tokens)
    if len(tokens) > 1:
        expected = teacher_forced(model, tokens[:1], tokens[1:]).log_softmax(-1)
        for target, row, entries in zip(tokens[1:], expected, first.prompt_logprobs[1:], strict=True):
            assert entries is not None
            assert entries[0].token_id == target
            assert entries[0].rank == 1 + int((row > row[target]).sum())
            assert {int(i) for i in row.topk(2).indices} <= {entry.token_id for entry in entries}
            for entry in entries:
                assert abs(entry.logprob - float(row[entry.token_id])) < TOLERANCE


def test_prompt_logprobs_with_chunks_groups_and_hits(llama: Tiny, chunking: Engine) -> None:
    lengths = {"long": 70, "two": 2, "one": 1, "chunk": 24}
    requests = [request(name, prompt(length), prompt_logprobs=2, n=3) for name, length in lengths.items()]
    requests.append(request("plain", prompt(70), max_tokens=2))
    for cached in (False, True):
        outputs, rose = counted(chunking, requests)
        assert rose["partial_chunks"] > 2
        assert not cached or rose["prefix_hit_tokens"] == 68  # those of "plain" only
        for item in requests[:-1]:
            assert_prompt_logprobs(llama.reference, item, outputs)
        assert_exact(llama.reference, requests, outputs)
        assert outputs["plain", 0][0].prompt_logprobs is None


def test_prompt_logprobs_of_a_prefill_that_was_preempted(llama: Tiny) -> None:
    e = engine(llama.path, **{**SMALL, "max_num_seqs": 2, "max_num_batched_tokens": 3})
    grows = request("grows", prompt(20), max_tokens=60, ignore_eos=True)
    asks = request("asks", prompt(60, seed=1), max_tokens=3, prompt_logprobs=2)
    seen: list[TokenOutput] = []
    e.add_request(grows)
    e.add_request(asks)
    while not e.stats["preemptions"]:
        seen += e.step()
    assert {o.request_id for o in seen} == {"grows"}
    outputs: Outputs = {("grows", 0): seen, ("asks", 0): []}
    while e.has_work:
        for output in e.step():
            outputs[output.request_id, output.index].append(output)
    assert_prompt_logprobs(llama.reference, asks, outputs)
    assert_exact(llama.reference, [grows, asks], outputs)


# -- the distribution that was sampled


FILTERS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.05, "temperature": 1.4},
    "all": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "allowed": {"allowed_token_ids": [3, 5, 7, 11], "temperature": 0.5},
    "min_tokens": {"min_tokens": 20},
}


def test_the_mask_and_the_processed_logprob_are_those_of_the_sampled_distribution(
    llama: Tiny, processed: Engine
) -> None:
    requests = [
        request(name, prompt(30), mask=True, n=3, max_tokens=20, **filters) for name, filters in FILTERS.items()
    ]
    outputs = run(processed, requests)
    sizes: dict[str, set[int]] = {}
    for item in requests:
        for index in range(3):
            choice = outputs[item.request_id, index]
            logits = teacher_forced(llama.reference, item.prompt_token_ids, ids(choice))
            for row, output, logprob in zip(logits, choice, logprobs(choice), strict=True):
                assert output.sampling_mask is not None
                mask = mask_ids(output.sampling_mask).tolist()
                assert output.token_id in mask
                assert mask == sorted(set(mask))
                sizes.setdefault(item.request_id, set()).add(len(mask))
                kept = (row[mask] / item.sampling_params.temperature).log_softmax(-1)
                assert abs(float(kept[mask.index(output.token_id)] - logprob)) < TOLERANCE
    assert sizes["top_k"] == {12}
    assert sizes["allowed"] == {4}
    assert sizes["min_tokens"] == {254}  # all but the two EOS ids
    assert all(max(sizes[name]) > 1 and max(sizes[name]) < 256 for name in ("top_p", "min_p", "all"))


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_greedy_has_a_mask_of_its_token_and_unfiltered_sampling_none(
    mode: str, llama: Tiny, chunking: Engine, processed: Engine
) -> None:
    greedy = request("greedy", prompt(30), mask=True, temperature=0)
    plain = request("plain", prompt(30), mask=True)
    warm = request("warm", prompt(30), mask=True, temperature=1.3)
    unasked = request("unasked", prompt(30), top_k=5)
    outputs = run(chunking if mode == "raw" else processed, [greedy, plain, warm, unasked])
    assert all(mask_ids(o.sampling_mask or b"").tolist() == [o.token_id] for o in outputs["greedy", 0])
    assert all(o.sampling_mask is None for name in ("plain", "warm", "unasked") for o in outputs[name, 0])
    if mode == "raw":
        assert_exact(llama.reference, [greedy, plain, warm, unasked], outputs)
    else:
        assert logprobs(outputs["greedy", 0]).tolist() == [0.0] * 8
        assert_exact(llama.reference, [plain], outputs)
        expected = teacher_forced(llama.reference, prompt(30), ids(outputs["warm", 0])).div(1.3).log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(ids(outputs["warm", 0]))[:, None])[:, 0]
        torch.testing.assert_close(logprobs(outputs["warm", 0]), expected, atol=TOLERANCE, rtol=0)
