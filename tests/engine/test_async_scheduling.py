"""Steps that are launched ahead of the tokens of the step before give what steps in turn give, to the bit."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rollout.config import EngineConfig, KVPolicy
from rollout.engine.engine import Engine
from rollout.messages import AbortRequests, AddRequest
from rollout.outputs import FinishReason, TokenOutput
from rollout.sampling.grammar import as_grammar
from rollout.sampling.params import SamplingParams, StructuredOutputsParams
from rollout.weights.update import Commit
from tests.support import schemas, tiny_models
from tests.support.engine_utils import prompt
from tests.support.weight_updates import fill

ROOMY = {"num_gpu_blocks_override": 200, "max_num_seqs": 16, "max_num_batched_tokens": 2048}
TIGHT = {"num_gpu_blocks_override": 12, "max_num_seqs": 3, "max_num_batched_tokens": 8}
"""Little more than the longest sequence, so that some are preempted, wait, and prefill in chunks."""


@dataclass
class Pair:
    """An engine whose steps overlap, and one whose steps don't."""

    engines: list[Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return schemas.build(tmp_path_factory.mktemp("async") / "model")


def pair(folder: Path, **limits: int) -> Pair:
    settings = {"dtype": "float32", "device": "cpu", "batch_invariant": True, "attention_backend": "torch"}
    config: dict[str, Any] = {**settings, "block_size": 4, "max_model_len": 48, "seed": 0, **limits}
    return Pair([Engine(EngineConfig(str(folder), async_scheduling=ahead, **config)) for ahead in (True, False)])


@pytest.fixture(scope="module")
def roomy(folder: Path) -> Pair:
    return pair(folder, **ROOMY)


@pytest.fixture(scope="module")
def tight(folder: Path) -> Pair:
    return pair(folder, **TIGHT)


@dataclass
class PendingCommit:
    """In place of an engine's updater: other weights wait for their commit."""

    engine: Engine
    policy: KVPolicy
    ready: bool | None = True

    def commit_if_ready(self) -> Commit | None:
        if self.ready is None:
            return None
        self.ready, store = None, self.engine.store
        other = tiny_models.model("llama", (store.epoch + 1) % 3)
        staging = fill(store, dict(other.named_parameters()))
        staging.check(partial=False, progress=lambda: None)
        store.commit(staging, f"v{store.epoch + 1}")
        return Commit(store.epoch, store.label, self.policy)


Action = Callable[[Engine], list[TokenOutput]]


@dataclass
class Script:
    """What happens before each step: requests, aborts, commits, pauses."""

    before: dict[int, list[Action]] = field(default_factory=lambda: defaultdict(list))
    aborted: set[str] = field(default_factory=set)

    def run(self, engine: Engine) -> dict[tuple[str, int], list[TokenOutput]]:
        """Every output of every choice; both engines have launched as many steps when an action comes."""
        outputs: dict[tuple[str, int], list[TokenOutput]] = defaultdict(list)
        engine.scheduler.kv.reset_prefixes()
        updater, number = engine.weights, 0
        while engine.has_work or number <= max(self.before):
            new = [output for action in self.before.get(number, ()) for output in action(engine)]
            engine.paused = False
            for output in new + engine.step():
                outputs[output.request_id, output.index].append(output)
            engine.weights = updater
            number += 1
        assert engine.stats["free_blocks"] == engine.stats["num_blocks"]
        return outputs


def truth(outputs: list[TokenOutput]) -> list[tuple[Any, ...]]:
    """All that an output says, but for how much of the prompt was found in the cache, and times."""
    names = [name for name in TokenOutput.__struct_fields__ if name not in ("cached_tokens", "waited_s")]
    return [tuple(getattr(output, name) for name in names) for output in outputs]


PARAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 9),
        "max_tokens": st.integers(1, 20),
        "stop_token_ids": st.sampled_from([[], [*range(2, 50)]]),
        "n": st.integers(1, 3),
        "logprobs": st.sampled_from([None, 0, 2]),
    },
    optional={
        "temperature": st.sampled_from([0.6, 1.4]),
        "top_k": st.sampled_from([3]),
        "logprob_token_ids": st.just([5, 6]),
        "prompt_logprobs": st.just(1),
    },
)


