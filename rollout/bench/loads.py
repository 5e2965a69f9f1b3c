"""What is asked of a server: how many requests, of which lengths, and their random prompts."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_bridge.client import RolloutClient, RolloutError


@dataclass(frozen=True)
class Load:
    """`requests` at once, each of `n` samples of exactly `max_tokens` tokens; each prompt is sent `repeat` times.

    Prompts have between `shortest` and `longest` tokens, spread evenly over their logarithm. `stream`: answers come as
    server-sent events, which also tell the time to the first token. `schema`: answers follow it, which can't end before
    `max_tokens`.
    """

    name: str
    about: str
    requests: int
    n: int
    shortest: int
    longest: int
    max_tokens: int
    stream: bool = False
    repeat: int = 1
    schema: dict[str, Any] | None = None

    @property
    def output_tokens(self) -> int:
        return self.requests * self.n * self.max_tokens

    @property
    def context(self) -> int:
        """Positions of the longest sequence."""
        return self.longest + self.max_tokens

    def prompts(self, seed: int, number: int, vocab_size: int, *, copy: int = 0) -> list[list[int]]:
        """Token ids of each request of round `number`, drawn from [0, vocab_size).

        Every copy has prompts of the same lengths, but other ids; the same arguments always give the same prompts.
        """
        lengths = random.Random(f"{self.name} {seed} {number}")
        draw = random.Random(f"{self.name} {seed} {number} {copy}")
        spread = math.log(self.longest / self.shortest)
        different = [
            draw.choices(range(vocab_size), k=round(self.shortest * math.exp(spread * lengths.random())))
            for _ in range(self.requests // self.repeat)
        ]
        return [prompt for prompt in different for _ in range(self.repeat)]


_PERSON = {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["home", "work"]}}
_PEOPLE = {"type": "array", "minItems": 999, "items": {"type": "object", "properties": _PERSON, "required": [*_PERSON]}}

LOADS = {
    load.name: load
    for load in (
        Load("grpo", "8 prompts x 8 samples (n), 256 -> 128", 8, 8, 256, 256, 128),
        Load("singles", "8 prompts x 8 single requests, 256 -> 128", 64, 1, 256, 256, 128, repeat=8),
        Load("single", "1 request, 32 -> 128", 1, 1, 32, 32, 128, stream=True),
        Load("group", "1 prompt x 32 samples (n), 1024 -> 64", 1, 32, 1024, 1024, 64),
        Load("few", "32 requests, 32 to 3968 -> 128", 32, 1, 32, 3968, 128),
        Load("many", "256 requests, 32 to 3968 -> 128", 256, 1, 32, 3968, 128),
        Load("json", "64 requests, 16 -> 128, whole answers", 64, 1, 16, 16, 128),
        Load("schema", "64 requests, 16 -> 128, whole answers under a JSON schema", 64, 1, 16, 16, 128, schema=_PEOPLE),
        Load("sse", "64 requests, 16 -> 128, streamed", 64, 1, 16, 16, 128, stream=True),
    )
}
DEFAULT_LOADS = ("grpo", "singles", "single", "group")


def choose(names: Sequence[str] | None, stream: bool | None) -> list[Load]:
    """The loads of these names (None or none: the default ones); `stream` overrides how their answers come.

    Raises ValueError for a name that there is not.
    """
    unknown = [name for name in names or () if name not in LOADS]
    if unknown:
        raise ValueError(f"no load {unknown[0]!r}; there are {', '.join(LOADS)}")
    loads = [LOADS[name] for name in dict.fromkeys(names or DEFAULT_LOADS)]
    return loads if stream is None else [dataclasses.replace(load, stream=stream) for load in loads]


@dataclass(frozen=True)
class ServerInfo:
    """A server under load: where it is, and what it says of itself."""

    url: str
    api_key: str | None
    model: str
    version: str
    max_model_len: int | None
    vocab_size: int
    completion: bool = False  # llama.cpp's server, which is asked by its own `/completion`


def inspect(url: str, api_key: str | None, vocab_size: int | None) -> ServerInfo:
    """Ask a server what it serves. `vocab_size` None: read it from the model's folder, if that is on this machine.

    Raises RolloutError where the server doesn't answer, ValueError where the size of the vocabulary can't be found.
    """
    with RolloutClient(url, api_key=api_key) as client:
        model = client.models()[0]
        if model.get("owned_by") == "llamacpp":
            about = client.request("GET", "/props")
            length, size = about["default_generation_settings"]["n_ctx"], model["meta"]["n_vocab"]
            return ServerInfo(
                url, api_key, model["id"], about["build_info"], length, vocab_size or size, completion=True
            )
        try:
            version = str(client.request("GET", "/version")["version"])
        except RolloutError:
            version = "unknown"
    vocab_size = vocab_size or _vocab_size(model.get("root") or model["id"])
    if vocab_size is None:
        raise ValueError(f"{url} serves {model['id']!r}, whose config.json isn't on this machine: give --vocab-size")
    return ServerInfo(url, api_key, model["id"], version, model.get("max_model_len"), vocab_size)


def _vocab_size(model: str) -> int | None:
    try:
        config = json.loads((Path(model) / "config.json").read_text())
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError):
        return None
