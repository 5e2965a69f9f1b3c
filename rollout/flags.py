"""The fields of a configuration as command-line flags."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer


def with_flags(*configs: type, envvar_prefix: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the command gets one more flag for each field of these dataclasses, in its **values.

    `max_num_seqs` is `--max-num-seqs`, and, with a prefix of `ROLLOUT_`, may be set by ROLLOUT_MAX_NUM_SEQS as well;
    `model` is positional. A field has its help in its metadata.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        hints = get_type_hints(function, include_extras=True)
        parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in own]
        for config in configs:
            types = get_type_hints(config)
            parameters += [_parameter(f, types[f.name], envvar_prefix) for f in dataclasses.fields(config)]
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return function

    return decorate


def _parameter(field: dataclasses.Field[Any], kind: Any, envvar_prefix: str | None) -> inspect.Parameter:
    default, text = field.default, field.metadata["help"]
    variable = None if envvar_prefix is None or field.metadata.get("secret") else envvar_prefix + field.name.upper()
    flag: Any = typer.Option(help=text, envvar=variable, show_envvar=False)
    if kind == tuple[str, ...]:
        kind, default = list[str], []
    if field.name == "model":
        flag = typer.Argument(help=text, metavar="MODEL", envvar=variable, show_envvar=False)
        default = inspect.Parameter.empty
    annotation = Annotated[kind, flag]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


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
