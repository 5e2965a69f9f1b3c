"""An engine that sleeps gives its tensors up, and goes on afterwards with the very same weights, or with none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.messages import SLEEP_TAGS, AbortRequests
from rollout.model import runner as model_runner
from rollout.model.joined import JoinedWeights, _together
from rollout.model.parameters import ModelParameters
from rollout.weights.errors import WeightUpdateError
from rollout.weights.store import WeightStore
from tests.support import tiny_models
from tests.support.engine_utils import assert_exact, engine, ids, prompt, request, run, spans
from tests.support.wait import eventually
from tests.support.weight_updates import fill

REQUESTS = [
    request("a", prompt(30), max_tokens=12, temperature=0),
    request("b", prompt(21, 1), max_tokens=9, n=2, seed=5),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The tiny llama of seeds 0 and 1."""
    return [tiny_models.build("llama", tmp_path_factory.mktemp(f"llama{seed}"), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def shared(folders: list[Path]) -> Engine:
    return engine(folders[0], enable_sleep_mode=True)


@pytest.fixture
def awake(shared: Engine, folders: list[Path]) -> Iterator[Engine]:
    """An engine that serves seed 0, whatever a test before has left it with."""
    yield shared
    shared.abort(AbortRequests(None))
    shared.sleeper.wake_up(SLEEP_TAGS)
    push(shared, folders[0])


def memory(tested: Engine) -> int:
    """Bytes of the model's parameters, of the sets beside them, and of the cache."""
    backend, store = tested.runner.backend, tested.store
    sets = [tested.store.parameters.live.tensors, store._spare.tensors if store._spare else {}]
    held: dict[int, Tensor] = {}
    staged = [tensor for one in sets for tensor in one.values()]
    for tensor in (*tested.runner.model.parameters(), *backend.keys, *backend.values, *staged):
        if not tensor.is_meta and tensor.numel():
            held[tensor.data_ptr()] = tensor
    return sum(tensor.nbytes for tensor in held.values())


def push(tested: Engine, folder: Path) -> None:
    """A whole update in one call, committed between two steps."""
    answer = tested.weights.call("update_weights", {"weight_dir": str(folder)})

    def committed() -> bool:
        tested.commit_weights()
        return answer.done()

    eventually(committed, 60)
    answer.result(0)


def refusal(tested: Engine, method: str, **params: Any) -> WeightUpdateError:
    error = tested.weights.call(method, params).exception(30)
    assert isinstance(error, WeightUpdateError)
    return error


def test_level_1_keeps_the_very_same_weights_and_nothing_of_the_cache(awake: Engine, folders: list[Path]) -> None:
    push(awake, folders[0])  # leaves a second set
    before, sums = run(awake, REQUESTS), awake.store.checksums()
    weights = sum(tensor.nbytes for tensor in awake.store.parameters.live.tensors.values())
    cache = sum(tensor.nbytes for tensor in (*awake.runner.backend.keys, *awake.runner.backend.values))
    assert memory(awake) == 2 * weights + cache
    epoch = awake.store.epoch

    awake.sleeper.sleep(1)
    assert memory(awake) == weights  # of a CPU's engine: they are in host memory
    assert sum(parameter.numel() for parameter in awake.runner.model.parameters()) == 0
    assert awake.store.checksums() == sums  # also for an engine that joins meanwhile
    assert awake.stats["sleep_level"] == 1
    assert "asleep: POST /wake_up?tags=weights" in refusal(awake, "update_weights", weight_dir=str(folders[1])).message

    awake.sleeper.wake_up(SLEEP_TAGS)
    assert memory(awake) == weights + cache
    assert (awake.store.checksums(), awake.store.epoch, awake.stats["sleep_level"]) == (sums, epoch, 0)
    hits = awake.scheduler.counters["prefix_hit_tokens"]
    after = run(awake, REQUESTS[:1])
    assert awake.scheduler.counters["prefix_hit_tokens"] == hits  # what it has computed before is gone
    assert ids(after["a", 0]) == ids(before["a", 0])
    assert_exact(tiny_models.model("llama", 0), REQUESTS[:1], after)


def test_what_runs_is_computed_again_and_goes_on_to_the_same_end(awake: Engine) -> None:
    expected = run(awake, REQUESTS)
    for item in REQUESTS:
        awake.add_request(item)
    outputs: dict[tuple[str, int], list[Any]] = {}

    def step() -> int:
        made = awake.step()
        for output in made:
            outputs.setdefault((output.request_id, output.index), []).append(output)
        return len(made)

    assert sum(step() for _ in range(4)) > 0
    for level, asleep in ((1, SLEEP_TAGS), (1, ("weights",)), (1, ("kv_cache",))):
        awake.sleeper.sleep(level)
        assert step() == 0
        for tag in asleep[:-1]:
            awake.sleeper.wake_up([tag])
            assert step() == 0  # a part of it still sleeps
        awake.sleeper.wake_up(SLEEP_TAGS)
        assert step() > 0
    while awake.has_work:
        assert step() > 0
    assert {key: ids(choice) for key, choice in outputs.items()} == {k: ids(v) for k, v in expected.items()}
    assert all([span.kv for span in spans(choice)] == ["current"] for choice in outputs.values())
    assert_exact(tiny_models.model("llama", 0), REQUESTS, outputs)
    assert awake.stats["free_blocks"] == awake.stats["num_blocks"]


def test_level_2_loses_the_weights_until_they_are_pushed(awake: Engine, folders: list[Path]) -> None:
    epoch = awake.store.epoch
    awake.add_request(REQUESTS[0])
    first = [output for _ in range(3) for output in awake.step()]
    awake.sleeper.sleep(2)
    assert memory(awake) == 0
    assert awake.store.validity == "invalid"
    assert "asleep: POST /wake_up?tags=weights" in refusal(awake, "update_weights", weight_dir=str(folders[1])).message

    awake.sleeper.wake_up(["weights"])
    assert refusal(awake, "weight_checker", action="checksum").status == 409
    push(awake, folders[1])
    assert awake.store.checksums() == WeightStore(ModelParameters(tiny_models.model("llama", 1))).checksums()
    assert awake.step() == []  # without a cache
    awake.sleeper.wake_up(["kv_cache"])
    rest: list[Any] = []
    while awake.has_work:
        rest += awake.step()
    model, made = tiny_models.model("llama", 1), ids([*first, *rest])
    logits = model(input_ids=torch.tensor([prompt(30) + made]), use_cache=False).logits[0, 29:-1]
    assert made[len(first) :] == logits.argmax(-1)[len(first) :].tolist()  # by the new weights, on the old ones' tokens
    assert [(span.epoch, span.kv) for span in spans([*first, *rest])] == [(epoch, "current"), (epoch + 1, "current")]


def test_a_level_2_that_no_push_follows_generates_nothing(awake: Engine) -> None:
    awake.sleeper.sleep(2)
    awake.sleeper.wake_up(SLEEP_TAGS)
    awake.add_request(REQUESTS[0])
    assert awake.stats["sleep_level"] == 0
    assert awake.halted
    assert awake.step() == []


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_in_place_needs_no_pause_while_the_cache_sleeps(awake: Engine, level: int) -> None:
    in_place = {"weight_staging": "in_place"}
    awake.weights.call("init_weight_transfer_engine", {"init_info": {"backend": "disk"}}).result(30)
    assert "/pause" in refusal(awake, "start_weight_update", **in_place).message
    awake.sleeper.sleep(level)
    awake.sleeper.wake_up(["weights"])
    awake.weights.call("start_weight_update", in_place).result(30)
    awake.weights.call("shutdown_weight_transfer_engine", {}).result(30)


def test_it_sleeps_as_deep_as_the_deeper_of_two_calls(awake: Engine) -> None:
    sums = awake.store.checksums()
    for level in (1, 1):
        awake.sleeper.sleep(level)
    awake.sleeper.wake_up(["kv_cache"])
    awake.sleeper.wake_up(["kv_cache"])  # no more than that
    assert awake.sleeper.asleep == {"weights"}
    awake.sleeper.sleep(1)  # the cache again
    awake.sleeper.wake_up(SLEEP_TAGS)
    assert awake.store.checksums() == sums
    awake.sleeper.sleep(1)
    awake.sleeper.sleep(2)
    assert (memory(awake), awake.stats["sleep_level"]) == (0, 2)
    awake.sleeper.sleep(1)  # what is lost can't be kept
    assert awake.stats["sleep_level"] == 2
    awake.sleeper.wake_up(SLEEP_TAGS)
    assert awake.store.validity == "invalid"


@pytest.mark.parametrize("tag", SLEEP_TAGS)
def test_without_memory_it_stays_asleep_and_wakes_later(
    awake: Engine, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(awake, REQUESTS)
    awake.sleeper.sleep(1)
    slept = memory(awake)
    calls: list[object] = []

    def fails(*args: object, **kwargs: object) -> Tensor:
        calls.append(args)
        if len(calls) == 4:  # some of it was there
            raise torch.OutOfMemoryError("no memory")
        return torch.empty(1000)

    with monkeypatch.context() as patch:
        if tag == "weights":
            patch.setattr(Tensor, "to", fails)
        else:
            patch.setattr(awake.runner.backend, "new_cache", fails)
        with pytest.raises(torch.OutOfMemoryError):
            awake.sleeper.wake_up([tag])
    assert (awake.sleeper.asleep, memory(awake)) == (set(SLEEP_TAGS), slept)
    awake.sleeper.wake_up(SLEEP_TAGS)
    assert ids(run(awake, REQUESTS)["a", 0]) == ids(before["a", 0])


def test_graphs_are_captured_anew_since_addresses_change(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stood in: CUDA's graphs, by work that runs again if all is where it was when it was captured."""
    tested: list[Engine] = []
    replays: list[int] = []

    def addresses() -> list[int]:
        runner = tested[0].runner
        held = (*runner.model.parameters(), *runner.backend.keys, *runner.backend.values)
        return [tensor.data_ptr() for tensor in held]

    class Graph:
        def __init__(self, work: Callable[[], None]) -> None:
            self._work, self._baked = work, addresses() if tested else []
            work()

        def replay(self) -> None:
            assert addresses() == self._baked
            replays.append(1)
            self._work()

    monkeypatch.setattr(model_runner, "CudaGraphs", lambda device: Graph)
    monkeypatch.setattr(model_runner.ModelRunner, "_captures", property(lambda runner: bool(tested)))
    tested.append(engine(folders[0], max_num_seqs=4, enable_sleep_mode=True))
    tested[0].runner.capture()
    before = run(tested[0], REQUESTS)
    for level in (1, 2):
        tested[0].sleeper.sleep(level)
        assert not tested[0].store.parameters.live.graphs
        ballast = [torch.empty_like(t, device="cpu") for t in tested[0].store.parameters.live.tensors.values()]
        tested[0].sleeper.wake_up(["weights"])
        if level == 2:
            push(tested[0], folders[0])
        tested[0].sleeper.wake_up(["kv_cache"])
        count = len(replays)
        assert ids(run(tested[0], REQUESTS)["a", 0]) == ids(before["a", 0])
        assert len(replays) > count
        del ballast


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_lie_together_do_so_again(level: int) -> None:
    """As on CUDA, where a commit copies into the live buffers: no set that flips in brings what was made of it."""
    model, trained = (tiny_models.model("llama", seed) for seed in (0, 1))
    parameters = ModelParameters(model, method="copy")
    joined = JoinedWeights(parameters)
    store = WeightStore(parameters, prepare=joined.pack)
    ids = torch.tensor([prompt(9)])
    store.sleep(keep=level == 1)
    store.wake_up()
    if level == 2:
        store.commit(fill(store, dict(trained.named_parameters())), "pushed")
    expected = tiny_models.model("llama", 0) if level == 1 else trained
    torch.testing.assert_close(model(ids).logits, expected(ids).logits)
    assert joined.groups
    for layers in joined.groups:
        assert _together([layer.weight for layer in layers]) is not None


def test_several_devices_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="enable_sleep_mode can't be had with tensor_parallel_size 2"):
        EngineConfig(enable_sleep_mode=True, tensor_parallel_size=2)
