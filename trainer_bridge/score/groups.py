"""The trainer's own logprobs of what a server sampled: one forward pass for a group of answers to one prompt.

The group is one row: the prompt once, then every answer at the positions that follow it. A prompt longer than its
answers is the common case, and this spares most of the arithmetic. After `exact.install` the values have the server's
bits; otherwise the row's attention is told by a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer_bridge.rollouts import RolloutGroup
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

    Raises ValueError, naming it, for an attention implementation that isn't known to take the row's mask; and, unless
    the model is exact, for layers whose mask would be another one: sliding windows shorter than the row, chunked or
    linear attention.
    """
    row = group_row(prompt, answers)
    wanted = torch.tensor([at for rows in row.rows for at in rows], device=model.device)
    mask = _mask(model, row)
    output = model(
        input_ids=row.ids[None].to(model.device),
        position_ids=row.positions[None].to(model.device),
        attention_mask=None if mask is None else mask.to(model.device),
        use_cache=False,
        output_hidden_states=hidden,
        logits_to_keep=wanted,
    )
    return output.logits[0], output.hidden_states[-1][0, wanted] if hidden else None


def _mask(model: PreTrainedModel, row: GroupRow) -> Tensor | None:
    """What the model's attention is given so that a token sees what `row.visible` says; None for an exact model, whose
    positions say it. Eager attention adds its mask to the scores, torch's takes a bool one."""
    config = model.config.get_text_config()
    implementation, name = config._attn_implementation, type(model).__name__
    if implementation == ATTENTION_NAME:
        return None
    remedy = "score it with trainer_bridge.score.exact.install(model)"
    if implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"{name} has the attention {implementation!r}, which may not take a group's mask: call "
            f"model.set_attn_implementation('sdpa' or 'eager'), or {remedy}"
        )
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{name} has layers of kind {', '.join(sorted(unknown))}, which a group's mask can't be told")
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and window is not None and window < len(row.ids):
        raise ValueError(
            f"{name} has sliding windows of {window} positions, and the group's row has {len(row.ids)}: {remedy}"
        )
    visible = row.visible[None, None]
    if implementation == "sdpa":
        return visible
    lowest = torch.finfo(model.dtype).min
    return torch.zeros(visible.shape, dtype=model.dtype).masked_fill(~visible, lowest)


def score_group(model: PreTrainedModel, group: RolloutGroup, *, hidden: bool = False) -> Scores:
    """Score the group's answers by the model as it is now, under the parameters that they were sampled with.

    The recorded masks are replayed. Raises ValueError as `replay.logprobs`, `replay.check_logprobs_mode` (the group's
    logprobs must be those of the sampled distribution) and `group_logits` do.
    """
    replay.check_logprobs_mode(group.logprobs_mode, group.sampling_params)
    prompt, choices = group.prompt.token_ids, group.choices
    logits, states = group_logits(model, prompt, [choice.token_ids for choice in choices], hidden=hidden)
    logprobs = [
        replay.logprobs(
            table,
            choice.token_ids,
            sampling_params=group.sampling_params,
            sampling_mask=choice.sampling_mask,
            prompt_token_ids=prompt,
        )
        for table, choice in zip(logits.split(group.lengths), choices, strict=True)
    ]
    with torch.no_grad():
        entropies = losses.entropies(logits)
    return Scores(torch.cat(logprobs), entropies, states)


def current_gap(
    model: PreTrainedModel, group: RolloutGroup | None, lags: Callable[[RolloutGroup], Tensor]
) -> float | None:
    """The largest |log π_θ - log π_old| over tokens that the model's very weights have sampled (`lags` 0), in nats.

    0 in exact mode; None where the group has no such token. Of the groups that a step trains on, few may have one: most
    finished before the last push. Those that finish while the step computes its gradients do, and until its update the
    weights are still the ones that were pushed.
    """
    if group is None or not (current := lags(group) == 0).any():
        return None
    with torch.no_grad():
        new = score_group(model, group).logprobs
    return float((new - torch.tensor(group.logprobs, device=new.device)).abs()[current.to(new.device)].max())
