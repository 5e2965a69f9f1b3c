"""Tensor parallelism: one engine on several devices, a process each.

The engine process leads, as rank 0; `team.py` is its side, `follower.py` the other ranks' process. All load their share
of the model by transformers' own plan and compute every step together; only the leader schedules and samples.
"""
