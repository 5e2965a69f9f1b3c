"""The fields of a configuration as command-line flags."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any, get_type_hints

import typer


def flags_of(*configs: type) -> list[inspect.Parameter]:
    """One keyword parameter a field, as typer reads them: `max_num_seqs` is `--max-num-seqs`, `model` is positional."""
    parameters = []
    for config in configs:
        types = get_type_hints(config)
        for field in dataclasses.fields(config):
            kind, default = types[field.name], field.default
            flag: Any = typer.Option(help=field.metadata["help"])
            if kind == tuple[str, ...]:
                kind, default = list[str], []
            if field.name == "model":
                flag, default = typer.Argument(help=field.metadata["help"], metavar="MODEL"), inspect.Parameter.empty
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, flag]
                )
            )
    return parameters


def config_from(config: type[Any], values: dict[str, Any]) -> Any:
    """An instance of this configuration from parsed flags. A value that it refuses is a usage error naming the flag."""
    names = [field.name for field in dataclasses.fields(config)]
    given = {name: tuple(values[name]) if isinstance(values[name], list) else values[name] for name in names}
    try:
        return config(**given)
    except ValueError as error:
        name = str(error).partition(" ")[0]
        hint = "--" + name.replace("_", "-") if name in names else None
        raise typer.BadParameter(str(error), param_hint=hint) from None
