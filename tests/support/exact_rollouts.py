"""Rollouts of a batch-invariant engine, and the logprobs that an exact trainer's model gives their tokens."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.messages import AddRequest
from rollout.outputs import mask_ids
from rollout.sampling.params import SamplingParams
from trainer_bridge.score import exact, replay

DTYPES = ("float32", "bfloat16")


@dataclass
class Rollout:
    """One choice of a request, as the engine gave it; `epochs` names the weights of each token."""

    request: AddRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masks: list[list[int] | None] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    @property
    def sequence(self) -> list[int]:
        return self.request.prompt_token_ids + self.token_ids


Rollouts = dict[tuple[str, int], Rollout]
"""(request id, choice) → its rollout."""


def exact_engine(path: Path, dtype: str = "float32", **config: Any) -> Engine:
    """An engine on the CPU whose logprobs are those of the sampled distribution; 768 tokens of cache by default."""
    defaults = {"num_gpu_blocks_override": 48, "max_model_len": 256, "max_num_seqs": 16, "seed": 0}
    modes = {"batch_invariant": True, "logprobs_mode": "processed_logprobs", "device": "cpu"}
    return Engine(EngineConfig(model=str(path), dtype=dtype, **{**defaults, **modes, **config}))  # type: ignore[arg-type]


def trainers_model(path: Path, dtype: str = "float32") -> PreTrainedModel:
    """transformers' model with the exact arithmetic, ready for gradients."""
    return exact.install(AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval())


def request(request_id: str, token_ids: list[int], **params: Any) -> AddRequest:
    """A request that asks for logprobs and masks, its seed named after it."""
    params = {"logprobs": 0, "max_tokens": 10, "ignore_eos": True, "seed": sum(request_id.encode()), **params}
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(**params),
        return_sampling_mask=True,
    )


def roll_out(engine: Engine, requests: Sequence[AddRequest], arrivals: Sequence[int] = ()) -> Rollouts:
    """Run the requests to their end, each added before the step that `arrivals` says, all at once without it."""
    rollouts = Rollouts()
    pending = list(zip(arrivals or [0] * len(requests), requests, strict=True))
    number = 0
    while pending or engine.has_work:
        for item in [item for at, item in pending if at <= number]:
            engine.add_request(item)
            rollouts |= {(item.request_id, index): Rollout(item) for index in range(item.sampling_params.n)}
        pending = [(at, item) for at, item in pending if at > number]
        take_step(engine, rollouts)
        number += 1
    return rollouts


def take_step(engine: Engine, rollouts: Rollouts) -> None:
    """One step of the engine, its tokens appended to the rollouts they belong to."""
    for output in engine.step():
        rollout = rollouts[output.request_id, output.index]
        assert output.token_id is not None
        assert output.logprobs is not None
        assert output.kv == "current"
        rollout.token_ids.append(output.token_id)
        rollout.logprobs.append(output.logprobs[0].logprob)
        mask = output.sampling_mask
        rollout.masks.append(None if mask is None else mask_ids(mask).tolist())
        rollout.epochs.append(output.epoch)


def counted(
    engine: Engine, requests: Sequence[AddRequest], arrivals: Sequence[int] = ()
) -> tuple[Rollouts, Counter[str]]:
    """The rollouts, and by how much each of the engine's counters rose."""
    before = Counter(engine.stats)
    rollouts = roll_out(engine, requests, arrivals)
    return rollouts, Counter(engine.stats) - before


def same_bits(left: Rollouts, right: Rollouts) -> bool:
    """Whether ids, masks and logprobs are equal; a logprob travels as a float64, which holds a float32 exactly."""

    def bits(rollouts: Rollouts) -> dict[tuple[str, int], Any]:
        return {key: (r.token_ids, r.logprobs, r.masks) for key, r in rollouts.items()}

    return bits(left) == bits(right)


def trainer_logprobs(model: PreTrainedModel, rollouts: Sequence[Rollout], *, packed: bool = False) -> list[Tensor]:
    """Float32 logprobs of each rollout's tokens, differentiable: one pass over right-padded rows, or one packed row."""
    rows = [torch.tensor(rollout.sequence) for rollout in rollouts]
    lengths = [len(row) for row in rows]
    if packed:
        positions = torch.cat([torch.arange(length) for length in lengths])
        logits = model(input_ids=torch.cat(rows)[None], position_ids=positions[None]).logits[0].split(lengths)
    else:
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        logits = model(input_ids=pad_sequence(rows, batch_first=True), attention_mask=mask.long()).logits
    result = []
    for rollout, table in zip(rollouts, logits, strict=True):
        prompt = rollout.request.prompt_token_ids
        result.append(
            replay.logprobs(
                table[len(prompt) - 1 : len(rollout.sequence) - 1],
                rollout.token_ids,
                sampling_params=rollout.request.sampling_params,
                sampling_mask=rollout.masks,
                prompt_token_ids=prompt,
            )
        )
    return result


def differing(rollouts: Sequence[Rollout], logprobs: Sequence[Tensor]) -> tuple[int, int]:
    """(tokens whose logprob has other bits, tokens)."""
    old = torch.tensor([value for rollout in rollouts for value in rollout.logprobs])
    new = torch.cat([values.detach() for values in logprobs])
    assert new.dtype is old.dtype is torch.float32
    return int((new.view(torch.int32) != old.view(torch.int32)).sum()), len(old)


def grouped(rollouts: dict[Any, Rollout]) -> dict[str, list[Rollout]]:
    """The choices of each request."""
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts.values():
        groups[rollout.request.request_id].append(rollout)
    return dict(groups)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with `count` threads in the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
