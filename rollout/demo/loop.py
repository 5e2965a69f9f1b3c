"""The demo's main loop: sample all the time, train on what is fresh, push without a pause, report."""

from __future__ import annotations

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
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rollout.demo import task
from rollout.demo.report import PANELS, Step, coloured, conclusion, history, most_versions, summary
from rollout.demo.trainer import GRPO
from rollout.serving import serve
from trainer_bridge import RolloutClient, WeightSender
from trainer_bridge.client import Choice
from trainer_bridge.integrations.wandb import WandbLogger
from trainer_bridge.loop import dashboard, metrics, records
from trainer_bridge.loop.sampler import RolloutSampler
from trainer_bridge.rollouts import Prompt, RolloutGroup
from trainer_bridge.score import exact, replay
from trainer_bridge.score.groups import current_gap

SAMPLING_PARAMS = {"temperature": 1.0, "max_tokens": 24, "logprobs": 0}
GROUP_SIZE = 8
GROUPS_PER_STEP = 4
GROUPS_IN_FLIGHT = 3
LEARNING_RATE = 3e-5
MAX_STALENESS = 3
"""Tokens sampled more than this many commits ago weigh nothing; a group of such tokens alone is dropped."""
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
    with serve(model, log=output / "server.log", **_server_flags(server_threads)) as client:
        policy: PreTrainedModel = exact.install(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
        optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        trainer = GRPO(policy, optimizer, max_lag=MAX_STALENESS, lag_decay=1.0)
        run_log = _RunLog(model, output, tokenizer, client, {"seed": seed, "steps": steps, **SETTINGS})
        sampler = _sampler(client, tokenizer, seed)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[says]}"))
        progress = Progress(*columns, console=console, disable=not console.is_terminal)
        with WeightSender.connect(client, policy) as sender, sampler, progress:
            bar = progress.add_task("training", total=steps, says="the first rollouts are on their way")
            began = time.monotonic()
            lags = Lags(client.weight_info()["epoch"])
            for number in range(1, steps + 1):
                groups = sampler.take_groups(
                    GROUPS_PER_STEP, usable=lags.are_usable, timeout_s=TAKE_TIMEOUT_S, make_room=False
                )
                sampler.make_room(GROUPS_PER_STEP - GROUPS_IN_FLIGHT)
                train_began, of_groups = time.monotonic(), [lags.of(group) for group in groups]
                found = metrics.of_rollouts(groups)
                found |= trainer.step(groups, of_groups, lambda: current_gap(policy, sampler.newest(), lags.of))
                train_seconds = time.monotonic() - train_began
                sampler.make_room(GROUPS_IN_FLIGHT)  # now, so that each push finds as many in flight
                push = sender.push(version=f"step-{number}")
                lags.epoch = push.epoch
                step = Step(push.version, found, torch.cat(of_groups), train_seconds, push.seconds, push.bytes)
                run_log.add(step, groups)
                progress.update(bar, advance=1, says=str(step))
                if not console.is_terminal:  # where there is no bar
                    console.print(f"step {number} of {steps}, {time.monotonic() - began:.0f} s: {step}", soft_wrap=True)
            seconds = time.monotonic() - began
            numbers = summary(run_log.steps, sampler.stats, seconds, MAX_STALENESS, lags.too_old)
    run_log.finish(numbers)
    console.print(conclusion(numbers, MAX_STALENESS, output), soft_wrap=True)
    group, choice = most_versions(run_log.groups)
    console.print(f"\n{group.prompt.task} One answer, coloured by the weights that sampled it:")
    console.print(coloured(tokenizer, choice))
    return numbers


def _sampler(client: RolloutClient, tokenizer: PreTrainedTokenizerBase, seed: int) -> RolloutSampler:
    def reward(_: Prompt, choice: Choice) -> float:
        text = str(tokenizer.decode(choice.token_ids, skip_special_tokens=True))
        return task.reward(text, choice.finish_reason == "stop")

    return RolloutSampler(
        client,
        task.prompts(tokenizer, random.Random(seed)),
        reward,
        SAMPLING_PARAMS,
        group_size=GROUP_SIZE,
        in_flight=GROUPS_IN_FLIGHT,
        capacity=GROUPS_PER_STEP + GROUPS_IN_FLIGHT,
        wait_when_full=True,
        seed=seed,
    )


class Lags:
    """How many commits tokens are behind the weights of `epoch`, and how many groups were `too_old` to be used."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.too_old = epoch, 0

    def of(self, group: RolloutGroup) -> Tensor:
        """Of all the group's tokens, (T,) float32, one answer after the other."""
        lags = [lag for c in group.choices for lag in replay.staleness(c.spans, len(c.token_ids), self.epoch)]
        return torch.tensor(lags, dtype=torch.float32)

    def are_usable(self, group: RolloutGroup) -> bool:
        """Whether a token is no more than MAX_STALENESS commits old. The sampler asks once, and drops what isn't."""
        usable = bool((self.of(group) <= MAX_STALENESS).any())
        self.too_old += not usable
        return usable


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
        self._wandb.log(found, lags=step.lags, groups=groups, decode=self._decode)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))

    def finish(self, numbers: dict[str, Any]) -> None:
        (self._output / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n")
        dashboard.plot(history(self.steps), self._output / "reward.png", PANELS)
        self._wandb.finish(numbers)


def _server_flags(threads: int) -> dict[str, Any]:
    return {
        "tokens_only": True,
        "device": "cpu",
        "dtype": "float32",
        "num_threads": threads,
        "logprobs_mode": "processed_logprobs",
        "batch_invariant": True,
        "kv_policy": "recompute",
        "max_model_len": 512,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 512 << 20,
    }
