"""Weights that arrive while the engine generates: each token is checked against the weights that it is stamped with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from rollout.config import KVPolicy
from rollout.engine.engine import Engine
from rollout.messages import AbortRequests, AddRequest
from rollout.outputs import TokenOutput, WeightVersionSpan
from tests.support import tiny_models
from tests.support.engine_utils import TOLERANCE, Outputs, engine, ids, logprobs, prompt, request, spans, teacher_forced
from tests.support.push_reference import as_stamped, assert_moved, single
from tests.support.wait import eventually

POLICIES: tuple[KVPolicy, ...] = ("keep", "recompute")
SEEDS = 3  # unrelated sets of weights of each model
MAX_STEPS = 2000
SMALL = {"num_gpu_blocks_override": 40, "max_model_len": 130, "max_num_seqs": 6, "max_num_batched_tokens": 12}


@dataclass(frozen=True)
class Weights:
    """The same model with `SEEDS` unrelated sets of weights: folders to push, and transformers' models."""

    folders: list[Path]
    models: list[PreTrainedModel]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@functools.cache
def weights(name: str, root: Path) -> Weights:
    folders = [tiny_models.build(name, root / name / str(seed), seed) for seed in range(SEEDS)]
    models = [tiny_models.model(name, seed) for seed in range(SEEDS)]
    for model in models:
        model.set_attn_implementation("eager")
    return Weights(folders, models)


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3_moe"])
def tiny(request: pytest.FixtureRequest, root: Path) -> Weights:
    return weights(request.param, root)


@pytest.fixture(scope="module")
def llama(root: Path) -> Weights:
    return weights("llama", root)


