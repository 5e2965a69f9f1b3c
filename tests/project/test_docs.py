"""The pages name files, modules and links that exist, and every name that a user can import says what it is."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import trainer_bridge

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))])
PAGES.append(ROOT / "tests" / "support" / "README.md")
FILES = [
    f"/{path.relative_to(ROOT)}"
    for folder in ("rollout", "trainer_bridge", "tests", "examples")
    for path in (ROOT / folder).rglob("*.*")
]
VLLM_TESTS = {name.partition("::")[0] for name in json.loads((ROOT / "tests/data/vllm_outcomes.json").read_text())}
"""The files of another project that docs/compatibility.md tells the outcomes of."""
SOURCES = sorted(path for package in ("rollout", "trainer_bridge") for path in (ROOT / package).rglob("*.py"))
FILE = re.compile(r"(?<![\w./-])[\w./-]+\.(?:py|cpp|toml)\b")
FOLDER = re.compile(r"(?<![\w./-])(?:rollout|trainer_bridge|tests|examples)/(?:\w+/)*(?![\w/])")
DOTTED = re.compile(r"(?<![\w./-])(?:rollout|trainer_bridge)(?:\.[A-Za-z_]\w*)+")
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)")


def pages() -> list[Any]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES]


def exists(dotted: str) -> bool:
    """Whether it is a package, a module, or what a module defines. Nothing is imported: torch takes seconds."""
    folder = ROOT
    first, *rest = dotted.split(".")
    for position, part in enumerate([first, *rest]):
        if (folder / part).is_dir():
            folder = folder / part
            continue
        attributes = [first, *rest][position + 1 :]
        module = folder / f"{part}.py"
        if not module.exists():
            module, attributes = folder / "__init__.py", [part, *attributes]
        return not attributes or re.search(rf"\b{attributes[0]}\b", module.read_text()) is not None
    return True


@pytest.mark.parametrize("page", pages())
def test_every_file_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    files = [path for path in sorted(set(FILE.findall(text)) - VLLM_TESTS) if not (ROOT / path).exists()]
    assert [path for path in files if not any(file.endswith(f"/{path}") for file in FILES)] == []
    assert [path for path in sorted(set(FOLDER.findall(text))) if not (ROOT / path).exists()] == []
    assert [name for name in sorted(set(DOTTED.findall(text))) if not exists(name)] == []


@pytest.mark.parametrize("page", pages())
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target, heading in LINK.findall(page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            anchors = {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
            assert heading in anchors, (target, heading)


def test_every_exported_name_of_the_bridge_is_on_a_page() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in trainer_bridge.__all__ if not re.search(rf"\b{name}\b", text)] == []


def undocumented(path: Path) -> list[str]:
    """What has no docstring of a module: itself, unless it is empty, and its public classes and functions."""
    module = ast.parse(path.read_text())
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    public = [node for node in module.body if isinstance(node, kinds) and not node.name.startswith("_")]
    missing = [node.name for node in public if ast.get_docstring(node) is None]
    if module.body and ast.get_docstring(module) is None:
        missing.append("the module")
    return [f"{path.relative_to(ROOT)}: {name}" for name in missing]


def test_every_public_name_has_a_docstring() -> None:
    assert [missing for path in SOURCES for missing in undocumented(path)] == []


def test_every_public_method_of_what_the_bridge_exports_has_a_docstring() -> None:
    missing = [
        f"{name}.{method}"
        for name in trainer_bridge.__all__
        for method, value in vars(getattr(trainer_bridge, name)).items()
        if not method.startswith("_") and callable(value) and not value.__doc__
    ]
    assert missing == []
