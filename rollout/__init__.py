"""`rollout`: the generation backend for reinforcement learning of language models.

`LLM` generates in this process, `serve` starts a server and gives its client. Importing this package imports neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rollout.version import __version__

if TYPE_CHECKING:
    from rollout.llm import LLM
    from rollout.sampling.params import SamplingParams
    from rollout.serving import serve

__all__ = ["LLM", "SamplingParams", "__version__", "serve"]

_HOMES = {"LLM": "rollout.llm", "SamplingParams": "rollout.sampling.params", "serve": "rollout.serving"}


def __getattr__(name: str) -> Any:
    """What takes long to import, on first use."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