class Run:
    """An engine on the first weights, its outputs so far, and which weights each epoch served."""

    def __init__(self, weights: Weights, **config: object) -> None:
        self.weights = weights
        self.engine: Engine = engine(weights.folders[0], **config)
        self.epochs = [weights.models[0]]
        self.requests: list[AddRequest] = []
        self.outputs: Outputs = {}
        self._call("init_weight_transfer_engine", init_info={"backend": "disk"})

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.weights.close()

    def add(self, item: AddRequest) -> AddRequest:
        self.engine.add_request(item)
        self.requests.append(item)
        self.outputs |= {(item.request_id, index): [] for index in range(item.sampling_params.n)}
        return item

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    def take(self, outputs: Iterable[TokenOutput]) -> None:
        for output in outputs:
            self.outputs[output.request_id, output.index].append(output)

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until the condition holds."""
        for _ in range(MAX_STEPS):
            if condition():
                return
            assert self.engine.has_work, "everything has ended before it happened"
            self.step()
        raise AssertionError("it did not happen")

    def finish(self) -> None:
        self.until(lambda: not self.engine.has_work)
        assert self.engine.stats["free_blocks"] == self.engine.stats["num_blocks"]

    def push(self, seed: int, policy: KVPolicy | None = None, version: str | None = None) -> None:
        """Receive and check; the next step commits."""
        self._call("start_weight_update", kv_policy=policy)
        self._call("update_weights", update_info={"path": str(self.weights.folders[seed])})
        finishing = self.engine.weights.call("finish_weight_update", {"weight_version": version})
        eventually(lambda: self.info()["state"] == "ready")
        assert not finishing.done()
        self.epochs.append(self.weights.models[seed])

    def relabel(self, version: str) -> None:
        self._call("update_weight_version", new_version=version)

    def info(self) -> dict[str, object]:
        return self._call("weight_info")

    def _call(self, method: str, /, **params: object) -> dict[str, object]:
        return self.engine.weights.call(method, params).result(20)

    def length(self, request_id: str, index: int = 0) -> int:
        return len(ids(self.outputs[request_id, index]))

    def stamps(self, request_id: str, index: int = 0) -> list[tuple[str, int, int, int, str]]:
        return [(s.version, s.epoch, s.start, s.end, s.kv) for s in spans(self.outputs[request_id, index])]

    def check(self) -> None:
        """Every token of every choice was sampled as its stamp says."""
        for item in self.requests:
            for index in range(item.sampling_params.n):
                outputs = self.outputs[item.request_id, index]
                tokens = ids(outputs)
                assert [o.token_id for o in outputs[: len(tokens)]] == tokens  # only an abort, at the end, has none
                if tokens:
                    expected = as_stamped(self.epochs, item.prompt_token_ids, tokens, spans(outputs))
                    torch.testing.assert_close(logprobs(outputs), expected, atol=TOLERANCE, rtol=0)
                    self._check_prompt_logprobs(item, index, outputs[0])
                else:
                    assert spans(outputs) == []

    def assert_moved(self, request_id: str, index: int) -> None:
        (item,) = [item for item in self.requests if item.request_id == request_id]
        outputs = self.outputs[request_id, index]
        assert_moved(self.epochs, item.prompt_token_ids, ids(outputs), spans(outputs), logprobs(outputs))

    def _check_prompt_logprobs(self, item: AddRequest, index: int, first: TokenOutput) -> None:
        """They are of the epoch that sampled the first token."""
        if item.sampling_params.prompt_logprobs is None or index:
            return
        tokens, rows = item.prompt_token_ids, first.prompt_logprobs
        assert rows is not None
        assert len(rows) == len(tokens)
        got = torch.tensor([row[0].logprob for row in rows[1:] if row])
        expected = single(self.epochs[first.epoch], tokens[:1], tokens[1:])
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


# -- a push into everything that can be under way


@pytest.mark.parametrize("policy", POLICIES)
def test_pushes_into_running_requests(tiny: Weights, policy: KVPolicy) -> None:
    with Run(tiny, **SMALL) as run:
        scheduler = run.engine.scheduler
        run.add(request("group", prompt(30), n=3, max_tokens=40, ignore_eos=True))
        run.add(request("single", prompt(14, seed=1), max_tokens=45, ignore_eos=True))
        run.until(lambda: run.length("single") >= 4)
        run.add(request("chunked", prompt(30, seed=2), max_tokens=20, prompt_logprobs=0))
        run.add(request("waiting", prompt(40, seed=3), n=2, max_tokens=4))
        run.until(lambda: any(0 < s.num_computed < s.prompt_len for s in scheduler.running))
        assert any(not s.output_len for s in scheduler.waiting)
        decoding = [("group", 0), ("group", 1), ("group", 2), ("single", 0)]
        before = {key: run.length(*key) for key in decoding}
        preemptions = run.engine.stats["preemptions"]
        run.push(1, policy, "one")
        run.until(lambda: all(run.length(*key) > before[key] for key in decoding))
        run.until(
            lambda: run.engine.stats["preemptions"] > preemptions and any(s.output_len for s in scheduler.waiting)
        )
        run.push(2, policy, "two")
        run.finish()
        run.check()
        for key in decoding:
            stamps = run.stamps(*key)
            assert stamps[0] == ("default", 0, 0, before[key], "current")
            assert {version for version, *_ in stamps} == {"default", "one", "two"}
            run.assert_moved(*key)
        kv = {o.kv for outputs in run.outputs.values() for o in outputs}
        assert kv == ({"current", "mixed"} if policy == "keep" else {"current"})
        assert run.stamps("chunked")[0][:2] != ("default", 0)


def test_a_commit_before_the_last_token_of_a_recomputation_starts_it_again(tiny: Weights) -> None:
    """Else keys and values of weights that sampled none of its tokens stay in its cache, and no span names them."""
    with Run(tiny, max_num_batched_tokens=5, max_num_seqs=5) as run:
        run.add(request("pair", prompt(1), n=2, max_tokens=9, ignore_eos=True))
        run.until(lambda: run.length("pair") == 4)
        run.push(1, "recompute", "one")
        run.until(lambda: any(s.prefills and s.num_to_compute == 1 for s in run.engine.scheduler.running))
        run.push(2, "keep", "two")
        run.finish()
        run.check()
        assert [stamp[:4] for stamp in run.stamps("pair", 1)] == [("default", 0, 0, 4), ("two", 2, 4, 9)]
        assert {stamp[4] for stamp in run.stamps("pair", 1)} == {"current"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_that_has_sampled_nothing_is_the_new_weights_alone(tiny: Weights, policy: KVPolicy) -> None:
    with Run(tiny, max_num_batched_tokens=16) as run:
        run.add(request("half", prompt(50), n=2, max_tokens=9, temperature=0, prompt_logprobs=0))
        run.add(request("queued", prompt(50), max_tokens=9, temperature=0))
        run.step(2)
        assert [s.num_computed for s in run.engine.scheduler.running] == [32]
        run.push(1, policy, "new")
        run.finish()
        run.check()
        for key in [("half", 0), ("half", 1), ("queued", 0)]:
            assert run.stamps(*key) == [("new", 1, 0, 9, "current")]
            outputs = ids(run.outputs[key])
            assert outputs == teacher_forced(tiny.models[1], prompt(50), outputs).argmax(-1).tolist()


def test_prompt_logprobs_are_of_one_epoch_wherever_the_push_lands(llama: Weights) -> None:
    for steps in range(7):  # chunks of 8: the fifth one is the last token alone, the prompt's rows are complete
        with Run(llama, max_num_batched_tokens=8, max_num_seqs=4) as run:
            run.add(request("asks", prompt(33), n=2, max_tokens=6, prompt_logprobs=0))
            run.step(steps)
            run.push(1, "keep")
            run.finish()
            run.check()
            assert run.stamps("asks")[0][1] == int(steps < 5)


def test_an_abort_before_the_first_token_leaves_no_spans(llama: Weights) -> None:
    with Run(llama, max_num_batched_tokens=16) as run:
        run.add(request("cut", prompt(5), max_tokens=9))
        run.add(request("gone", prompt(40), n=2, max_tokens=9))
        run.step()
        run.push(1, "keep", "new")
        run.step()
        run.take(run.engine.abort(AbortRequests(["gone", "cut"])))
        assert not run.engine.has_work
        run.check()
        assert run.stamps("gone", 0) == run.stamps("gone", 1) == []
        assert run.stamps("cut") == [("default", 0, 0, 1, "current"), ("new", 1, 1, 2, "mixed")]


# -- nothing of the old cache


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_of_the_old_cache_is_found_again(tiny: Weights, policy: KVPolicy) -> None:
    greedy = {"temperature": 0, "max_tokens": 8}
    with Run(tiny) as run:
        run.add(request("first", prompt(41), **greedy))
        run.finish()
        run.add(request("crosses", prompt(41), max_tokens=40, ignore_eos=True))
        run.until(lambda: run.length("crosses") == 12)
        assert run.engine.stats["prefix_hit_tokens"] == 40
        run.push(1, policy, "new")
        run.step(12)
        outputs = ids(run.outputs["crosses", 0])
        hits = run.engine.stats["prefix_hit_tokens"]
        run.add(request("second", prompt(41), **greedy))
        run.until(lambda: run.length("second") == 1)
        hits += 0 if policy == "keep" else 40  # what was recomputed is of the new weights
        assert run.engine.stats["prefix_hit_tokens"] == hits
        run.add(request("turn", prompt(41) + outputs + prompt(3), **greedy))  # as the conversation's next turn
        run.until(lambda: run.length("turn") == 1)
        hits += 40 if policy == "keep" else 64  # found within the epoch; the mixed blocks of "crosses" are not
        assert run.engine.stats["prefix_hit_tokens"] == hits
        run.finish()
        run.check()
        second = ids(run.outputs["second", 0])
        assert second == teacher_forced(tiny.models[1], prompt(41), second).argmax(-1).tolist()
        assert second != ids(run.outputs["first", 0])


# -- labels


def test_a_label_names_the_next_step_on_and_stays_until_another_comes(llama: Weights) -> None:
    with Run(llama) as run:
        run.add(request("r", prompt(9), max_tokens=12, ignore_eos=True))
        run.step(3)
        run.relabel("renamed")
        run.step(3)
        run.push(1, "keep")  # no label: it keeps the one there is, under a new epoch
        run.step(3)
        run.push(0, "recompute", "renamed")
        run.finish()
        run.check()
        assert run.stamps("r") == [
            ("default", 0, 0, 3, "current"),
            ("renamed", 0, 3, 6, "current"),
            ("renamed", 1, 6, 9, "mixed"),
            ("renamed", 2, 9, 12, "current"),
        ]


# -- anything, in any order


ARRIVALS = st.fixed_dictionaries(
    {
        "length": st.sampled_from([1, 4, 9, 25, 26, 60]),
        "n": st.integers(1, 3),
        "max_tokens": st.sampled_from([1, 9, 24]),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "shares_prefix": st.booleans(),
    }
)
PUSHES = st.tuples(st.integers(0, SEEDS - 1), st.sampled_from([*POLICIES, None]), st.sampled_from([None, "a", "b"]))
EVENTS = st.one_of(
    st.tuples(st.just("add"), ARRIVALS),
    st.tuples(st.just("push"), PUSHES),
    st.tuples(st.just("push"), PUSHES),
    st.tuples(st.just("relabel"), st.sampled_from("ab")),
    st.tuples(st.just("abort"), st.tuples(st.integers(0, 9), st.sampled_from([None, 0, 1]))),
)
SCHEDULES = st.tuples(ARRIVALS, st.lists(st.tuples(st.integers(0, 7), EVENTS), min_size=2, max_size=12))
"""A first arrival, then events, each of them after so many steps."""


@settings(max_examples=25)
@given(
    name=st.sampled_from(["llama", "gemma2"]),
    schedule=SCHEDULES,
    chunk=st.sampled_from([5, 12, 64]),
    blocks=st.sampled_from([24, 40]),
)
def test_any_schedule_of_arrivals_pushes_and_aborts(
    root: Path, name: str, schedule: tuple[Any, list[tuple[int, Any]]], chunk: int, blocks: int
) -> None:
    config = {
        "num_gpu_blocks_override": blocks,
        "max_model_len": 92,
        "max_num_seqs": 5,
        "max_num_batched_tokens": chunk,
    }
    first, events = schedule
    with Run(weights(name, root), **config) as run:
        for steps, (kind, what) in [(0, ("add", first)), *events]:
            run.step(steps)
            match kind:
                case "add":
                    base = prompt(what["length"], seed=len(run.requests))
                    tokens = prompt(60)[: what["length"]] if what["shares_prefix"] else base
                    params = {key: what[key] for key in ("n", "max_tokens", "prompt_logprobs")}
                    run.add(request(f"r{len(run.requests)}", tokens, **params))
                case "push":
                    run.push(*what)
                    run.step()
                case "relabel":
                    run.relabel(what)
                case "abort":
                    which, index = what
                    name_of = run.requests[which % len(run.requests)].request_id
                    run.take(run.engine.abort(AbortRequests([name_of], index=index)))
        run.finish()
        for outputs in run.outputs.values():
            assert [o.finish_reason is None for o in outputs] == [True] * (len(outputs) - 1) + [False]
        run.check()


def test_the_mixed_reference_with_the_same_weights_is_the_plain_one(tiny: Weights) -> None:
    tokens, model = prompt(60), tiny.models[0]
    stamped = [WeightVersionSpan("", i, i + 10, i // 10, "mixed" if i else "current") for i in (0, 10, 20)]
    plain = single(model, tokens[:30], tokens[30:])
    torch.testing.assert_close(as_stamped([model] * 3, tokens[:30], tokens[30:], stamped), plain, atol=1e-5, rtol=0)
