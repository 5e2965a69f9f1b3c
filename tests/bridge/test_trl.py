"""trainer_bridge.integrations.trl: TRL's own trainer, unmodified and from PyPI, on a live server."""

from __future__ import annotations

import math
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOTrainer

from rollout.launch import serve
from tests.support import tiny_models, tiny_trl
from tests.support.engine_utils import TOLERANCE
from tests.support.push_reference import single
from tests.support.wait import eventually
from tests.support.weight_updates import sha256
from trainer_bridge import RolloutClient, WeightPushError
from trainer_bridge.integrations.trl import RolloutWorker, WeightTransfer, log_gap

GAP = "sampling/sampling_logp_difference"
PROMPTS = [{"prompt": text, "wanted": i % 2} for i, text in enumerate(["one", "two and more", "three"])]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutClient]:
    folder = tmp_path_factory.mktemp("server")
    path = tiny_trl.build(folder / "model")
    with serve(path, folder / "log", *tiny_trl.SERVER_FLAGS) as url, RolloutClient(url, timeout_s=60) as client:
        yield client


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


class Logs(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" in logs:
            self.steps.append(logs)


def test_it_trains(client: RolloutClient, tmp_path: Path) -> None:
    """The server ends with the trainer's weights, answers were crossed by pushes, and the gap is that of staleness."""
    steps, base = 6, client.weight_info()["epoch"]
    folder = tiny_trl.build(tmp_path / "model")
    args = tiny_trl.config(
        tmp_path, client.base_url, max_steps=steps, learning_rate=3e-3, max_staleness=3, max_completion_length=64
    )
    transfer, logs = WeightTransfer(args), Logs()
    worker = RolloutWorker(args, PROMPTS, even, tiny_trl.tokenizer())
    trainer = AsyncGRPOTrainer(
        str(folder),
        args=args,
        train_dataset=Dataset.from_list(PROMPTS),
        callbacks=[logs],
        weight_transfer=transfer,
        rollout_worker=worker,
    )
    trainer.remove_callback(PrinterCallback)
    log_gap(trainer)
    trainer.train()

    assert "vllm" not in sys.modules
    assert [(p.version, p.epoch) for p in transfer.pushes] == [(f"trl-{n}", base + n) for n in range(1, steps + 2)]
    assert trainer.model_version == worker.model_version == steps + 1
    trained = {name: sha256(p.detach()) for name, p in trainer.model.named_parameters()}
    assert client.post("/weight_checker", {"action": "checksum"})["checksums"] == trained
    before = {name: sha256(p.detach()) for name, p in tiny_models.model("llama").named_parameters()}
    assert all(trained[name] != before[name] for name in trained)

    assert len(logs.steps) == steps
    first = logs.steps[0]
    assert (first["version/token_min"], first["version/token_max"]) == (1, 1)
    assert 0 < first[f"{GAP}/mean"] < first[f"{GAP}/max"] < TOLERANCE  # the policy as it was sampled from
    assert abs(first["ratio"] - 1) < TOLERANCE
    assert max(s["version/mixed_frac"] for s in logs.steps) > 0
    stale = [s for s in logs.steps if s["sample/staleness_max"] > 0]
    assert stale
    assert all(s[f"{GAP}/mean"] > 10 * TOLERANCE for s in stale)
    assert all(s["sample/staleness_max"] <= 3 for s in logs.steps)
    assert not client.is_paused()
    eventually(lambda: not client.abort_all())  # the worker has ended what it had running


def parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, p.detach()) for name, p in model.named_parameters())


def test_samples_say_what_was_sampled_by_which_weights(client: RolloutClient, tmp_path: Path) -> None:
    """Logprobs are transformers' under the weights of each token's version, also where a push falls into an answer."""
    models = {1: tiny_models.model("llama", 1), 2: tiny_models.model("llama", 2)}
    args = tiny_trl.config(tmp_path, client.base_url, max_completion_length=80)
    transfer = WeightTransfer(args)
    worker = RolloutWorker(args, PROMPTS, [even, one_if_wanted], tiny_trl.tokenizer())
    transfer.init_weight_transfer()
    try:
        transfer.send_weights(parameters(models[1]))
        worker.start()
        samples = [worker.rollout_buffer.get(timeout=60)]
        transfer.send_weights(parameters(models[2]))
        while not {(1, 2), (2, 2)} <= {versions(sample) for sample in samples}:
            samples.append(worker.rollout_buffer.get(timeout=60))
            worker.check_health(60)
        samples += [worker.rollout_buffer.get(timeout=60) for _ in range(-len(samples) % args.num_generations)]
    finally:
        worker.stop()
        transfer.destroy()
    tokenizer = tiny_trl.tokenizer()
    for sample in samples:
        prompt, output = split(sample)
        assert prompt == tokenizer(sample.prompt).input_ids
        assert sample.completion == tokenizer.decode(output, skip_special_tokens=True)
        assert sample.model_version == versions(sample)[0]
        mean = sample.metrics["version/token_mean"]
        cut = round((versions(sample)[1] - mean) * len(output)) if versions(sample) == (1, 2) else len(output)
        expected = single(models[versions(sample)[0]], prompt, output)
        if cut < len(output):
            expected[cut:] = single(models[2], prompt, output)[cut:]
        got = torch.from_numpy(sample.old_log_probs[len(prompt) :])
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
    check_scores(samples, args.num_generations)


