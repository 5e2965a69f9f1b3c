"""Write docs/flags.md from the code: every flag of `rollout serve`, its environment variable, default and help.

python .ci/flags.py > docs/flags.md
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rollout.config import EngineConfig, ServerConfig

_HEAD = """# Flags of `rollout serve`

Made from the code by `make flags`. The command line wins over the environment, and that over a file given by
`--config file.yaml`, which holds one `max-num-seqs: 64` a line. Where vLLM has a flag of this kind, it has vLLM's name;
[compatibility.md](compatibility.md) lists vLLM's others. `rollout serve MODEL` needs nothing but MODEL. Switches have a
`--no-` form."""


def _values(kind: Any) -> str:
    """What a flag of this type takes."""
    options = [kind, *get_args(kind)]
    names = [str(name) for option in options if get_origin(option) is Literal for name in get_args(option)]
    if names:
        return " ".join(f"`{name}`" for name in names)
    if bool in options:
        return "switch"
    return "whole number" if int in options else "number" if float in options else "text"


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None or value == () else f"`{value}`"


def _rows(config: type[Any]) -> Iterator[str]:
    yield "| flag | environment | takes | default | |"
    yield "|---|---|---|---|---|"
    kinds = get_type_hints(config)
    for field in sorted(dataclasses.fields(config), key=lambda field: field.name):
        flag, variable = f"`--{field.name.replace('_', '-')}`", f"`ROLLOUT_{field.name.upper()}`"
        if field.name == "model":
            flag = "`MODEL`"
        cells = (flag, variable, _values(kinds[field.name]), _default(field.default), field.metadata["help"])
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def page() -> str:
    """The page's text."""
    engine = ["\n## The engine\n", *_rows(EngineConfig)]
    return "\n".join([_HEAD, *engine, "\n## The server\n", *_rows(ServerConfig)]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
