"""The fields of a configuration as command-line flags."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

LONGEST_METAVAR = 60
"""Characters of the names that a flag may have for its value: more are listed in the help, which is 80 wide."""


def with_flags(*configs: type, envvar_prefix: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the command gets one more flag for each field of these dataclasses, in its **values.

    `max_num_seqs` is `--max-num-seqs`, and, with a prefix of `ROLLOUT_`, may be set by ROLLOUT_MAX_NUM_SEQS as well;
    `model` is positional. A field has its help in its metadata. Whole numbers may have a suffix, as `4k`.
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
    kinds: dict[str, Any] = {"parser": whole_number, "metavar": "INTEGER"} if kind in (int, int | None) else {}
    names = [name for choice in (kind, *get_args(kind)) if get_origin(choice) is Literal for name in get_args(choice)]
    if len("|".join(names)) > LONGEST_METAVAR:
        kinds, text = {"metavar": "NAME"}, f"{text} One of: {', '.join(names)}."
    flag: Any = typer.Option(help=text, envvar=variable, show_envvar=False, **kinds)
    if kind == tuple[str, ...]:
        kind, default = list[str], []
    if field.name == "model":
        flag = typer.Argument(help=text, metavar="MODEL", envvar=variable, show_envvar=False)
        default = inspect.Parameter.empty
    annotation = Annotated[kind, flag]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_POWERS = ["", "k", "m", "g", "t"]


def whole_number(value: str | int) -> int:
    """A whole number as vLLM's command line reads it: 4k and 4.5k are thousands, 4K is 4 times 1024; also m, g and t.

    Raises ValueError for what is none. Source: vLLM's `human_readable_int`.
    """
    text = str(value).strip()
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", text)
    number, suffix = (text, "") if found is None else found.groups()
    power: int = _POWERS.index(suffix.lower())  # of no suffix 0
    try:
        return int(Decimal(number) * pow(1000, power)) if suffix.islower() else int(number) * pow(1024, power)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number, such as 4096, 4k (4000) or 4K (4096)") from None


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
