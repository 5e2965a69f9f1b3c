"""TRL's rollout worker on a rollout server: prompts out, scored groups of answers in."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import multiprocessing.queues
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer_bridge.client import Choice, RolloutClient
from trainer_bridge.integrations.trl_compat import (
    AsyncGRPOConfig,
    RolloutSample,
    get_callable_name,
    is_async_callable,
)
from trainer_bridge.loop.generator import GroupGenerator
from trainer_bridge.rollouts import Prompt, prompts_of_rows
from trainer_bridge.score.replay import versions_per_token

logger = logging.getLogger(__name__)

RewardFunc = Callable[..., Any]
"""TRL's: (prompts, completions, completion_ids, the data set's other columns) -> a float or None each; may be async."""

TrlQueue: TypeAlias = "queue.Queue[Any] | multiprocessing.queues.Queue[Any]"

LABEL = "trl-"
"""What a label of the weights begins with, before TRL's model version."""


class RolloutWorker:
    """TRL's `RolloutWorkerProtocol` on a thread: groups of `args.num_generations` answers, scored as TRL scores them.

    A group is one request, so its prompt is computed once. `dataset` is cycled through in order; a row holds `prompt`
    (text or messages) and the columns that the reward functions take. A sample's `model_version` is the oldest of its
    tokens' versions; `version/*` in its metrics tell the rest. It never waits for the trainer: of finished samples, the
    `args.queue_maxsize` newest are kept. One turn a sample: no tools, no environments.

    Raises ValueError for filters that TRL's trainer doesn't see: it computes logprobs over the whole vocabulary.
    """

    def __init__(
        self,
        args: AsyncGRPOConfig,
        dataset: Iterable[Mapping[str, Any]],
        reward_funcs: RewardFunc | Sequence[RewardFunc],
        processing_class: PreTrainedTokenizerBase,
        *,
        api_key: str | None = None,
    ) -> None:
        _check_unfiltered(args)
        self.rollout_buffer: TrlQueue = queue.Queue(args.queue_maxsize)  # of RolloutSample
        self.metrics_queue: TrlQueue = queue.Queue(4096)  # of dicts, each value a gauge or (sum, count)
        self.model_version = 0
        self._args = args
        self._reward_funcs = list(reward_funcs) if isinstance(reward_funcs, Sequence) else [reward_funcs]
        self._tokenizer = processing_class
        self._group_ids = itertools.count()
        self._client = RolloutClient(args.vllm_server_base_url, api_key=api_key, timeout_s=args.request_timeout)
        eos = processing_class.eos_token_id
        template = cast(dict[str, Any], args.chat_template_kwargs or {})
        self._generator = GroupGenerator(
            self._client,
            prompts_of_rows(_endlessly(dataset), processing_class, **template),
            self._finish,
            # The tokenizer's end is one for TRL, even if the model's configuration has another.
            {
                "max_tokens": args.max_completion_length,
                "temperature": args.temperature,
                "stop_token_ids": [] if eos is None else [eos],
            },
            group_size=args.num_generations,
            in_flight=max(1, args.max_inflight_tasks // args.num_generations),  # TRL has set -1 to its default by now
            seed=args.seed,
            outage_s=args.request_timeout,
            on_retry=lambda: self._push_metrics({"rollout/retry_total": 1.0}),
        )

    # TRL's interface.

    def start(self) -> None:
        """Begin to sample. Raises RolloutError, and ValueError where the server's logprobs aren't what TRL expects."""
        mode = self._client.weight_info().get("logprobs_mode")
        if self._args.temperature != 1 and mode != "processed_logprobs":
            raise ValueError(
                f"temperature={self._args.temperature} needs a server with --logprobs-mode processed_logprobs (it has "
                f"{mode}): TRL compares with logprobs at that temperature"
            )
        self._generator.start()

    def stop(self) -> None:
        self._generator.stop()

    def update_model_version(self, model_version: int) -> None:
        """Noted only: samples bear the versions that the server says."""
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError where an error (its cause) ended the sampling, or the thread was idle for that long."""
        if (error := self._generator.error) is not None:
            raise RuntimeError(f"the rollout worker failed: {error}") from error
        if (age := time.monotonic() - self._generator.last_turn) > stale_after_s:
            raise RuntimeError(f"the rollout worker has not stirred for {age:.0f} s, more than {stale_after_s:.0f} s")

    # The thread.

    async def _finish(self, prompt: Prompt, params: dict[str, Any], choices: list[Choice], seconds: float) -> None:
        self._log_lengths(choices, seconds)
        for sample in await self._score(prompt.task, prompt.token_ids, choices, next(self._group_ids)):
            self._put(sample)

    async def _score(
        self, row: Mapping[str, Any], prompt_ids: list[int], choices: list[Choice], group_id: int
    ) -> list[RolloutSample]:
        """TRL's samples: rewards summed over the functions, (r - mean) / std over the group; unscorable ones get 0."""
        prompt, n = row["prompt"], len(choices)
        completions = [self._completion(prompt, choice.token_ids) for choice in choices]
        columns = {k: [v] * n for k, v in row.items() if k not in ("prompt", "completion", "completion_ids")}
        inputs: dict[str, Any] = {
            "prompts": [prompt] * n,
            "completions": completions,
            "completion_ids": [choice.token_ids for choice in choices],
            **columns,
        }
        scores = await asyncio.gather(
            *(f(**inputs) if is_async_callable(f) else asyncio.to_thread(f, **inputs) for f in self._reward_funcs)
        )
        table = np.array([[math.nan if r is None else r for r in column] for column in scores], dtype=float)
        rewards, advantages, std = _advantages(table)
        names = [f"rewards/{get_callable_name(f)}" for f in self._reward_funcs]
        return [
            _sample(
                prompt_ids,
                choice,
                prompt=prompt,
                completion=completion,
                advantage=float(advantages[i]),
                group_id=group_id,
                metrics={
                    "reward": float(rewards[i]),
                    "reward_std": std,
                    **dict(zip(names, table[:, i].tolist(), strict=True)),
                },
            )
            for i, (choice, completion) in enumerate(zip(choices, completions, strict=True))
        ]

    def _completion(self, prompt: str | list[dict[str, Any]], token_ids: list[int]) -> Any:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]

    def _put(self, sample: RolloutSample) -> None:
        """Into the buffer, in the place of its oldest if it is full."""
        sample.enqueued_at = time.time()  # TRL compares it with its own
        while True:
            try:
                return self.rollout_buffer.put_nowait(sample)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self.rollout_buffer.get_nowait()
                    self._push_metrics({"rollout/dropped_total": 1.0})

    def _log_lengths(self, choices: list[Choice], seconds: float) -> None:
        tokens = sum(len(choice.token_ids) for choice in choices)
        cut = sum(choice.finish_reason == "length" for choice in choices)
        self._push_metrics(
            {
                "completions/mean_length": (float(tokens), float(len(choices))),
                "completions/clipped_ratio": (float(cut), float(len(choices))),
                "rollout/duration_s": seconds,
            }
        )

    def _push_metrics(self, values: dict[str, float | tuple[float, float]]) -> None:
        try:
            self.metrics_queue.put_nowait(values)
        except queue.Full:
            logger.warning("the metrics queue is full: TRL has not logged for long")


