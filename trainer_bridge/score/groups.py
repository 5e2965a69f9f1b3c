"""The trainer's own logprobs of what a server sampled: one forward pass for a group of answers to one prompt.

The group is one row: the prompt once, then every answer at the positions that follow it. A prompt longer than its
answers is the common case, and this spares most of the arithmetic. After `exact.install` the values have the server's
bits; otherwise the row's attention is told by a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer_bridge.client import Choice
from trainer_bridge.rollouts import Group
from trainer_bridge.score import losses, replay
from trainer_bridge.score.exact import ATTENTION_NAME


@dataclass(frozen=True)
class Scores:
    """Of the tokens of a group's answers, one answer after the other, T in all; float32.

    `logprobs` (T,) are of the distribution that was sampled (mask, temperature and penalties included) and
    differentiable; `entropies` (T,), in nats, of the policy as it is, without them and without a gradient; `hidden`
    (T, hidden_size; the model's dtype, differentiable) are the final hidden states that predict the tokens, for a value
    head; None unless asked for.
    """

    logprobs: Tensor
    entropies: Tensor
    hidden: Tensor | None


@dataclass(frozen=True)
class GroupRow:
    """Prompt and answers as one row: `ids` and `positions` (length,), `visible` (length, length), true where a token
    attends to another, and of each answer the `rows` whose logits predict its tokens."""

    ids: Tensor
    positions: Tensor
    visible: Tensor
    rows: list[list[int]]


def group_row(prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> GroupRow:
    """The row of a group. An answer's last token is no input: nothing is predicted from it."""
    ids, positions, owners, rows = list(prompt), list(range(len(prompt))), [0] * len(prompt), []
    for owner, answer in enumerate(answers, start=1):
        inputs = answer[:-1]
        rows.append([len(prompt) - 1, *range(len(ids), len(ids) + len(inputs))][: len(answer)])
        ids += inputs
        positions += range(len(prompt), len(prompt) + len(inputs))
        owners += [owner] * len(inputs)
    owned, order = torch.tensor(owners), torch.arange(len(ids))
    visible = (order[:, None] >= order) & ((owned[:, None] == owned) | (owned == 0))
    return GroupRow(torch.tensor(ids), torch.tensor(positions), visible, rows)


def group_logits(
    model: PreTrainedModel, prompt: Sequence[int], answers: Sequence[Sequence[int]], *, hidden: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Logits (T, vocab) for all the answers' tokens, and the hidden states (T, hidden_size) where asked for.

    Raises ValueError for a model with sliding windows shorter than the row, unless it is exact: its mask would differ
    from layer to layer.
    """
    row = group_row(prompt, answers)
    wanted = torch.tensor([at for rows in row.rows for at in rows], device=model.device)
    mask: Tensor | None = None
    if model.config._attn_implementation != ATTENTION_NAME:
        window = getattr(model.config, "sliding_window", None)
        if window is not None and window < len(row.ids):
            raise ValueError(
                f"{type(model).__name__} has sliding windows of {window} positions, and the group's row has "
                f"{len(row.ids)}: score it with trainer_bridge.score.exact.install(model)"
            )
        mask = row.visible[None, None].to(model.device)
    output = model(
        input_ids=row.ids[None].to(model.device),
        position_ids=row.positions[None].to(model.device),
        attention_mask=mask,
        use_cache=False,
        output_hidden_states=hidden,
        logits_to_keep=wanted,
    )
    return output.logits[0], output.hidden_states[-1][0, wanted] if hidden else None


def score(
    model: PreTrainedModel,
    prompt: Sequence[int],
    choices: Sequence[Choice],
    sampling_params: Mapping[str, Any],
    *,
    hidden: bool = False,
) -> Scores:
    """Score `choices`, all of them answers to `prompt` under `sampling_params`, by the model as it is now.

    The recorded masks are replayed. Raises ValueError as `replay.logprobs` and `group_logits` do.
    """
    logits, states = group_logits(model, prompt, [choice.token_ids for choice in choices], hidden=hidden)
    tables = logits.split([len(choice.token_ids) for choice in choices])
    logprobs = [
        replay.logprobs(
            table,
            choice.token_ids,
            sampling_params=sampling_params,
            sampling_mask=choice.sampling_mask,
            prompt_token_ids=prompt,
        )
        for table, choice in zip(tables, choices, strict=True)
    ]
    with torch.no_grad():
        entropies = losses.entropies(logits)
    return Scores(torch.cat(logprobs), entropies, states)


def current_gap(model: PreTrainedModel, group: Group | None, lags: Callable[[Group], Tensor]) -> float | None:
    """The largest |log π_θ - log π_old| over tokens that the model's very weights have sampled (`lags` 0), in nats.

    0 in exact mode; None where the group has no such token. Of the groups that a step trains on, few may have one: most
    finished before the last push. Those that finish while the step computes its gradients do, and until its update the
    weights are still the ones that were pushed.
    """
    if group is None or not (current := lags(group) == 0).any():
        return None
    with torch.no_grad():
        new = score(model, group.prompt.token_ids, group.choices, group.sampling_params).logprobs
    return float((new - torch.tensor(group.logprobs, device=new.device)).abs()[current.to(new.device)].max())
