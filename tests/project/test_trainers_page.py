"""Each row of docs/trainers.md names what was run, and that is there to be run again."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def rows() -> dict[str, list[str]]:
    """By trainer the other cells of the table."""
    page = (ROOT / "docs" / "trainers.md").read_text()
    table = page.partition("| trainer | generation | weights | what was run | by |\n")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("| ").split(" |")] for line in table.splitlines()[1:]]
    return {row[0]: row[1:] for row in cells}


def test_every_row_names_what_runs_it() -> None:
    found = rows()
    for trainer in ("slime", "Atropos", "AReaL", "SkyRL", "verl", "prime-rl", "ART", "OpenRLHF", "NeMo-RL, SGLang"):
        assert trainer in found
    for trainer, (*_, run, by) in found.items():
        named = re.findall(r"`([^`]+)`", by)
        assert bool(named) == (by != "read only"), trainer
        assert named or run.startswith("nothing"), trainer
        for name in named:
            module = re.fullmatch(r"python -m (tests\.peers\.(\w+))( \w+)?", name)
            if module:
                source = (ROOT / f"{module[1].replace('.', '/')}.py").read_text()
                mode = (module[3] or "").strip()
                assert not mode or f'"{mode}": {mode}' in source, name
            else:
                assert name == "rollout demo" or (ROOT / name).is_file(), name
