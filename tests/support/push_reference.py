"""The logprobs of tokens that several sets of weights sampled, by transformers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.support.engine_utils import teacher_forced

Models = Sequence[PreTrainedModel] | Mapping[int, PreTrainedModel]
"""The model of each epoch, by its number."""


def single(model: PreTrainedModel, prompt: list[int], output: list[int]) -> Tensor:
    """Logprobs of `output`, (tokens,), by one plain forward pass."""
    table = teacher_forced(model, prompt, output).log_softmax(-1)
    return table.gather(-1, torch.tensor(output)[:, None])[:, 0]


@torch.inference_mode()
def as_stamped(models: Models, prompt: list[int], output: list[int], spans: Sequence[Any]) -> Tensor:
    """The logprob of each token of `output`, (tokens,), under what its span says.

    A "current" span: one plain pass of its epoch's weights over everything before it. A "mixed" one: the cache that the
    span before it had, and every position since computed by the weights of the step that fed it.
    """
    assert [span.start for span in spans] == [0, *(span.end for span in spans)][:-1]
    assert spans[-1].end == len(output)
    assert spans[0].kv == "current"  # nothing was sampled before: all of it is of one epoch
    epochs = [span.epoch for span in spans]
    assert epochs == sorted(epochs)
    tokens = prompt + output
    found: list[Tensor] = []
    cache = DynamicCache()
    for span in spans:
        start, end = len(prompt) + span.start, len(prompt) + span.end
        model = models[span.epoch]
        if span.kv == "current":
            found.append(single(model, tokens[:start], tokens[start:end]))
            cache = DynamicCache()
            _feed(model, tokens[: end - 1], cache)
        else:
            table = _feed(model, tokens[start - 1 : end - 1], cache).log_softmax(-1)
            found.append(table.gather(-1, torch.tensor(tokens[start:end])[:, None])[:, 0])
        assert cache.get_seq_length() == end - 1
    return torch.cat(found)


def assert_moved(models: Models, prompt: list[int], output: list[int], spans: Sequence[Any], got: Tensor) -> None:
    """After the first span, the logprobs aren't those of the first epoch's weights, nor where mixed of the span's."""
    first, *later = spans
    assert later
    for span in later:
        for epoch in {first.epoch} - {span.epoch} | ({span.epoch} if span.kv == "mixed" else set()):
            other = single(models[epoch], prompt, output)
            assert (got - other)[span.start : span.end].abs().mean() > 0.1, (span, epoch)


def _feed(model: PreTrainedModel, tokens: list[int], cache: DynamicCache) -> Tensor:
    logits: Tensor = model(torch.tensor([tokens]), None, None, cache).logits[0]  # its keyword has had two names
    return logits.float()
