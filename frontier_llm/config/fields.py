"""Base class of all configuration sections, and the types of numbers and paths in their fields."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)


def _whole(value: Any) -> Any:
    """Convert text such as "1e3" to an integer. YAML loads it as text."""
    if isinstance(value, str) and re.fullmatch(r"[1-9]\d*[eE]\+?\d\d?", value):
        return int(float(value))
    return value


# Bounded, so that a mistyped number cannot make a search for divisors or neighbours endless.
PositiveInt = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=10**12)]
NonNegativeInt = Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=2**63)]


class TokenSteps(int):
    """Optimizer steps of a duration in tokens.

    The tokens are kept, because the number of steps depends on what the run has done (`durations`).
    """

    tokens: int

    def __new__(cls, steps: int, tokens: int) -> TokenSteps:
        """`tokens` is the duration as the user gave it. An epoch is given in tokens."""
        value = super().__new__(cls, steps)
        value.tokens = tokens
        return value

    def __str__(self) -> str:
        return str(int(self))


def _keep_tokens(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    steps = validate(value)
    return TokenSteps(steps, value.tokens) if isinstance(value, TokenSteps) else steps


def _written(value: Any) -> Any:
    """Serialise a duration in tokens as text, which loads back as a duration."""
    return f"{value.tokens} tokens" if isinstance(value, TokenSteps) else value


# Numbers of steps that the user may give in tokens or epochs.
StepCount = Annotated[PositiveInt, WrapValidator(_keep_tokens), PlainSerializer(_written)]
WarmupSteps = Annotated[NonNegativeInt, WrapValidator(_keep_tokens), PlainSerializer(_written)]

# Sizes have their own upper bounds, far above any model or machine. A mistyped digit is refused at once. Without the
# bound, a million layers keep the check of the layout busy for minutes.
LayerCount = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=65_536)]
DenseLayerCount = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=65_536)]
HeadCount = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=65_536)]
ExpertCount = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=65_536)]
Width = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1 << 24)]
OptionalWidth = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=1 << 24)]  # 0 = the layer has no such part
VocabularySize = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=(1 << 31) - 1)]  # token ids are int32
SequenceLength = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1 << 30)]  # tokens
GlobalBatch = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1 << 24)]  # sequences
MicroBatch = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1 << 20)]  # sequences
Degree = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1 << 20)]  # ranks along an axis of the mesh

PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


def _path(text: str) -> str:
    """Replace `~` by the home directory, as a shell does. Raises ValueError for variables: the same record would name
    different files for different users.
    """
    if "$" in text:
        raise ValueError("must be a path without variables (on the command line the shell replaces them)")
    return os.path.expanduser(text)


PathText = Annotated[str, AfterValidator(_path)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


def first_fault(error: ValidationError) -> str:
    """Return the first error in a file that a program wrote, on one line. `load.as_problem` describes errors in a
    user's file.
    """
    fault = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, fault["loc"])), fault["msg"]]))[:400]


@functools.cache
def _takes_numbers_only(section: type[BaseModel], field: str) -> bool:
    """Return True if a field takes numbers, alone or in a list, and no boolean."""
    types = set(_types_in(section.model_fields[field].annotation))
    return bool(types & {int, float}) and bool not in types


def _types_in(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and, recursively, its arguments."""
    yield annotation
    for inner in get_args(annotation):
        yield from _types_in(inner)


def _holds_boolean(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_boolean, value.values()))
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(_holds_boolean, value)))


class Section(BaseModel):
    """Base class of all sections: immutable, without unknown keys, and without booleans in place of numbers."""

    # JSON can represent neither infinity nor NaN.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `layers: true`, which pydantic would accept as 1."""
        if info.field_name is not None and _takes_numbers_only(cls, info.field_name) and _holds_boolean(value):
            raise ValueError("must be a number")
        return value
