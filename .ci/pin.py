"""Print the direct dependencies of the project at the versions installed here, for .ci/constraints.txt."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

CHOSEN_BY_MACHINE = {"torch", "triton"}
"""`.ci/setup` chooses torch's build, with or without CUDA, and a CUDA build brings the Triton that it was made with."""


def direct_dependencies() -> list[str]:
    """The names in pyproject.toml, sorted, each once."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    requirements = [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]
    names = {re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() for requirement in requirements}
    return sorted(names - CHOSEN_BY_MACHINE)


if __name__ == "__main__":
    print("# The versions that CI installs, of what pyproject.toml names; made by `make constraints`.")
    for name in direct_dependencies():
        print(f"{name}=={version(name)}")
