"""Asynchronous GRPO on rollout's bridge: sample all the time, train on what is fresh, push without a pause.

python examples/grpo.py path/to/model --output grpo-output [--url http://127.0.0.1:8000] [--exact] [--top-p 0.8]

Without --url it starts a server of its own. Run it again after it was killed and it goes on from its checkpoint; a
server that was restarted in the meantime is brought to the same weights. docs/training.md has the arithmetic; the step
itself, GRPO, is the demo's: rollout/demo/trainer.py.
"""

from __future__ import annotations

import argparse

import torch
from common import arguments, load_policy, run

from rollout.demo.trainer import GRPO


def main() -> None:
    """Train, from the checkpoint if there is one."""
    args: argparse.Namespace = arguments(__doc__).parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    policy = load_policy(args)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    run("grpo", args, GRPO(policy, optimizer, max_lag=args.max_lag, lag_decay=args.lag_decay))


if __name__ == "__main__":
    main()
