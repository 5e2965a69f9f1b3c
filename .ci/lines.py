"""Check the lines of Python in each room against its budget, and those of each file: see [tool.rollout.lines]."""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("rollout", "trainer_bridge")


def room_of(path: Path) -> str:
    """`rollout/fleet/ray/link.py` → `rollout/fleet`; files directly in a package are a room of the package's name."""
    return "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]


def findings(root: Path, rooms: dict[str, int], per_file: int) -> list[str]:
    """What exceeds its budget, has none, or is a budget of nothing."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    files = {path.relative_to(root): len(path.read_text().splitlines()) for path in paths}
    lines: Counter[str] = Counter()
    for path, count in files.items():
        lines[room_of(path)] += count
    too_long = [f"{path} has {count} lines, more than {per_file}" for path, count in files.items() if count > per_file]
    over = [
        f"{room} has {count} lines, its budget is {rooms.get(room, 0)}: make it smaller, or raise the budget in"
        " pyproject.toml in the same change, with the reason"
        for room, count in sorted(lines.items())
        if count > rooms.get(room, 0)
    ]
    return too_long + over + [f"{room} has a budget, but no code" for room in rooms.keys() - lines.keys()]


if __name__ == "__main__":
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["rollout"]["lines"]
    found = findings(ROOT, budgets["rooms"], budgets["file"])
    print("\n".join(found) or f"{len(budgets['rooms'])} rooms are within their budgets of lines")
    sys.exit(bool(found))
