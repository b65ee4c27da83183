"""Base class of all configuration sections, and the types of numbers and paths in their fields."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

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

from frontier_llm.config.urls import folder_fault


def whole(value: Any) -> Any:
    """Convert 1000.0 and text such as "1e3" to an integer. YAML loads 1e3 as text. Other values stay unchanged."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?[eE]\+?\d\d?", value):
        number = float(value)
    elif isinstance(value, float):
        number = value
    else:
        return value
    return int(number) if number.is_integer() else value


# With this upper bound, a search for divisors or nearby values ends soon even if the number is mistyped.
PositiveInt = Annotated[int, BeforeValidator(whole), Field(gt=0, le=10**12)]
NonNegativeInt = Annotated[int, BeforeValidator(whole), Field(ge=0, lt=2**63)]


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

# Sizes have their own upper bounds, far above any model or machine, so a mistyped number is refused at once. Without
# the bound, the check of a layout with a million layers takes minutes.
LayerCount = Annotated[int, BeforeValidator(whole), Field(ge=1, le=65_536)]
DenseLayerCount = Annotated[int, BeforeValidator(whole), Field(ge=0, le=65_536)]
HeadCount = Annotated[int, BeforeValidator(whole), Field(ge=1, le=65_536)]
ExpertCount = Annotated[int, BeforeValidator(whole), Field(ge=1, le=65_536)]
Width = Annotated[int, BeforeValidator(whole), Field(ge=1, le=1 << 24)]
# 0 = the layer does not have the part that this width describes
OptionalWidth = Annotated[int, BeforeValidator(whole), Field(ge=0, le=1 << 24)]
VocabularySize = Annotated[int, BeforeValidator(whole), Field(ge=1, le=(1 << 31) - 1)]  # token ids are int32
SequenceLength = Annotated[int, BeforeValidator(whole), Field(ge=1, le=1 << 30)]  # number of tokens
GlobalBatch = Annotated[int, BeforeValidator(whole), Field(ge=1, le=1 << 24)]  # sequences
MicroBatch = Annotated[int, BeforeValidator(whole), Field(ge=1, le=1 << 20)]  # sequences
Degree = Annotated[int, BeforeValidator(whole), Field(ge=1, le=1 << 20)]  # ranks along an axis of the mesh

PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


def _path(text: str) -> str:
    """Replace `~` by the home directory, as a shell does.

    Raises ValueError for environment variables, because a record with them would name different files for different
    users.
    """
    if "$" in text:
        raise ValueError("must be a path without variables (on the command line the shell replaces them)")
    return os.path.expanduser(text)


def _remote(text: str) -> str:
    """Return the URL of a folder. Raises ValueError if nothing can be written there or if it has credentials."""
    if fault := folder_fault(text):
        raise ValueError(fault)
    return text.rstrip("/")


# A step or FIRST-LAST. YAML loads a single step as a number.
StepRange = Annotated[str, BeforeValidator(str), Field(pattern=r"^[1-9]\d*(-[1-9]\d*)?$")]
PathText = Annotated[str, AfterValidator(_path)]
RemoteUrl = Annotated[str, AfterValidator(_remote)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


def first_fault(error: ValidationError) -> str:
    """Return the first error in a file that a program wrote, on one line. `load.as_problem` describes errors in a
    user's file.
    """
    fault = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, fault["loc"])), fault["msg"]]))[:400]


# Numbers that YAML loads as text, because it requires a point before the exponent.
_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


@functools.cache
def _takes(section: type[BaseModel], field: str) -> frozenset[type]:
    """Return the types among bool, int, float and str that a field accepts, as a single value or in a list."""
    types = set(_types_in(section.model_fields[field].annotation))
    types |= {type(one) for one in types}  # a Literal lists values instead of types
    return frozenset(types & {bool, int, float, str})


def _types_in(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and, recursively, its arguments without the keys of mappings."""
    yield annotation
    arguments = get_args(annotation)
    if get_origin(annotation) in (dict, Mapping):
        arguments = arguments[1:]
    for inner in arguments:
        yield from _types_in(inner)


def _values_in(value: Any) -> Iterator[Any]:
    """Yield the single values of a value, recursively."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _values_in(inner)
    else:
        yield value


def _is_quoted_number(value: Any) -> bool:
    """Return True for text that pydantic would convert to a number. False for spellings that YAML loads as text."""
    if not isinstance(value, str) or _EXPONENT.fullmatch(value):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True


class Section(BaseModel):
    """Base class of all sections: immutable, without unknown keys, and with few conversions of types.

    An integer is accepted for a float (4 for 4.0), and a float without a fraction for an integer. Text such as 1e-4 may
    stand for a number, because YAML loads it as text. Other text in place of a number or a boolean is refused, and so
    are booleans and numbers in place of each other.
    """

    # JSON can represent neither infinity nor NaN.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_other_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `layers: true`, `layers: "4"`, `bias: 1` and `bias: "yes"`, which pydantic would convert."""
        taken = _takes(cls, info.field_name) if info.field_name is not None else frozenset()
        values = list(_values_in(value))
        if taken == {bool} and not all(isinstance(one, bool | None) for one in values):
            raise ValueError("must be true or false, without quotes")
        takes_numbers = bool(taken & {int, float}) and bool not in taken
        if takes_numbers and any(isinstance(one, bool) for one in values):
            raise ValueError("must be a number")
        if takes_numbers and str not in taken and any(map(_is_quoted_number, values)):
            raise ValueError("must be a number, without quotes")
        return value
