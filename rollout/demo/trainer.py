"""Asynchronous GRPO on one model: what each step does with a batch of groups.

Group-relative advantages are those of GRPO (Shao et al. 2024, "DeepSeekMath"), the loss is a mean over tokens with a
wider upper clip and no KL term (Yu et al. 2025, "DAPO"). π_old is never recomputed: it is what the server says it
sampled from, token by token, whichever weights those were, so the ratio corrects for staleness too; it is truncated,
since the clip alone doesn't bound it for answers that are worse than their group's mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.demo.sampler import Group
from trainer_bridge import replay

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
RATIO_CAP = 4.0
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class TrainStats:
    """One optimizer step: means over its answers (reward) and over their tokens (the rest).

    `staleness` counts the commits between the weights that sampled a token and those that train on it; `logprob_gap` is
    |log π_θ - log π_old| before the step.
    """

    reward: float
    staleness: float
    logprob_gap: float
    tokens: int
    grad_norm: float


class Trainer:
    """The policy in float32 on the CPU, and its optimizer."""

    def __init__(self, model: Path, sampling_params: Mapping[str, Any], *, learning_rate: float) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._sampling_params = sampling_params
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, groups: Sequence[Group], epoch: int) -> TrainStats:
        """Train once on `groups`; `epoch` is the weight epoch that the server has of the policy as it is now."""
        tokens = sum(len(choice.token_ids) for group in groups for choice in group.choices)
        gap, stale = 0.0, 0
        for group in groups:
            old = torch.tensor([logprob for choice in group.choices for logprob in choice.logprobs or ()])
            lengths = torch.tensor([len(choice.token_ids) for choice in group.choices])
            new = self.logprobs(group)
            loss = grpo_loss(new, old, advantages(group.rewards).repeat_interleave(lengths))
            (loss / tokens).backward()
            gap += float((new.detach() - old).abs().sum())
            stale += sum(
                sum(replay.staleness([asdict(span) for span in choice.spans], len(choice.token_ids), epoch))
                for choice in group.choices
            )
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        rewards = [reward for group in groups for reward in group.rewards]
        return TrainStats(sum(rewards) / len(rewards), stale / tokens, gap / tokens, tokens, float(norm))

    def logprobs(self, group: Group) -> Tensor:
        """Float32 logprobs of all the group's tokens under the policy, one answer after the other; differentiable."""
        answers = [choice.token_ids for choice in group.choices]
        logits = group_logits(self.model, group.prompt_token_ids, answers)
        return torch.cat(
            [
                replay.logprobs(rows, ids, sampling_params=self._sampling_params)
                for rows, ids in zip(logits, answers, strict=True)
            ]
        )


def advantages(rewards: Sequence[float]) -> Tensor:
    """(r - mean) / std over a group; all zero where its rewards are the same."""
    r = torch.tensor(rewards)
    return (r - r.mean()) / (r.std(correction=0) + 1e-4)


def grpo_loss(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """The clipped surrogate, summed over tokens; all (tokens,)."""
    ratio = replay.importance_ratios(new, old, cap=RATIO_CAP)
    return -torch.min(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage).sum()


def group_logits(model: PreTrainedModel, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits (len(answer), vocab) for each answer, from one forward pass in which the answers share the prompt.

    One row holds the prompt and then every answer at the positions that follow it; an answer's tokens attend to the
    prompt and to their own answer. A prompt longer than its answers is the common case: this halves the arithmetic.
    """
    ids, positions, owners, rows = list(prompt), list(range(len(prompt))), [0] * len(prompt), []
    for owner, answer in enumerate(answers, start=1):
        inputs = answer[:-1]  # nothing is predicted from the last token
        rows.append([len(prompt) - 1, *range(len(ids), len(ids) + len(inputs))])
        ids += inputs
        positions += range(len(prompt), len(prompt) + len(inputs))
        owners += [owner] * len(inputs)
    owned, order = torch.tensor(owners), torch.arange(len(ids))
    visible = (order[:, None] >= order) & ((owned[:, None] == owned) | (owned == 0))
    hidden = model.base_model(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        attention_mask=visible[None, None],
        use_cache=False,
    ).last_hidden_state[0]
    wanted = torch.tensor([row for answer_rows in rows for row in answer_rows])
    logits = model.get_output_embeddings()(hidden[wanted])
    return list(logits.split([len(answer_rows) for answer_rows in rows]))
