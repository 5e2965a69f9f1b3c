"""`rollout`: the generation backend for reinforcement learning of language models."""

__version__ = "0.1.0"
