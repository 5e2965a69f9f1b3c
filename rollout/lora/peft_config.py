"""What `adapter_config.json` says of an adapter: PEFT's LoraConfig, as far as it is served.

Source: peft 0.21, `tuners/lora/config.py`; which scale a layer has: `update_layer` in `tuners/lora/layer.py` and
`get_pattern_key` in `utils/other.py`.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from rollout.weights.errors import WeightUpdateError

_MOST_PATTERNS = 4096
_MOST_PATTERN_CHARS = 256
_MOST_CHARS = 1 << 17
_MOST_WILD = 64
"""Patterns that repeat something: each takes long to match, and is matched with each layer."""
# A pattern is a module's name, or a simple expression: nothing that could be matched in more than linear time.
_PLAIN = re.compile(r"\^?(?:[\w.-]|\\[.d]|\[[\w-]+\]|[|+]|\.\*)*\$?")
_MOST_REPEATS = 2

Number = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class PeftConfig(msgspec.Struct, kw_only=True):
    """The fields that are read. Those of the lower half ask for what isn't served, unless they are empty."""

    peft_type: str = ""
    r: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 8
    lora_alpha: Number = 8
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    target_modules: list[str] | str | None = None
    rank_pattern: dict[str, Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]] | None = None
    alpha_pattern: dict[str, Number] | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True

    use_dora: bool = False
    lora_bias: bool = False
    use_qalora: bool = False
    modules_to_save: Any = None
    target_parameters: Any = None
    trainable_token_indices: Any = None
    layer_replication: Any = None
    alora_invocation_tokens: Any = None
    arrow_config: Any = None
    kasa_config: Any = None
    use_bdlora: Any = None
    velora_config: Any = None
    monteclora_config: Any = None

    def check(self) -> None:
        """Raise WeightUpdateError 400, naming the field, for what isn't served."""
        if self.peft_type != "LORA":
            raise _refusal(f"peft_type {self.peft_type!r} isn't served, only LORA", "peft_type")
        for name in self.__struct_fields__[self.__struct_fields__.index("use_dora") :]:
            if value := getattr(self, name):
                shown = reprlib.repr(value)[:80]
                raise _refusal(f"{name} ({shown}) isn't served: train without it, or merge and push whole", name)
        if self.bias != "none":
            raise _refusal(f"bias {self.bias!r} isn't served: biases belong to the base, push it whole", "bias")
        if self.fan_in_fan_out:
            raise _refusal("fan_in_fan_out is for Conv1D layers, of which no served model has any", "fan_in_fan_out")
        init = self.init_lora_weights
        if isinstance(init, str) and init.lower().startswith(_CHANGES_THE_BASE):
            raise _refusal(
                f"init_lora_weights {init!r} has changed the base that the adapter belongs to: save it with "
                "path_initial_model_for_weight_conversion",
                "init_lora_weights",
            )
        for field in ("rank_pattern", "alpha_pattern", "target_modules"):
            if (entries := getattr(self, field)) and not isinstance(entries, str):
                chars = sum(map(len, entries))
                if len(entries) > _MOST_PATTERNS or chars > _MOST_CHARS:
                    raise _refusal(
                        f"{field} has {len(entries)} entries of {chars} characters, more than {_MOST_PATTERNS} of "
                        f"{_MOST_CHARS}",
                        field,
                    )
        for key in self.alpha_pattern or {}:
            _check_pattern(key)
        if (wild := sum(_repeats(key) > 0 for key in self.alpha_pattern or {})) > _MOST_WILD:
            raise _refusal(f"{wild} patterns with + or .* are more than {_MOST_WILD}", "alpha_pattern")

    def scales(self) -> Callable[[str, int], float]:
        """A function: what B (A x) is multiplied by in a layer of this name, whose A has so many rows.

        Raises WeightUpdateError 400 for a pattern that is none. Takes a second for thousands of patterns.
        """
        alphas = [(_compiled(key), alpha) for key, alpha in (self.alpha_pattern or {}).items()]

        def scale(module: str, rank: int) -> float:
            alpha = next((value for pattern, value in alphas if pattern.fullmatch(module)), self.lora_alpha)
            return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

        return scale

    @property
    def ranks(self) -> set[int]:
        """The ranks that layers may have."""
        return {self.r, *(self.rank_pattern or {}).values()}


def _repeats(key: str) -> int:
    return key.count("+") + key.count(".*")


def _check_pattern(key: str) -> None:
    if len(key) > _MOST_PATTERN_CHARS or not _PLAIN.fullmatch(key) or _repeats(key) > _MOST_REPEATS:
        raise _refusal(f"alpha_pattern {key[:80]!r} is more than a layer's name or a simple pattern", "alpha_pattern")


def _compiled(key: str) -> re.Pattern[str]:
    """The pattern as PEFT matches it. Raises WeightUpdateError 400 for one that is none."""
    try:
        return re.compile(rf"(?:.*\.)?(?:{key})")
    except re.error as error:
        raise _refusal(f"alpha_pattern {key[:80]!r} is no pattern: {error}", "alpha_pattern") from None


def _refusal(message: str, param: str) -> WeightUpdateError:
    return WeightUpdateError(400, f"adapter_config.json: {message}", f"lora_path.{param}")
