"""The demo's main loop: sample all the time, train on what is fresh, push without a pause, report."""

from __future__ import annotations

import functools
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rollout.demo import task
from rollout.demo.report import PANELS, Step, coloured, history, most_versions, summary
from rollout.demo.trainer import Trainer
from rollout.launch import serve
from trainer_bridge import RolloutClient, WeightSender
from trainer_bridge.client import Choice
from trainer_bridge.integrations.wandb import WandbLogger
from trainer_bridge.loop import dashboard, metrics, records
from trainer_bridge.loop.sampler import RolloutSampler
from trainer_bridge.rollouts import Prompt, RolloutGroup

SAMPLING_PARAMS = {"temperature": 1.0, "max_tokens": 24, "logprobs": 0}
GROUP_SIZE = 8
GROUPS_PER_STEP = 4
GROUPS_IN_FLIGHT = 3
LEARNING_RATE = 3e-5
MAX_STALENESS = 3
"""Groups with a token sampled more than this many commits ago are not trained on."""
TAKE_TIMEOUT_S = 300.0
SETTINGS = {"group_size": GROUP_SIZE, "groups_per_step": GROUPS_PER_STEP, "learning_rate": LEARNING_RATE}


def run(model: Path, output: Path, *, steps: int, seed: int, console: Console) -> dict[str, Any]:
    """Train `model` for `steps` steps; return what is in `output`/summary.json afterwards.

    Raises RuntimeError where the server doesn't start, RolloutError, WeightPushError or TimeoutError where it fails.
    """
    transformers.utils.logging.disable_progress_bar()
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    cores = os.cpu_count() or 2
    server_threads = max(1, cores // 2)
    torch.set_num_threads(max(1, cores - server_threads))
    tokenizer = AutoTokenizer.from_pretrained(model)
    (output / "rollouts.jsonl").unlink(missing_ok=True)
    console.print(
        f"Starting a server (its log: {output / 'server.log'}) and loading the trainer's copy of the model ..."
    )
    with serve(model, output / "server.log", *_server_flags(server_threads)) as url, RolloutClient(url) as client:
        trainer = Trainer(model, learning_rate=LEARNING_RATE)
        run_log = _RunLog(model, output, tokenizer, client, {"seed": seed, "steps": steps, **SETTINGS})
        sampler = _sampler(url, tokenizer, seed)
        with WeightSender.connect(client, trainer.model) as sender, sampler, _progress(console) as progress:
            bar = progress.add_task("training", total=steps, says="the first rollouts are on their way")
            began = time.monotonic()
            epoch = client.weight_info()["epoch"]
            for number in range(1, steps + 1):
                fresh = functools.partial(_is_fresh, oldest_epoch=epoch - MAX_STALENESS)
                groups = sampler.take_groups(GROUPS_PER_STEP, usable=fresh, timeout_s=TAKE_TIMEOUT_S)
                train_began = time.monotonic()
                stats = trainer.step(groups, epoch, sampler.newest)
                train_seconds = time.monotonic() - train_began
                push = sender.push(version=f"step-{number}")
                epoch = push.epoch
                step = Step(push.version, stats, train_seconds, push.seconds, push.bytes)
                run_log.add(step, groups)
                progress.update(bar, advance=1, says=_says(step))
            numbers = summary(run_log.steps, sampler.stats, time.monotonic() - began)
    run_log.finish(numbers)
    _show(numbers, run_log.groups, tokenizer, output, console)
    return numbers


def _sampler(url: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> RolloutSampler:
    def reward(_: Prompt, choice: Choice) -> float:
        text = str(tokenizer.decode(choice.token_ids, skip_special_tokens=True))
        return task.reward(text, choice.finish_reason == "stop")

    return RolloutSampler(
        url,
        task.prompts(tokenizer, random.Random(seed)),
        reward,
        SAMPLING_PARAMS,
        group_size=GROUP_SIZE,
        in_flight=GROUPS_IN_FLIGHT,
        capacity=2 * GROUPS_PER_STEP,
        seed=seed,
    )


def _is_fresh(group: RolloutGroup, *, oldest_epoch: int) -> bool:
    return all((span.epoch or 0) >= oldest_epoch for choice in group.choices for span in choice.spans)


class _RunLog:
    """What a run leaves in its folder."""

    def __init__(
        self,
        model: Path,
        output: Path,
        tokenizer: PreTrainedTokenizerBase,
        client: RolloutClient,
        config: dict[str, Any],
    ) -> None:
        self.steps: list[Step] = []
        self.groups: list[RolloutGroup] = []
        self._model, self._output, self._tokenizer = model.resolve(), output, tokenizer
        self._client, self._info = client, client.weight_info()
        self._wandb = WandbLogger("rollout-demo", output, config)

    def add(self, step: Step, groups: list[RolloutGroup]) -> None:
        """Log a step, and record what it was trained on."""
        self.steps.append(step)
        self.groups += groups
        for group in groups:
            prompt = group.prompt.token_ids
            item = records.record(prompt, group.sampling_params, group.choices, model=self._model, info=self._info)
            records.append(self._output / "rollouts.jsonl", item)
        found = history(self.steps)[-1] | metrics.of_server(self._client)
        self._wandb.log(found, lags=step.train.lags, groups=groups, decode=self._decode)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))

    def finish(self, numbers: dict[str, Any]) -> None:
        """Write summary and picture."""
        (self._output / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n")
        dashboard.plot(history(self.steps), self._output / "reward.png", PANELS)
        self._wandb.finish(numbers)


def _server_flags(threads: int) -> list[str]:
    return [
        *("--tokens-only", "--device", "cpu", "--dtype", "float32", "--num-threads", str(threads)),
        *("--logprobs-mode", "processed_logprobs", "--batch-invariant", "--kv-policy", "recompute"),
        *("--max-model-len", "512", "--max-num-seqs", "64", "--kv-cache-memory-bytes", str(512 << 20)),
    ]


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[says]}"))
    return Progress(*columns, console=console)


def _says(step: Step) -> str:
    return (
        f"reward {step['reward/mean']:.2f}  staleness {step['staleness/mean']:.1f}  gap {step['gap/mean']:.3f}  "
        f"push {step.push_seconds:.1f} s"
    )


def _show(
    numbers: dict[str, Any],
    trained: list[RolloutGroup],
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    console: Console,
) -> None:
    console.print(
        f"Mean reward went from {numbers['reward_first']:.2f} (first quarter of the steps) to "
        f"{numbers['reward_last']:.2f} (last quarter); {numbers['weight_pushes']} pushes without a pause, crossed by "
        f"{numbers['requests_with_two_versions']} of {numbers['requests']} requests; the longest wait between two "
        f"tokens was {numbers['longest_token_gap_seconds']:.1f} s. See {output / 'reward.png'}."
    )
    group, choice = most_versions(trained)
    console.print(f"\n{group.prompt.task} One answer, coloured by the weights that sampled it:")
    console.print(coloured(tokenizer, choice))