def versions(sample: Any) -> tuple[int, int]:
    return int(sample.metrics["version/token_min"]), int(sample.metrics["version/token_max"])


def split(sample: Any) -> tuple[list[int], list[int]]:
    """Prompt and answer, by the mask."""
    length = int((sample.completion_mask == 0).sum())
    assert sample.completion_mask.tolist() == [0] * length + [1] * (len(sample.input_ids) - length)
    assert not sample.old_log_probs[:length].any()
    return sample.input_ids[:length].tolist(), sample.input_ids[length:].tolist()


async def one_if_wanted(completions: list[str], wanted: list[int], **_: Any) -> list[float | None]:
    """A column of the data set comes along; None where this function doesn't apply."""
    return [float(len(completions[0]) > 0) if value else None for value in wanted]


def check_scores(samples: list[Any], size: int) -> None:
    """Whole groups, scored as TRL scores them."""
    wanted = {row["prompt"]: row["wanted"] for row in PROMPTS}
    groups: dict[int, list[Any]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    for group in groups.values():
        assert len(group) == size
        assert len({sample.prompt for sample in group}) == 1
        outputs = [split(sample)[1] for sample in group]
        assert [s.metrics["rewards/even"] for s in group] == even(outputs)
        extra = [1.0 if wanted[s.prompt] else math.nan for s in group]
        np.testing.assert_equal([s.metrics["rewards/one_if_wanted"] for s in group], extra)
        totals = np.array(even(outputs)) + np.nan_to_num(extra)
        np.testing.assert_allclose([s.metrics["reward"] for s in group], totals)
        advantages = (totals - totals.mean()) / (totals.std() + 1e-8)
        np.testing.assert_allclose([s.advantage for s in group], advantages, atol=1e-6)


def test_messages_go_through_the_chat_template(client: RolloutClient, tmp_path: Path) -> None:
    tokenizer = tiny_trl.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ mood }}>"
    messages = [{"role": "user", "content": "hello"}]
    args = tiny_trl.config(tmp_path, client.base_url, chat_template_kwargs={"mood": "glad"})
    worker = RolloutWorker(args, [{"prompt": messages}], even, tokenizer)
    client.post("/update_weight_version", {"new_version": "trl-7"})
    worker.start()
    try:
        sample = worker.rollout_buffer.get(timeout=60)
    finally:
        worker.stop()
    prompt, output = split(sample)
    assert bytes(prompt) == b"user:hello;glad>"
    assert sample.completion == [{"role": "assistant", "content": tokenizer.decode(output, skip_special_tokens=True)}]
    assert sample.model_version == 7


def test_tokens_of_anothers_weights_end_the_run(client: RolloutClient, tmp_path: Path) -> None:
    client.post("/update_weight_version", {"new_version": "someone-else"})
    worker = RolloutWorker(tiny_trl.config(tmp_path, client.base_url), PROMPTS, even, tiny_trl.tokenizer())
    worker.start()
    worker._generator._thread.join(60)
    with pytest.raises(RuntimeError, match="'someone-else', which this run did not push"):
        worker.check_health(60)
    assert worker.rollout_buffer.empty()


def test_a_failing_reward_function_ends_the_run(client: RolloutClient, tmp_path: Path) -> None:
    client.post("/update_weight_version", {"new_version": "trl-1"})
    worker = RolloutWorker(tiny_trl.config(tmp_path, client.base_url), PROMPTS, broken, tiny_trl.tokenizer())
    worker.start()
    worker._generator._thread.join(60)
    with pytest.raises(RuntimeError, match="no such column") as failed:
        worker.check_health(60)
    assert isinstance(failed.value.__cause__, KeyError)


def broken(**_: Any) -> list[float]:
    raise KeyError("no such column")


