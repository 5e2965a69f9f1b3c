"""What can be said of a command line before anything is loaded. Imports nothing slow."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rollout.cli.accepted import accepted
from rollout.config import EngineConfig

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_GGUF_MAGIC = b"GGUF"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "vocab.*",
)


def read_config_file(file: Path, known: Collection[str | None]) -> dict[str, Any]:
    """The flags that a YAML file gives, by parameter name. Raises ValueError for what isn't a mapping of known flags,
    OSError where the file can't be read."""
    import yaml

    try:
        given = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} isn't YAML: {' '.join(str(error).split())}") from None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValueError(f"{file} must hold one flag a line, as `max-num-seqs: 64`")
    flags = {str(name).replace("-", "_"): value for name, value in given.items()}
    for name in sorted(flags.keys() - known):
        if list(accepted([f"--{name}={flags.pop(name)}"])):
            raise ValueError(f"{file} has {name!r}, which is no flag of `rollout serve`")
    return flags


def check_model(config: EngineConfig) -> None:
    """Raise ValueError, with one line of what to do, where MODEL can't be served as `config` wants it."""
    path = Path(config.model)
    if path.is_dir():
        _check_folder(path, config)
    elif path.is_file():
        with open(path, "rb") as file:
            if path.suffix == ".gguf" and file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
                size = path.stat().st_size
                raise ValueError(f"{path} ({size} bytes) is no GGUF file: it doesn't begin with {_GGUF_MAGIC.decode()}")
    elif path.suffix == ".gguf" or not _HUB_ID.fullmatch(config.model):
        raise ValueError(f"{config.model} doesn't exist: MODEL is a transformers folder, a .gguf file or a hub id")
    else:
        _check_hub(config.model)


def check_packages(*extras: str, **needed: str) -> None:
    """Raise ValueError where a package that a command needs isn't installed; `needed`: what each is for, by name."""
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        what = ", ".join(f"{name} ({needed[name]})" for name in lacking)
        raise ValueError(f"this needs {what}: pip install '.[{','.join(extras)}]' in a clone of the sources")


def has_tokenizer(model: str) -> bool:
    """Whether MODEL may have a tokenizer: False for a folder without any of the files that hold one."""
    folder = Path(model)
    return not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)


def _check_folder(path: Path, config: EngineConfig) -> None:
    try:
        facts = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{path} holds no config.json: MODEL is a folder that transformers' save_pretrained has written, a .gguf "
            "file or a hub id"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / 'config.json'} can't be read: {error}") from None
    text = facts.get("text_config", facts) if isinstance(facts, dict) else {}
    limit = text.get("max_position_embeddings") if isinstance(text, dict) else None
    if isinstance(limit, int) and config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(f"--max-model-len {config.max_model_len} is longer than the model's own limit of {limit}")


def _check_hub(model: str) -> None:
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(model, "config.json")
    except Exception as error:  # the hub's own, httpx's, the disk's: all mean that there is no such model here
        why = " ".join(str(error).split())[:300]
        raise ValueError(
            f"there is no folder {model!r} here, and the hub gave no such model: {type(error).__name__}: {why}"
        ) from None
