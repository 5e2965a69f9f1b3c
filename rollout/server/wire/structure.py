"""What the dialects call structured outputs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout.sampling.params import ParameterError, StructuredOutputsParams


class JsonSchema(BaseModel):
    """A schema that an answer follows."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's form of structured outputs."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """The same as vLLM has it; None for plain text. Raises ParameterError for a schema that isn't there."""
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if self.type == "text":
            return None
        if self.json_schema is None:
            message = "When response_format type is 'json_schema', the 'json_schema' field must be provided."
            raise ParameterError(message, "response_format")
        return StructuredOutputsParams(json=self.json_schema.schema_)


class OutputFormat(BaseModel):
    """A schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """What the answer is like. `effort` reaches the template, as `reasoning_effort`."""

    model_config = ConfigDict(extra="forbid")

    format: OutputFormat | None = None
    effort: str | None = None
