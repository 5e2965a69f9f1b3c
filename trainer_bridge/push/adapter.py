"""The adapter of a PEFT model alone: what is sent where the server serves adapters beside its base."""

from __future__ import annotations

import enum
import json
from typing import Any

from torch import nn

from trainer_bridge.push.sources import StateDictSource, without_ddp


class AdapterSource(StateDictSource):
    """The tensors of a PEFT model's active adapter under PEFT's names, as they are when they are sent, and its
    configuration, `lora_config`.

    Raises ValueError for a model that PEFT hasn't wrapped, or that has several active adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        inner: Any = without_ddp(model)
        if not hasattr(inner, "peft_config"):
            raise ValueError(f"{type(inner).__name__} is no PEFT model: it has no adapter to push")
        from peft import get_peft_model_state_dict

        active = inner.active_adapter
        if not isinstance(active, str):
            raise ValueError(f"one adapter can be pushed under one name, and {active} are active")
        super().__init__(
            get_peft_model_state_dict(
                inner, state_dict=inner.state_dict(), adapter_name=active, save_embedding_layers=False
            )
        )
        self.lora_config: dict[str, Any] = json.loads(json.dumps(inner.peft_config[active].to_dict(), default=_plain))


def _plain(value: object) -> Any:
    """JSON's form of what a LoraConfig may hold."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value.value if isinstance(value, enum.Enum) else str(value)
