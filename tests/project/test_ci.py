"""The scripts of .ci: what they find, and that the pinned versions are those of the dependencies that there are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_room_or_a_file_that_exceeds_its_budget_is_named(tmp_path: Path) -> None:
    for path, lines in {"rollout/a.py": 2, "rollout/engine/b.py": 3, "rollout/engine/deep/c.py": 4}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x = 1\n" * lines)
    findings = script("lines").findings
    assert findings(tmp_path, {"rollout": 2, "rollout/engine": 7}, 4) == []
    (room,) = findings(tmp_path, {"rollout": 2, "rollout/engine": 6}, 4)
    assert "rollout/engine has 7 lines, its budget is 6" in room
    (file,) = findings(tmp_path, {"rollout": 2, "rollout/engine": 7}, 3)
    assert "rollout/engine/deep/c.py has 4 lines" in file
    assert "rollout/engine has 7 lines" in findings(tmp_path, {"rollout": 2}, 4)[0]  # it has no budget
    assert "rollout/gone" in findings(tmp_path, {"rollout": 2, "rollout/engine": 7, "rollout/gone": 1}, 4)[0]


def test_every_direct_dependency_is_pinned_for_ci() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pinned = [line.partition("==") for line in lines if not line.startswith("#")]
    assert [name for name, _, version in pinned if version] == script("pin").direct_dependencies()