def _check_unfiltered(args: AsyncGRPOConfig) -> None:
    filters = {
        "top_p": args.top_p < 1,
        "top_k": args.top_k > 0,
        "min_p": bool(args.min_p),
        "repetition_penalty": args.repetition_penalty != 1,
    }
    if at_work := [f"{name}={getattr(args, name)}" for name, works in filters.items() if works]:
        raise ValueError(
            f"{', '.join(at_work)}: TRL's trainer computes logprobs over the whole vocabulary, so its ratios would be "
            "biased; sample unfiltered, or train with trainer_bridge.score.replay, which replays sampling masks"
        )


def _endlessly(dataset: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    while True:
        row = None
        for row in dataset:
            yield row
        if row is None:
            raise ValueError("the data set is empty")


def _advantages(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Rewards and advantages (answers,), and the rewards' std, from `scores` (functions, answers), NaN where None."""
    rewards = np.where(np.isnan(scores).all(axis=0), math.nan, np.nansum(scores, axis=0))
    scored = rewards[~np.isnan(rewards)]
    if not scored.size:
        return rewards, np.zeros_like(rewards), math.nan
    if scored.min() == scored.max():  # rounding of their mean is no advantage
        return rewards, np.zeros_like(rewards), 0.0
    return rewards, np.nan_to_num((rewards - scored.mean()) / (scored.std() + 1e-8)), float(scored.std())


def _sample(prompt_ids: list[int], choice: Choice, *, metrics: dict[str, float], **fields: Any) -> RolloutSample:
    """TRL's sample of one answer: prompt and answer as they were sent and sampled."""
    versions = [_version(label) for label in versions_per_token(choice.spans, len(choice.token_ids))]
    if choice.logprobs is None or not versions:
        raise ValueError(f"nothing to train on: {len(choice.token_ids)} tokens with logprobs {choice.logprobs}")
    context = [0] * len(prompt_ids)
    return RolloutSample(
        input_ids=np.array(prompt_ids + choice.token_ids, dtype=np.int64),
        completion_mask=np.array(context + [1] * len(choice.token_ids), dtype=np.int64),
        old_log_probs=np.array(context + choice.logprobs, dtype=np.float32),
        model_version=min(versions),
        metrics={
            **metrics,
            "version/token_min": float(min(versions)),
            "version/token_mean": sum(versions) / len(versions),
            "version/token_max": float(max(versions)),
            "version/mixed_frac": float(len(set(versions)) > 1),
        },
        **fields,
    )


def _version(label: str) -> int:
    number = label.removeprefix(LABEL)
    if number == label or not number.isdecimal():
        raise ValueError(
            f"a token was sampled by weights labelled {label!r}, which this run did not push: another trainer pushes "
            "to this server, or it was restarted"
        )
    return int(number)