def test_what_others_abort_is_sampled_again(client: RolloutClient, tmp_path: Path) -> None:
    client.post("/update_weight_version", {"new_version": "trl-1"})
    args = tiny_trl.config(tmp_path, client.base_url, max_completion_length=300)
    worker = RolloutWorker(args, PROMPTS, even, tiny_trl.tokenizer())
    worker.start()
    try:
        eventually(lambda: client.abort_all() > 0)
        while "rollout/retry_total" not in worker.metrics_queue.get(timeout=60):
            pass
        samples = [worker.rollout_buffer.get(timeout=120) for _ in range(2 * args.max_inflight_tasks)]
    finally:
        worker.stop()
    outputs = [split(sample)[1] for sample in samples]
    assert all(len(output) == 300 or output[-1] == tiny_models.EOS_TOKEN_ID for output in outputs)


def test_of_more_samples_than_fit_the_newest_are_kept(client: RolloutClient, tmp_path: Path) -> None:
    client.post("/update_weight_version", {"new_version": "trl-1"})
    args = tiny_trl.config(tmp_path, client.base_url, queue_maxsize=4)
    worker = RolloutWorker(args, PROMPTS, even, tiny_trl.tokenizer())
    worker.start()
    dropped = 0
    try:
        while dropped < 20:
            dropped += int(worker.metrics_queue.get(timeout=60).get("rollout/dropped_total", 0))
    finally:
        worker.stop()
    kept = [worker.rollout_buffer.get_nowait() for _ in range(worker.rollout_buffer.qsize())]
    assert len(kept) == 4
    assert min(sample.group_id for sample in kept) >= 20 // 4 - 2  # groups in flight end in another order


class HangsUp(BaseHTTPRequestHandler):
    """Says what its logprobs are, and drops every request."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"logprobs_mode": "raw_logprobs"}')

    def do_POST(self) -> None:
        self.close_connection = True


@pytest.fixture
def hangs_up() -> Iterator[str]:
    """Its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), HangsUp) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_server_that_is_away_is_asked_again_and_then_named(hangs_up: str, tmp_path: Path) -> None:
    args = tiny_trl.config(tmp_path, hangs_up, request_timeout=1)
    worker = RolloutWorker(args, PROMPTS, even, tiny_trl.tokenizer())
    worker.start()
    worker._generator._thread.join(60)
    with pytest.raises(RuntimeError, match=re.escape(hangs_up)):
        worker.check_health(60)
    assert worker.metrics_queue.get_nowait() == {"rollout/retry_total": 1.0}


def test_a_temperature_needs_processed_logprobs(hangs_up: str, tmp_path: Path) -> None:
    args = tiny_trl.config(tmp_path, hangs_up, temperature=0.7)
    with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
        RolloutWorker(args, PROMPTS, even, tiny_trl.tokenizer()).start()


def test_a_failed_push_leaves_the_old_weights_and_finishes_the_gathers(client: RolloutClient, tmp_path: Path) -> None:
    transfer = WeightTransfer(tiny_trl.config(tmp_path, client.base_url))
    with pytest.raises(RuntimeError, match="before init_weight_transfer"):
        transfer.send_weights(iter(()))
    transfer.init_weight_transfer()
    transfer.send_weights(parameters(tiny_models.model("llama", 1)))
    info = client.weight_info()
    assert info["weight_version"] == "trl-1"
    changed = parameters(tiny_models.model("llama", 2).to(torch.bfloat16))
    with pytest.raises(Exception, match="parameters changed since the first push"):
        transfer.send_weights(changed)
    assert next(changed, None) is None
    transfer.send_weights(parameters(tiny_models.model("llama", 3)))
    after = client.weight_info()
    assert (after["weight_version"], after["epoch"]) == ("trl-2", info["epoch"] + 1)
    transfer.destroy()


@pytest.mark.parametrize("partial", [False, True])
def test_frozen_parameters_need_partial(client: RolloutClient, tmp_path: Path, partial: bool) -> None:
    """TRL sends what requires a gradient; a server takes that for a whole model only if it is told so."""
    transfer = WeightTransfer(tiny_trl.config(tmp_path, client.base_url), partial=partial)
    transfer.init_weight_transfer()
    some = (pair for pair in parameters(tiny_models.model("llama", 4)) if "embed" not in pair[0])
    if partial:
        transfer.send_weights(some)
        assert client.weight_info()["weight_version"] == "trl-1"
    else:
        with pytest.raises(WeightPushError, match="partial"):
            transfer.send_weights(some)
    transfer.destroy()


@pytest.mark.parametrize(
    ("setting", "value"), [("top_p", 0.9), ("top_k", 20), ("min_p", 0.1), ("repetition_penalty", 1.1)]
)
def test_filters_that_trl_does_not_see_are_refused(tmp_path: Path, setting: str, value: float) -> None:
    args = tiny_trl.config(tmp_path, "http://127.0.0.1:9", **{setting: value})
    with pytest.raises(ValueError, match=f"{setting}={value}: TRL's trainer"):
        RolloutWorker(args, PROMPTS, even, tiny_trl.tokenizer())
