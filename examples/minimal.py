"""The least of a training loop: your prompts, your reward, your model. The server samples on while it is pushed to.

python examples/minimal.py path/to/model
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollout
from trainer_bridge import RolloutSampler, WeightSender
from trainer_bridge.rollouts import prompts_of_rows, text_reward
from trainer_bridge.score.groups import score_group
from trainer_bridge.score.losses import clipped_surrogate, token_advantages

# From a file: [json.loads(line) for line in open("my.jsonl")]. Chats: {"prompt": [{"role": "user", "content": "Hi"}]}.
ROWS = [{"prompt": "The sea is"}, {"prompt": "A good friend"}, {"prompt": "In winter"}]


def reward(row: dict[str, Any], text: str) -> float:
    """What an answer to this row is worth: here the share of vowels among its characters."""
    return sum(character in "aeiouAEIOU" for character in text) / max(len(text), 1)


def train(folder: str, steps: int, learning_rate: float) -> list[float]:
    """Train the model of this folder. Returns the mean reward of each step."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    optimizer, means = torch.optim.AdamW(model.parameters(), lr=learning_rate), []
    prompts, params = prompts_of_rows(itertools.cycle(ROWS), tokenizer), {"max_tokens": 24}
    score, sizes = text_reward(reward, tokenizer), {"group_size": 8, "in_flight": 2, "capacity": 6}
    with (
        rollout.serve(folder, log=Path("server.log"), dtype="float32") as client,
        WeightSender.connect(client, model) as sender,
        RolloutSampler(client, prompts, score, params, **sizes, wait_when_full=True) as sampler,
    ):
        print(f"watch it at {client.base_url}", flush=True)
        for step in range(steps):
            groups = sampler.take_groups(4)
            for group in groups:
                new, old = score_group(model, group).logprobs, torch.tensor(group.logprobs)
                advantages = token_advantages(group.rewards, group.lengths)
                loss = clipped_surrogate(new, old, advantages, low=0.2, high=0.28, cap=4.0).mean()
                (loss / len(groups)).backward()
            optimizer.step()
            optimizer.zero_grad()
            sender.push(version=f"step-{step}")
            means.append(sum(sum(group.rewards) for group in groups) / (8 * len(groups)))
            print(f"step {step}: mean reward {means[-1]:.2f}", flush=True)
    return means


if __name__ == "__main__":
    train(sys.argv[1], steps=20, learning_rate=3e-5)