@st.composite
def scripts(draw: st.DrawFn, *, commits: bool) -> Script:
    script, looks_back = Script(), draw(st.integers(0, 3)) == 0  # such rows make every step wait
    prompts = [prompt(length, length) for length in (3, 9, 9, 17)]
    for number in range(draw(st.integers(2, 5))):
        params = draw(PARAMS)
        if "logprob_token_ids" in params:
            params["logprobs"] = 2
        words: list[list[int]] = []
        if looks_back and draw(st.booleans()):
            params["frequency_penalty"], params["min_tokens"], words = 0.5, 1, [[7, 8], [9]]
        grammar = None
        if looks_back and draw(st.booleans()):
            asked = params["structured_outputs"] = StructuredOutputsParams(regex="[a-f]{3,9}|0+(1+2)?")
            grammar = as_grammar(asked)
        name, tokens = f"r{number}", draw(st.sampled_from(prompts))
        start = draw(st.integers(0, 8))
        message = AddRequest(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(**params),
            bad_words_token_ids=words,
            return_sampling_mask=draw(st.booleans()),
            grammar=grammar,
        )
        script.before[start].append(lambda engine, message=message: add(engine, message))
        if draw(st.integers(0, 3)) == 0:
            when = start + draw(st.integers(0, 6))
            script.aborted.add(name)
            script.before[when].append(lambda engine, name=name: engine.abort(AbortRequests([name])))
    for when in draw(st.lists(st.integers(0, 12), max_size=2)):
        if commits:
            policy: KVPolicy = draw(st.sampled_from(["keep", "recompute"]))
            script.before[when].append(lambda engine, policy=policy: commit(engine, policy))
        else:
            script.before[when].append(pause)
    return script


def add(engine: Engine, message: AddRequest) -> list[TokenOutput]:
    engine.add_request(message)
    while message.grammar is not None and not engine.grammars.compiled:
        time.sleep(0.001)  # else a request would enter a step sooner or later
    return []


def commit(engine: Engine, policy: KVPolicy) -> list[TokenOutput]:
    engine.weights = PendingCommit(engine, policy)  # type: ignore[assignment]
    return []


def pause(engine: Engine) -> list[TokenOutput]:
    engine.paused = True
    return engine.step()


def check(pair: Pair, script: Script) -> None:
    ahead, in_turn = (script.run(engine) for engine in pair.engines)
    for choice in ahead.keys() | in_turn.keys():
        ours, theirs = truth(ahead[choice]), truth(in_turn[choice])
        if choice[0] in script.aborted and theirs != ours:  # the token in flight went with it
            assert FinishReason.ABORT in ours.pop()
            theirs = theirs[: len(ours)]
            event("cut off")
        assert ours == theirs


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=scripts(commits=True))
def test_commits_aborts_and_stops_at_any_step_leave_no_trace_of_the_overlap(roomy: Pair, script: Script) -> None:
    check(roomy, script)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=scripts(commits=False))
def test_preemptions_pauses_and_chunks_leave_no_trace_of_the_overlap(tight: Pair, script: Script) -> None:
    check(tight, script)


def test_a_length_is_known_before_and_a_stop_costs_one_row(roomy: Pair) -> None:
    def computed(engine: Engine, **params: Any) -> int:
        script = Script()
        message = AddRequest(
            request_id="r", prompt_token_ids=prompt(9), sampling_params=SamplingParams(seed=3, max_tokens=12, **params)
        )
        script.before[0].append(lambda engine: engine.add_request(message) or [])
        before = engine.stats["computed_tokens"]
        script.run(engine)
        return engine.stats["computed_tokens"] - before

    ahead, in_turn = roomy.engines
    assert computed(ahead, ignore_eos=True, n=2) == computed(in_turn, ignore_eos=True, n=2) == 9 + 2 * 11
    stops = {"stop_token_ids": [*range(2, 256)]}
    assert (computed(ahead, **stops), computed(in_turn, **stops)) == (10, 9)


@pytest.mark.parametrize("other", [{"tensor_parallel_size": 2}, {"enable_return_routed_experts": True}])
def test_what_reads_every_step_on_the_host_is_refused_beside_it(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="async_scheduling can't be had with"):
        EngineConfig("model", async_scheduling=True, **other)
