"""What grpo.py and ppo.py share: the flags, the server, and the asynchronous loop around their training steps."""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from tasks import Task, task_of
from transformers import AutoModelForCausalLM, PreTrainedModel

import rollout
from trainer_bridge import RolloutClient
from trainer_bridge.integrations.wandb import WandbLogger
from trainer_bridge.loop import checkpoint, dashboard, metrics
from trainer_bridge.loop.sampler import RolloutSampler
from trainer_bridge.push.publisher import Publisher
from trainer_bridge.rollouts import RolloutGroup
from trainer_bridge.score import exact
from trainer_bridge.score.groups import current_gap


class Trainer(Protocol):
    """An algorithm: a policy, and what one step does with a batch of groups."""

    policy: PreTrainedModel

    def state_dict(self) -> dict[str, Any]:
        """All that a restarted trainer needs to go on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave."""

    def step(
        self, groups: Sequence[RolloutGroup], lags: Sequence[torch.Tensor], current_gap: Callable[[], float | None]
    ) -> dict[str, float]:
        """One step on `groups`; `lags` (T,) say of each one's tokens how many versions they are behind. Its metrics.

        `current_gap` is called as late as the weights are still those that were published, and gives a metric of them.
        """


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The flags of both trainers."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a transformers folder, also of the server that --url names")
    parser.add_argument("--url", help="a running server; default: one is started for the time being")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint, from which a run goes on")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", action="store_true", help="the server's bits in the trainer's forward pass")
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--group-size", type=int, default=8, help="answers to one prompt")
    parser.add_argument("--groups-per-step", type=int, default=4)
    parser.add_argument("--groups-in-flight", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--max-lag", type=int, default=3, help="tokens of older versions weigh nothing")
    parser.add_argument("--lag-decay", type=float, default=1.0, help="weight of a token: this to the power of its lag")
    parser.add_argument("--outage", type=float, default=120.0, help="seconds for which the server may be away")
    return parser


def sampling_params(args: argparse.Namespace) -> dict[str, Any]:
    """Of every request."""
    given = {name: getattr(args, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    return {**given, "logprobs": 0}


def load_policy(args: argparse.Namespace) -> PreTrainedModel:
    """The policy in float32; with --exact, its forward pass has the server's bits."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    return exact.install(model) if args.exact else model


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[RolloutClient]:
    """A client of the server at --url, or of one that is started. Raises SystemExit for a server of other settings."""
    with contextlib.ExitStack() as stack:
        if args.url is not None:
            client = stack.enter_context(RolloutClient(args.url))
        else:
            flags: dict[str, Any] = {
                "logprobs_mode": "processed_logprobs",
                "return_sampling_mask": True,
                "kv_policy": "recompute",
            }
            flags |= {"dtype": "float32", "max_model_len": 512, "batch_invariant": args.exact}
            client = stack.enter_context(rollout.serve(args.model, log=args.output / "server.log", **flags))
        client.wait_until_ready(args.outage)
        info = client.weight_info()
        if info["logprobs_mode"] != "processed_logprobs":
            raise SystemExit(
                f"{client.base_url} reports {info['logprobs_mode']}: serve with --logprobs-mode processed_logprobs"
            )
        if args.exact and not info["batch_invariant"]:
            raise SystemExit(
                f"{client.base_url} isn't batch-invariant: serve with --batch-invariant, or leave out --exact"
            )
        yield client


def run(name: str, args: argparse.Namespace, trainer: Trainer) -> None:
    """Train until --steps, from the checkpoint if there is one.

    Sampling never stops: each step takes finished groups, trains, writes the checkpoint, and pushes. A trainer that was
    killed comes back to its checkpoint, a server that was is brought to the trainer's weights: what either had beyond
    that is lost, and both go on from the same weights.
    """
    saved = checkpoint.load(args.output / "checkpoint.pt") or {"step": 0, "run_id": uuid.uuid4().hex[:8]}
    step, run_id = saved["step"], saved["run_id"]
    if step:
        trainer.load_state_dict(saved["trainer"])
    wandb = WandbLogger(f"rollout-{name}", args.output, vars(args), run_id=run_id)
    history = dashboard.History(args.output / "metrics.jsonl", resume_at=step)
    task = task_of(args.model)
    with server(args) as client, Publisher(client, trainer.policy, outage_s=args.outage) as publisher:
        publisher.publish(step)
        print(f"step {step} is published", flush=True)
        with sampler(args, client, task, step) as samples:
            while step < args.steps:
                began, sampled = time.monotonic(), samples.stats.tokens
                groups = samples.take_groups(
                    args.groups_per_step,
                    usable=lambda group: bool((lags_of(publisher, group) <= args.max_lag).any()),
                    timeout_s=600,
                    while_waiting=publisher.restore,
                )
                taken = time.monotonic()
                lags = [lags_of(publisher, group) for group in groups]
                found = trainer.step(groups, lags, lambda: gap_now(trainer, publisher, samples))
                trained = time.monotonic()
                step += 1
                state = {"step": step, "run_id": run_id, "trainer": trainer.state_dict()}
                checkpoint.save(args.output / "checkpoint.pt", state)
                pushed = publisher.publish(step)
                found |= metrics.of_rollouts(groups) | metrics.of_server(client)
                found |= {
                    dashboard.STEP: step,
                    "speed/wait_s": taken - began,
                    "speed/train_s": trained - taken,
                    "speed/trainer_tokens_per_s": sum(map(len, lags)) / (trained - taken),
                    "speed/rollout_tokens_per_s": (samples.stats.tokens - sampled) / (time.monotonic() - began),
                    "push/seconds": pushed.seconds,
                    "push/bytes": pushed.bytes,
                    "rollout/dropped_groups": samples.stats.dropped_groups,
                }
                history.log(found)
                wandb.log(found, lags=torch.cat(lags), groups=groups, decode=task.decode)
                print(says(found), flush=True)
    dashboard.plot(history.steps, args.output / "dashboard.png")
    wandb.finish()


def sampler(args: argparse.Namespace, client: RolloutClient, task: Task, step: int) -> RolloutSampler:
    """Of a run that goes on after `step`: it doesn't repeat the prompts it began with."""
    seed = random.Random(f"{args.seed} {step}").getrandbits(32)
    return RolloutSampler(
        client.base_url,
        task.prompts(random.Random(seed)),
        task.reward,
        sampling_params(args),
        group_size=args.group_size,
        in_flight=args.groups_in_flight,
        capacity=2 * args.groups_per_step,
        seed=seed,
        outage_s=args.outage,
    )


def gap_now(trainer: Trainer, publisher: Publisher, samples: RolloutSampler) -> float | None:
    """Between trainer and server, of what the trainer's present weights have sampled last."""
    return current_gap(trainer.policy, samples.newest(), functools.partial(lags_of, publisher))


def lags_of(publisher: Publisher, group: RolloutGroup) -> torch.Tensor:
    """Of all the group's tokens, one answer after the other."""
    return torch.cat([publisher.lags(choice) for choice in group.choices])


def says(found: dict[str, float]) -> str:
    """One line for the terminal."""
    current = found.get("gap/current_max")
    of_current = "no current token" if current is None else f"{current:.3g} for current tokens"
    return (
        f"step {found[dashboard.STEP]}: reward {found['reward/mean']:.3f}  gap {found['gap/mean']:.3g} ({of_current})  "
        f"lag {found.get('staleness/mean', 0):.2f}  push {found['push/seconds']:.2f} s"
    )
