"""`python -m rollout.cli` is the `rollout` command."""

from __future__ import annotations

from rollout.cli.main import main

main()
