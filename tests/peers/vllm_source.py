"""vLLM's source package: fetched from PyPI, and the names that its server reads, taken from it without importing it.

    python -m tests.peers.vllm_source FOLDER > tests/data/vllm_names.json

writes those of the version below; FOLDER keeps the unpacked source for `tests.peers.vllm_tests`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

VERSION = "0.33.0"
_INDEX = "https://pypi.org/simple/vllm/"  # which mirrors have, too

# The request models of the endpoints that exist here too, by the file that defines them.
_MODELS = {
    "vllm/entrypoints/openai/chat_completion/protocol.py": ["ChatCompletionRequest"],
    "vllm/entrypoints/openai/completion/protocol.py": ["CompletionRequest"],
    "vllm/entrypoints/scale_out/token_in_token_out/protocol.py": ["GenerateRequest"],
    "vllm/entrypoints/anthropic/protocol.py": ["AnthropicMessagesRequest", "AnthropicCountTokensRequest"],
    "vllm/entrypoints/serve/tokenize/protocol.py": [
        "TokenizeCompletionRequest",
        "TokenizeChatRequest",
        "DetokenizeRequest",
    ],
    "vllm/sampling_params.py": ["SamplingParams"],
}
_FLAGS = {
    "vllm/engine/arg_utils.py": ["EngineArgs", "AsyncEngineArgs"],
    "vllm/entrypoints/common/cli_args.py": ["BaseFrontendArgs", "FrontendArgs"],
}


def source(folder: Path) -> Path:
    """The unpacked source, fetched into `folder` where it isn't there yet."""
    root = folder / f"vllm-{VERSION}"
    if not root.is_dir():
        name = f"vllm-{VERSION}.tar.gz"
        with urllib.request.urlopen(_INDEX, timeout=60) as answer:
            found = re.search(rf'href="([^"]*/{re.escape(name)})#sha256=([0-9a-f]{{64}})', answer.read().decode())
        if found is None:
            raise ValueError(f"{_INDEX} has no {name} with a checksum")
        with urllib.request.urlopen(urllib.parse.urljoin(_INDEX, found[1]), timeout=600) as answer:
            data = answer.read()
        if (checksum := hashlib.sha256(data).hexdigest()) != found[2]:
            raise ValueError(f"{name} has the checksum {checksum}, not {found[2]}")
        folder.mkdir(parents=True, exist_ok=True)
        archive = folder / name
        archive.write_bytes(data)
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return root


def fields(file: Path, names: list[str]) -> dict[str, list[str]]:
    """The annotated public names of these classes."""
    classes = {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}
    return {name: sorted(_annotated(classes[name])) for name in names}


def _annotated(node: ast.ClassDef) -> list[str]:
    targets = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
    return [target.id for target in targets if isinstance(target, ast.Name) and not target.id.startswith("_")]


def paths(root: Path) -> list[str]:
    """The paths that its routers and apps serve."""
    found = set()
    for file in (root / "vllm" / "entrypoints").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                path = node.args[0]
                is_route = node.func.attr in ("get", "post", "add_api_route", "websocket")
                if is_route and isinstance(path, ast.Constant) and str(path.value).startswith("/"):
                    found.add(str(path.value))
    return sorted(found)


def names(root: Path) -> dict[str, Any]:
    """What is recorded."""
    models: dict[str, list[str]] = {}
    flags: set[str] = set()
    for file, classes in _MODELS.items():
        models |= fields(root / file, classes)
    for file, classes in _FLAGS.items():
        flags.update(name for found in fields(root / file, classes).values() for name in found)
    made = f"python -m tests.peers.vllm_source: annotated names of the request models of vLLM {VERSION}'s source"
    return {"how": made, "models": models, "paths": paths(root), "flags": sorted(flags)}


if __name__ == "__main__":
    json.dump(names(source(Path(sys.argv[1]))), sys.stdout, indent=1)
    print()
