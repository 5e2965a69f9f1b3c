"""An Engine on a tiny model, requests run to their end, and transformers' own word on what came out."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.messages import AddRequest
from rollout.outputs import TokenOutput, WeightVersionSpan
from rollout.sampling.params import SamplingParams
from rollout.server.generation import weight_versions

TOLERANCE = 1e-4
"""Largest difference of a logprob in float32 from transformers' teacher-forced forward."""

Outputs = dict[tuple[str, int], list[TokenOutput]]
"""(request id, choice) → its outputs in order."""


def engine(path: Path, **config: Any) -> Engine:
    """A float32 engine on the CPU, its cache 512 tokens and its sequences 256 unless `config` says otherwise."""
    defaults = {"num_gpu_blocks_override": 128, "block_size": 4, "max_model_len": 256, "max_num_seqs": 16, "seed": 0}
    return Engine(EngineConfig(model=str(path), dtype="float32", device="cpu", **{**defaults, **config}))


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids, none of them special."""
    return random.Random(f"{length} {seed}").choices(range(2, 256), k=length)


def request(request_id: str, token_ids: list[int], *, mask: bool = False, **params: Any) -> AddRequest:
    """A request that asks for the logprob of each sampled token, unless `params` says otherwise."""
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(**{"logprobs": 0, "max_tokens": 8, **params}),
        return_sampling_mask=mask,
    )


def run(engine: Engine, requests: Iterable[AddRequest]) -> Outputs:
    """Add the requests together and step until all have ended; every block is free again then."""
    for item in requests:
        engine.add_request(item)
    outputs: Outputs = defaultdict(list)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id, output.index].append(output)
    assert engine.stats["free_blocks"] == engine.stats["num_blocks"]
    for choice in outputs.values():
        assert [output.finish_reason is None for output in choice] == [True] * (len(choice) - 1) + [False]
    return dict(outputs)


def ids(outputs: list[TokenOutput]) -> list[int]:
    return [output.token_id for output in outputs if output.token_id is not None]


def logprobs(outputs: list[TokenOutput]) -> Tensor:
    """The logprob that the engine reported for each sampled token, (tokens,)."""
    entries = [output.logprobs[0] for output in outputs if output.logprobs]
    assert [entry.token_id for entry in entries] == ids(outputs)
    return torch.tensor([entry.logprob for entry in entries])


@torch.inference_mode()
def teacher_forced(model: PreTrainedModel, prompt: list[int], output: list[int]) -> Tensor:
    """transformers' float32 logits (tokens, vocab) that predict each token of `output`, by one plain forward pass."""
    logits: Tensor = model(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def assert_exact(model: PreTrainedModel, requests: Iterable[AddRequest], outputs: Outputs) -> None:
    """Each request has its n choices, and each sampled token the logprob that transformers gives it."""
    for item in requests:
        for index in range(item.sampling_params.n):
            choice = outputs[item.request_id, index]
            expected = teacher_forced(model, item.prompt_token_ids, ids(choice)).log_softmax(-1)
            expected = expected.gather(-1, torch.tensor(ids(choice))[:, None])[:, 0]
            torch.testing.assert_close(logprobs(choice), expected, atol=TOLERANCE, rtol=0)


def spans(outputs: list[TokenOutput]) -> list[WeightVersionSpan]:
    """The spans that a server makes of one choice's outputs."""
    return weight_versions((o.version, o.epoch, o.kv) for o in outputs if o.token_id is not None)
