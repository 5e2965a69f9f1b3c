"""What `pip install .` gives: both packages, their types, one version; and the name that pip must be told."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import rollout

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = ("rollout", "trainer_bridge", "pyproject.toml", "README.md", "LICENSE")
TEXTS = (".md", ".py", ".toml", ".yml", ".yaml", "Makefile", "setup", "run")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what belongs into it."""
    folder = tmp_path_factory.mktemp("packaging")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*pip, "--wheel-dir", "dist", "."], cwd=folder, check=True, timeout=240)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_the_wheel_has_types_sources_of_kernels_and_the_version(wheel: Path) -> None:
    assert wheel.name.startswith(f"{PROJECT['name'].replace('-', '_')}-{rollout.__version__}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for package in ("rollout", "trainer_bridge")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"rollout/py.typed", "trainer_bridge/py.typed", "rollout/kernels/native/vectors.h"} <= wanted
    assert wanted <= names
    assert not [name for name in names if name.startswith("tests/")]


def test_a_users_type_checker_sees_our_types(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=120)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    script = tmp_path / "script.py"
    script.write_text(
        "from trainer_bridge import RolloutClient\n"
        "answer = RolloutClient('http://127.0.0.1:8000').generate([1, 2], {'max_tokens': 3})\n"
        "reveal_type(answer.choices[0].token_ids)\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--cache-dir", tmp_path / "cache"]
    command = [*mypy, "--python-executable", tmp_path / "venv/bin/python", "script.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert 'Revealed type is "list[int]"' in checked.stdout.replace("builtins.", ""), checked.stdout + checked.stderr


def test_every_text_tells_pip_the_distributions_own_name() -> None:
    """`rollout` on PyPI is somebody else's package: whoever is told to install it installs a stranger's code."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    paths = listed.stdout.split("\n") if listed.returncode == 0 else map(str, ROOT.rglob("*"))
    installed = set()
    for name in paths:
        path = ROOT / name
        if name.endswith(TEXTS) and path.is_file() and path != Path(__file__):
            for line in re.findall(r"pip3? install\b[^\n`]*", path.read_text()):
                installed |= {(name, word) for word in re.findall(r"(?<![\w./-])rollout\b[\w-]*", line)}
    assert {word for _, word in installed} == {PROJECT["name"]}, installed


def test_every_package_that_the_product_imports_is_a_declared_dependency() -> None:
    """What only comes along with another dependency may be gone with its next version."""
    extras = PROJECT["optional-dependencies"].values()
    requirements = [*PROJECT["dependencies"], *(requirement for extra in extras for requirement in extra)]
    declared = {re.split(r"[^\w.-]", name, maxsplit=1)[0].lower().replace("_", "-") for name in requirements}
    imported: set[str] = set()
    for path in [path for package in ("rollout", "trainer_bridge") for path in (ROOT / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    third_party = imported - set(sys.stdlib_module_names) - {"rollout", "trainer_bridge"}
    distributions = importlib.metadata.packages_distributions()
    names = {name: {d.lower().replace("_", "-") for d in distributions.get(name, [])} for name in third_party}
    optional = {"triton", "verl"}  # only where there is a wheel of it: its extra says so; what finds the plugin itself
    assert {name for name, of in names.items() if not of & declared} - optional == set()
