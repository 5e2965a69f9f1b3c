"""The demo's main loop: sample all the time, train on what is fresh, push without a pause, report."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rollout.demo.report import Step, WandbRun, coloured, most_versions, plot, summary
from rollout.demo.sampler import Group, Sampler
from rollout.demo.server import serve
from rollout.demo.trainer import Trainer
from trainer_bridge import RolloutClient, WeightSender

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
    wandb = WandbRun({"seed": seed, "steps": steps, **SETTINGS}, output)
    console.print(
        f"Starting a server (its log: {output / 'server.log'}) and loading the trainer's copy of the model ..."
    )
    with serve(model, output / "server.log", *_server_flags(server_threads, seed)) as url, RolloutClient(url) as client:
        trainer = Trainer(model, SAMPLING_PARAMS, learning_rate=LEARNING_RATE)
        sampler = Sampler(
            url,
            tokenizer,
            SAMPLING_PARAMS,
            group_size=GROUP_SIZE,
            in_flight=GROUPS_IN_FLIGHT,
            capacity=2 * GROUPS_PER_STEP,
            seed=seed,
        )
        done: list[Step] = []
        trained: list[Group] = []
        with WeightSender.connect(client, trainer.model) as sender, sampler, _progress(console) as progress:
            bar = progress.add_task("training", total=steps, says="the first rollouts are on their way")
            began = time.monotonic()
            epoch = client.weight_info()["epoch"]
            while len(done) < steps:
                groups = sampler.take(GROUPS_PER_STEP, oldest_epoch=epoch - MAX_STALENESS, timeout_s=TAKE_TIMEOUT_S)
                train_began = time.monotonic()
                stats = trainer.step(groups, epoch)
                train_seconds = time.monotonic() - train_began
                push = sender.push(version=f"step-{len(done) + 1}")
                epoch = push.epoch
                done.append(Step(push.version, stats, train_seconds, push.seconds))
                trained += groups
                wandb.log(done[-1])
                progress.update(bar, advance=1, says=_says(done[-1]))
            numbers = summary(done, sampler.stats, time.monotonic() - began)
    (output / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n")
    plot(done, output / "reward.png")
    wandb.finish(numbers)
    _show(numbers, trained, tokenizer, output, console)
    return numbers


def _server_flags(threads: int, seed: int) -> list[str]:
    return [
        *("--tokens-only", "--device", "cpu", "--dtype", "float32", "--num-threads", str(threads), "--seed", str(seed)),
        *("--logprobs-mode", "processed_logprobs", "--kv-policy", "recompute"),
        *("--max-model-len", "512", "--max-num-seqs", "64", "--kv-cache-memory-bytes", str(512 << 20)),
    ]


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[says]}"))
    return Progress(*columns, console=console)


def _says(step: Step) -> str:
    train = step.train
    return (
        f"reward {train.reward:.2f}  staleness {train.staleness:.1f}  gap {train.logprob_gap:.3f}  "
        f"push {step.push_seconds:.1f} s"
    )


def _show(
    numbers: dict[str, Any],
    trained: list[Group],
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
    console.print(f"\n{group.question} One answer, coloured by the weights that sampled it:")
    console.print(coloured(tokenizer, choice))
