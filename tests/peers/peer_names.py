"""The names that SGLang reads and that verl's extension points have, taken from their sources without importing them.

pip download --no-deps sglang==0.5.23 verl==0.9.1, unpacked into FOLDER; then
python -m tests.peers.peer_names FOLDER > tests/data/peer_names.json
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

from tests.peers.vllm_source import fields

_SGLANG = {
    "sglang/srt/managers/io_struct.py": ["GenerateReqInput"],
    "sglang/srt/sampling/sampling_params.py": ["SamplingParams"],
}
# What trainer_bridge.integrations.verl stands in for, derives from, or is called as.
_VERL = {
    "verl/workers/rollout/base.py": ["BaseRollout"],
    "verl/workers/rollout/replica.py": ["RolloutReplica", "RolloutReplicaRegistry", "TokenOutput"],
    "verl/checkpoint_engine/base.py": ["CheckpointEngine", "CheckpointEngineRegistry"],
    "verl/workers/rollout/vllm_rollout/vllm_async_server.py": ["vLLMHttpServer"],
}


def signatures(file: Path, names: list[str]) -> dict[str, Any]:
    """By class its public methods: the names of their parameters, and what they are decorated with."""
    classes = {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}
    return {name: {m.name: _signature(m) for m in _methods(classes[name])} for name in names}


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    found = [line for line in node.body if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [method for method in found if not method.name.startswith("_") or method.name == "__init__"]


def _signature(method: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Any]:
    taken = method.args
    required = len(taken.args) - len(taken.defaults)
    return {
        "required": [arg.arg for arg in taken.args[:required]],
        "optional": [arg.arg for arg in (*taken.args[required:], *taken.kwonlyargs)],
        "any": [arg.arg for arg in (taken.vararg, taken.kwarg) if arg is not None],
        "decorators": [ast.unparse(decorator) for decorator in method.decorator_list],
        "async": isinstance(method, ast.AsyncFunctionDef),
    }


def called(file: Path, on: str) -> list[str]:
    """The methods that a file calls on Ray actors that it calls `on`."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Attribute(attr="remote", value=ast.Attribute(attr=method, value=ast.Name(id=name))) if name == on:
                found.add(method)
    return sorted(found)


def names(folder: Path) -> dict[str, Any]:
    """What is recorded."""
    sglang: dict[str, Any] = {}
    verl: dict[str, Any] = {"TokenOutput": {}}
    for file, classes in _SGLANG.items():
        sglang |= fields(folder / file, classes)
    for file, classes in _VERL.items():
        verl |= signatures(folder / file, classes)
    verl["TokenOutput"] = fields(folder / "verl/workers/rollout/replica.py", ["TokenOutput"])["TokenOutput"]
    callers = ("verl/workers/rollout/replica.py", "verl/workers/rollout/llm_server.py")
    verl["called"] = sorted({method for file in callers for method in called(folder / file, "server")})
    made = "python -m tests.peers.peer_names: names in the sources of sglang 0.5.23 and verl 0.9.1"
    return {"how": made, "sglang": sglang, "verl": verl}


if __name__ == "__main__":
    json.dump(names(Path(sys.argv[1])), sys.stdout, indent=1)
    print()
