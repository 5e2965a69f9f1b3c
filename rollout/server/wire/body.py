"""What every body of a request that may be large has in common."""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, ValidationError, model_validator

# More findings than this are told by their number: to list millions would stop the server for minutes.
MAX_FINDINGS = 100

T = TypeVar("T")
Each = Annotated[list[T], Field(fail_fast=True)]  # of a long list's entries, the first wrong one is told


class Body(BaseModel):
    """A body whose refusal is bounded, however much of it is wrong. (As part of a union it would lose its name.)"""

    @model_validator(mode="wrap")
    @classmethod
    def _bounded(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            if error.error_count() <= MAX_FINDINGS:
                raise
            raise ValueError(f"{error.error_count()} values of the body are wrong") from None
