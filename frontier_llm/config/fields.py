"""What every section of a configuration is made of: its base class, and kinds of numbers and paths."""

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
    """1e3 is a whole number, which YAML hands on as text."""
    if isinstance(value, str) and re.fullmatch(r"[1-9]\d*[eE]\+?\d\d?", value):
        return int(float(value))
    return value


# bounded, so that no mistyped number makes a search for its divisors or neighbours endless
PositiveInt = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=10**12)]
NonNegativeInt = Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=2**63)]


class TokenSteps(int):
    """Optimizer steps that a duration in tokens takes. It keeps the tokens, because the steps follow from what a run
    has done (`durations`).
    """

    tokens: int

    def __new__(cls, steps: int, tokens: int) -> TokenSteps:
        """`tokens`: the duration as it was given, an epoch in tokens."""
        value = super().__new__(cls, steps)
        value.tokens = tokens
        return value

    def __str__(self) -> str:
        return str(int(self))


def _keep_tokens(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    steps = validate(value)
    return TokenSteps(steps, value.tokens) if isinstance(value, TokenSteps) else steps


def _written(value: Any) -> Any:
    """A duration in tokens as text, which loads back as one."""
    return f"{value.tokens} tokens" if isinstance(value, TokenSteps) else value


# numbers of steps that may be given in tokens or epochs
StepCount = Annotated[PositiveInt, WrapValidator(_keep_tokens), PlainSerializer(_written)]
WarmupSteps = Annotated[NonNegativeInt, WrapValidator(_keep_tokens), PlainSerializer(_written)]

# Sizes have bounds of their own. They lie far above any model and machine, so that a mistyped digit is refused at once:
# a million layers
# keep the layout's check busy for minutes.
LayerCount = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=65_536)]
DenseLayerCount = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=65_536)]
HeadCount = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=65_536)]
ExpertCount = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=65_536)]
Width = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1 << 24)]
OptionalWidth = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=1 << 24)]  # 0: the layer has no such part
VocabularySize = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=(1 << 31) - 1)]  # token ids are int32
SequenceLength = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1 << 30)]  # tokens
GlobalBatch = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1 << 24)]  # sequences
MicroBatch = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1 << 20)]  # sequences
Degree = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1 << 20)]  # ranks along an axis of the mesh

PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


def _path(text: str) -> str:
    """`~` is the home directory, as in a shell; a variable would mean another file for everybody who reads the run's
    record.
    """
    if "$" in text:
        raise ValueError("must be a path without variables (on the command line the shell replaces them)")
    return os.path.expanduser(text)


PathText = Annotated[str, AfterValidator(_path)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


def first_fault(error: ValidationError) -> str:
    """What is wrong first with a file that a program wrote, on one line; what is wrong with a person's file
    `load.as_problem` words.
    """
    fault = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, fault["loc"])), fault["msg"]]))[:400]


@functools.cache
def _takes_numbers_only(section: type[BaseModel], field: str) -> bool:
    """True if a field takes numbers, alone or in a list, and no boolean."""
    types = set(_types_in(section.model_fields[field].annotation))
    return bool(types & {int, float}) and bool not in types


def _types_in(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of."""
    yield annotation
    for inner in get_args(annotation):
        yield from _types_in(inner)


def _holds_boolean(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_boolean, value.values()))
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(_holds_boolean, value)))


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys, no silent type coercion from strings."""

    # JSON has neither
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`layers: true` is a mistake; pydantic would take it for 1."""
        if info.field_name is not None and _takes_numbers_only(cls, info.field_name) and _holds_boolean(value):
            raise ValueError("must be a number")
        return value
