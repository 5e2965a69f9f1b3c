"""`rollout.serve`: a server for as long as a block lasts, and its client."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout.config import EngineConfig, ServerConfig
from rollout.launch import START_TIMEOUT_S, launch, serve_command
from trainer_bridge.client import RolloutClient

_OURS = ("model", "port")
_KEYS = ("ROLLOUT_API_KEY", "VLLM_API_KEY")


@contextlib.contextmanager
def serve(
    model: str | Path, *, log: Path | None = None, start_timeout_s: float = START_TIMEOUT_S, **flags: Any
) -> Iterator[RolloutClient]:
    """A client of `rollout serve MODEL`, a process of its own on a free port, while the block lasts.

    `flags` are the command line's under their names in Python: `max_num_seqs=64, batch_invariant=True`; False is
    `--no-…`, a list or tuple repeats a flag, None leaves it out. Of them `enable_scale_out`, which the client speaks
    to, is on by default. An `api_key` goes by the environment, where no list of processes shows it. What the server
    prints goes to `log`, or to a file that ends with the block. The server ends with this process, even where that is
    killed. Raises TypeError for a name that is no flag, and RuntimeError, with the end of what the server printed,
    where it isn't healthy within `start_timeout_s`.
    """
    given = flags.pop("api_key", None)
    key = str(given) if given else next(filter(None, map(os.environ.get, _KEYS)), None)
    command = serve_command(model, *_words({"enable_scale_out": True, **flags}))
    environment = {_KEYS[0]: key} if key else {}
    with (
        launch(command, log, timeout_s=start_timeout_s, environment=environment) as server,
        RolloutClient(server.url, api_key=key) as client,
    ):
        yield client


def _words(flags: Mapping[str, Any]) -> Iterator[str]:
    """Flags as the command line has them. Raises TypeError for a name that is none."""
    known = {field.name for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)}
    for name, value in flags.items():
        if name in _OURS or name not in known:
            close = difflib.get_close_matches(name, known.difference(_OURS))
            hint = f": did you mean {' or '.join(close)}?" if close else ", see `rollout serve -h`"
            raise TypeError(f"{name!r} is no flag of rollout.serve{hint}")
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            for one in value if isinstance(value, list | tuple) else (value,):
                yield from (f"--{flag}", str(one))
