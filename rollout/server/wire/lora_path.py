"""Adapters in SGLang's dialect: those that a request names, and what is told of those that are loaded."""

from __future__ import annotations

import msgspec

from rollout.sampling.params import ParameterError
from rollout.server.wire.body import Each, GenerationBody, Text


class LoadedAdapters(msgspec.Struct):
    """The answer to a load or an unload, also to one that failed; `loaded_adapters` are folders by name."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]


class NamesAdapters(GenerationBody):
    """`lora_path` is an adapter's name, in spite of its own; null means the base model."""

    lora_path: Text | Each[Text | None] | None = None

    @property
    def adapter_param(self) -> str:
        """The field that names the adapter."""
        return "model" if self.lora_path is None else "lora_path"

    def wanted_adapter(self, index: int) -> str | None:
        """The adapter of this prompt. Raises ParameterError for a list that doesn't have one for each."""
        if isinstance(self.lora_path, list):
            if index == 0 and len(self.lora_path) != len(self.prompts()):
                raise ParameterError(f"lora_path holds {len(self.lora_path)} names, not one a prompt.", "lora_path")
            return self.lora_path[index]
        return self.model if self.lora_path is None else self.lora_path
