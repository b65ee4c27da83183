"""Hugging Face models both ways: streamed tensor by tensor, in bounded memory, without GPUs, from and to any layout.

Reading gives a `WeightSource`, from which every rank of any layout takes its rectangles; writing takes any `WeightSource`, for
example a training checkpoint. So neither direction knows how the model is or was split.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from frontier_llm.checkpoint.huggingface_card import model_card
from frontier_llm.checkpoint.huggingface_families import FAMILIES, Family, Fields
from frontier_llm.checkpoint.huggingface_files import Entry, ShardedReader, write_sharded
from frontier_llm.checkpoint.huggingface_rules import TensorRule
from frontier_llm.config import ModelConfig
from frontier_llm.errors import CheckpointError, Problem
from frontier_llm.topology import ShardSpec

CONFIG = "config.json"
GIB = 1 << 30
_REPORTED = 8  # of a list of missing tensors
_DTYPE_NAMES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class WeightSource(Protocol):
    """Where a model's weights come from, by our names, whatever layout they were written in."""

    @property
    def model(self) -> ModelConfig:
        """The shape they belong to."""
        ...

    def rectangle(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Part [offset, offset + shape) of a global parameter, on the CPU, in the source's dtype."""
        ...


class HasSpec(Protocol):
    """A parameter that knows what it is part of (tensor_parallel.ShardedParameter)."""

    spec: ShardSpec

    def copy_(self, source: Tensor) -> Any:
        """Take these values."""
        ...


def load_weights(source: WeightSource, parameters: Iterable[HasSpec]) -> None:
    """Copy each parameter's rectangle from the source. With an optimizer, call its `masters_from_weights()` afterwards."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(source.rectangle(parameter.spec.name, parameter.spec.offset, parameter.spec.shape))


class HuggingFaceModel:
    """A directory with config.json and safetensors, seen as one of our models."""

    def __init__(self, directory: str | Path, vocab_multiple: int | None = None) -> None:
        """`vocab_multiple` is what the vocabulary is padded to (None: ModelConfig's default).

        Raises CheckpointError: unknown architecture, a value with no counterpart, missing or damaged shards, wrong shapes.
        """
        self.directory = Path(directory)
        self.config = _read_config(self.directory)
        self.family = family_of(self.config, str(self.directory / CONFIG))
        self._model = read_model_config(self.directory)
        if vocab_multiple is not None:
            self._model = self._model.model_copy(update={"vocab_multiple": vocab_multiple})
        self.rules = {rule.ours: rule for rule in self.family.rules(self._model)}
        self._reader = ShardedReader(self.directory)
        bare = all(not name.startswith(self.family.prefix) for name in self._reader.files)
        self._drop = self.family.prefix if bare else ""  # files saved from the bare model (the hub's gpt2) lack it
        self._check_tensors()

    @property
    def model(self) -> ModelConfig:
        """The counterpart's shape."""
        return self._model

    def rectangle(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """See WeightSource; reads the whole tensors that `name` is made of."""
        rule = self.rules[name]
        whole = rule.join([self._reader.read(self._name(part)) for part in rule.theirs])
        return whole[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]

    def _name(self, theirs: str) -> str:
        return theirs.removeprefix(self._drop)

    def _check_tensors(self) -> None:
        expected = {
            self._name(name): shape for rule in self.rules.values() for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True)
        }
        problems = []
        for name, shape in expected.items():
            if name not in self._reader:
                problems.append(Problem(name, f"is missing; expected a tensor of shape {list(shape)}", "fetch the model's files again"))
            elif self._reader.shape(name) != shape:
                what = f"has shape {list(self._reader.shape(name))}, expected {list(shape)} from {CONFIG}"
                problems.append(Problem(name, what, "use config and weights of the same revision"))
        endings = (*self.family.ignored, *(("lm_head.weight", "embed_out.weight") if self._model.tied_embeddings else ()))
        for name in self._reader.files:
            if name not in expected and not name.endswith(endings):
                what = f"has no place in {self.family.architecture} as we compute it"
                problems.append(Problem(name, what, "the model has parts that are not supported"))
        if problems:
            rest = len(problems) - _REPORTED
            more = [Problem(str(self.directory), f"… and {rest} more like these")] if rest > 0 else []
            raise CheckpointError([*problems[:_REPORTED], *more])


def read_model_config(directory: str | Path) -> ModelConfig:
    """Our shape of a Hugging Face model, from its config.json alone."""
    content, where = _read_config(Path(directory)), str(Path(directory) / CONFIG)
    family = family_of(content, where)
    model = family.read(Fields(content, where))
    refusals = family.refusals(model)
    if refusals:
        raise CheckpointError([Problem(where, f"{family.architecture}: {reason}", "see docs/huggingface.md") for reason in refusals])
    return model.model_copy(update={"name": Path(directory).resolve().name})


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json names. Raises CheckpointError with the supported architectures."""
    names = config.get("architectures") or []
    for family in FAMILIES:
        if family.architecture in names or (not names and family.model_type == config.get("model_type")):
            return family
    what = f"architecture {', '.join(names) or config.get('model_type')!r} has no mapping"
    raise CheckpointError(what, where=where, fix=f"supported: {', '.join(family.architecture for family in FAMILIES)}")


def family_for(model: ModelConfig) -> Family:
    """The first family that computes exactly this model. Raises CheckpointError saying what each one would need."""
    reasons = {family.architecture: family.refusals(model) for family in FAMILIES}
    for family in FAMILIES:
        if not reasons[family.architecture]:
            return family
    raise CheckpointError(
        [Problem(f"as {name}", "; ".join(why), "train a model of one of these families") for name, why in reasons.items()]
    )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            "is not a Hugging Face model: it has no config.json", where=str(directory), fix="give the directory that holds it"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"is not JSON: {error}", where=str(path), fix="fetch the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"holds a {type(content).__name__}, not an object", where=str(path), fix="fetch the file again")
    return content


@dataclass(frozen=True)
class Companions:
    """What goes along with the weights."""

    tokenizer_files: Mapping[str, str | Path] = field(default_factory=dict)  # file name → text, or the file to copy
    eos_token_id: int | None = None
    facts: Mapping[str, object] = field(default_factory=dict)  # of the run, for the model card


def export_huggingface(
    source: WeightSource, directory: str | Path, dtype: torch.dtype, companions: Companions | None = None, shard_gib: float = 5.0
) -> Family:
    """Write config.json, weights, tokenizer files and README.md; the directory appears whole or not at all.

    Raises CheckpointError when no family computes this model, or the directory is not empty.
    """
    companions, directory, model = companions or Companions(), Path(directory), source.model
    family = family_for(model)
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError("is not empty", where=str(directory), fix="give a new directory, or remove this one")
    working = directory.with_name(f"{directory.name}.tmp.{os.getpid()}")
    working.mkdir(parents=True)
    try:
        rules = family.rules(model)
        entries = [Entry(name, shape) for rule in rules for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True)]
        files = write_sharded(working, entries, dtype, _their_tensors(source, rules), int(shard_gib * GIB))
        config = write_config(family, model, dtype, companions.eos_token_id)
        (working / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name, content in companions.tokenizer_files.items():
            if isinstance(content, Path):
                shutil.copyfile(content, working / name)
            else:
                (working / name).write_text(content, encoding="utf-8")
        card = model_card(family.architecture, model, _DTYPE_NAMES[dtype], files, companions.facts)
        (working / "README.md").write_text(card, encoding="utf-8")
        if directory.exists():
            directory.rmdir()
        working.rename(directory)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
    return family


def write_config(family: Family, model: ModelConfig, dtype: torch.dtype, eos_token_id: int | None) -> dict[str, Any]:
    """config.json of a model. Keys that transformers 4 and 5 spell differently are written in both spellings: readers before 5 look
    only at rope_theta and silently take 10000 without it, 5 looks at rope_parameters.
    """
    name = _DTYPE_NAMES[dtype]
    return {
        "architectures": [family.architecture], "model_type": family.model_type, "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings, "torch_dtype": name, "dtype": name, "use_cache": True,
        "bos_token_id": eos_token_id, "eos_token_id": eos_token_id, **family.write(model),
    }  # fmt: skip


def _their_tensors(source: WeightSource, rules: Sequence[TensorRule]) -> Iterator[Tensor]:
    for rule in rules:
        yield from rule.cut(source.rectangle(rule.ours, (0,) * len(rule.shape), rule.shape))
