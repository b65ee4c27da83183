"""Reads a Hugging Face directory as a source of weights, from which each rank of any layout reads its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from frontier_llm.blueprint.parameters import ParameterKind
from frontier_llm.config import ModelConfig
from frontier_llm.errors import CheckpointError, Problem, first_of
from frontier_llm.interop.huggingface.families import FAMILIES, ConfigJson, Family
from frontier_llm.interop.huggingface.files import ShardedReader, read_json

CONFIG = "config.json"
MAX_CONFIG_BYTES = 1 << 20


class HuggingFaceModel:
    """Directory with config.json and safetensors files, read as one of our models (a `WeightSource`)."""

    def __init__(self, directory: str | Path, vocab_multiple: int | None = None) -> None:
        """`vocab_multiple` is the multiple to which the vocabulary is padded (None: ModelConfig's default).

        Raises CheckpointError for an unknown architecture, a value with no counterpart, missing or damaged shards, or
        wrong shapes.
        """
        self.directory = Path(directory)
        self.family, self.model = _read_config(self.directory)
        if vocab_multiple is not None:
            self.model = self.model.model_copy(update={"vocab_multiple": vocab_multiple})
        self._reader = ShardedReader(self.directory)
        if self.model.layers > len(self._reader.files):  # checked before a list with an entry per layer is made
            what = f"has {self.model.layers} layers, more than the {len(self._reader.files)} tensors in the files"
            raise CheckpointError(what, "use config and weights of the same revision", str(self.directory / CONFIG))
        self.rules = {rule.parameter.name: rule for rule in self.family.names.rules(self.model)}
        bare = all(not name.startswith(self.family.prefix) for name in self._reader.files)
        # files saved from the bare model (the hub's gpt2) lack the prefix
        self._drop = self.family.prefix if bare else ""
        self._check_tensors()

    def rectangle(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a rectangle of our parameter `name`.

        Reads the complete tensors of which the parameter consists; of experts only those in the rectangle.
        """
        rule = self.rules[name]
        if rule.parameter.kind is ParameterKind.EXPERTS:  # read only the experts of this rank
            some = rule.join(
                [self._reader.read(self._name(part)) for part in rule.experts(offset[0], offset[0] + shape[0])]
            )
            return some[
                (slice(None), *(slice(first, first + size) for first, size in zip(offset[1:], shape[1:], strict=True)))
            ]
        whole = rule.join([self._reader.read(self._name(part)) for part in rule.theirs])
        return whole[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]

    def _name(self, theirs: str) -> str:
        return theirs.removeprefix(self._drop)

    def _check_tensors(self) -> None:
        expected = {
            self._name(name): shape
            for rule in self.rules.values()
            for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True)
        }
        problems = []
        for name, shape in expected.items():
            if name not in self._reader:
                problems.append(
                    Problem(
                        name,
                        f"is missing; expected a tensor of shape {list(shape)}",
                        "fetch the model's files again",
                    )
                )
            elif self._reader.shape(name) != shape:
                what = f"has shape {list(self._reader.shape(name))}, but {CONFIG} requires {list(shape)}"
                problems.append(Problem(name, what, "use config and weights of the same revision"))
        endings = tuple(self.family.ignored)
        if self.model.tied_embeddings:
            endings += ("lm_head.weight", "embed_out.weight")
        for name in self._reader.files:
            if name not in expected and not name.endswith(endings):
                what = f"is not a tensor of the supported {self.family.architecture}"
                problems.append(Problem(name, what, "this model cannot be read: it has parts that are not supported"))
        if problems:
            raise CheckpointError(first_of(problems))


def read_model_config(directory: str | Path) -> ModelConfig:
    """Return our configuration of a Hugging Face model, from its config.json alone."""
    return _read_config(Path(directory))[1]


def _read_config(directory: Path) -> tuple[Family, ModelConfig]:
    where = str(directory / CONFIG)
    try:
        content = read_json(directory / CONFIG, MAX_CONFIG_BYTES)
    except OSError as error:
        what = "is not a Hugging Face model: it has no config.json"
        raise CheckpointError(what, "give the directory with config.json", str(directory)) from error
    family = family_of(content, where)
    fields = ConfigJson(content, where)
    fields.only("quantization_config", None)
    try:
        model = family.read_model(fields)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"has an unexpected value: {error}"
        raise CheckpointError(
            [*fields.problems, Problem(where, what, "restore the config.json that came with the weights")]
        ) from error
    refusals = family.refusals(model)
    if refusals:
        raise CheckpointError(
            [Problem(where, f"{family.architecture}: {reason}", "see docs/huggingface.md") for reason in refusals]
        )
    return family, model.model_copy(update={"name": directory.resolve().name})


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Return the family that a config.json names. Raises CheckpointError with the supported architectures."""
    names = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    for family in FAMILIES:
        if family.architecture in names or (not names and family.model_type == config.get("model_type")):
            return family
    if "kv_lora_rank" in config:
        what = (
            f"architecture {', '.join(names) or config.get('model_type')!r} has multi-head latent attention "
            f"(MLA), which is not supported"
        )
        raise CheckpointError(
            what,
            where=where,
            fix=(
                "load a checkpoint of another architecture, for example Dots1ForCausalLM, which resembles DeepSeek "
                "but has ordinary attention"
            ),
        )
    what = f"architecture {', '.join(names) or config.get('model_type')!r} is not supported"
    known = ", ".join(family.architecture for family in FAMILIES)
    raise CheckpointError(
        what,
        where=where,
        fix=f"supported: {known}; or give a plugin that registers it: --plugin MODULE (docs/extending.md)",
    )
