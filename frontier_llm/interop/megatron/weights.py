"""Reads a Megatron-LM or Megatron-DeepSpeed checkpoint as a source of weights.

The tensor-parallel parts are joined, and the rows of fused matrices are put into this package's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from frontier_llm.blueprint.parameters import (
    VOCABULARY,
    Parameter,
    ParameterKind,
    Split,
    model_parameters,
)
from frontier_llm.errors import CheckpointError, Problem, first_of
from frontier_llm.interop.megatron.arguments import read_model
from frontier_llm.interop.megatron.files import find


class MegatronModel:
    """A Megatron checkpoint as a `WeightSource`."""

    def __init__(self, directory: str | Path, vocab_size: int | None = None, vocab_multiple: int | None = None) -> None:
        """`vocab_size` is the tokenizer's size. Megatron's padding rows of the embedding are left out (None: kept).

        Raises CheckpointError if the checkpoint or a rank's file is missing, or if the checkpoint_version is unknown.
        Also raises CheckpointError if an argument or a tensor has no counterpart, if shapes differ from the arguments,
        or if copies differ between tensor ranks.
        """
        try:
            self._read(Path(directory), vocab_size, vocab_multiple)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            what = f"has an unexpected value: {type(error).__name__}: {error}"
            raise CheckpointError(what, "copy the checkpoint again", str(directory)) from error

    def _read(self, directory: Path, vocab_size: int | None, vocab_multiple: int | None) -> None:
        self._stored = find(directory)
        model = read_model(self._stored.arguments, f"{self._stored.where}: args", vocab_size)
        update = {"name": directory.resolve().name, **({"vocab_multiple": vocab_multiple} if vocab_multiple else {})}
        self.model = model.model_copy(update=update)
        if self.model.layers > len(self._stored.tensors):  # checked before a list with an entry per layer is made
            what = f"has {self.model.layers} layers, more than the {len(self._stored.tensors)} tensors in its files"
            raise CheckpointError(what, "copy the complete checkpoint", self._stored.where)
        self._parameters = model_parameters(self.model)
        self._degree = max(len(parts) for parts in self._stored.tensors.values())
        why = "" if self._stored.version in (0, 1, 2, 3) else "; the order of query_key_value is known only for 0 to 3"
        if self._stored.version < 2 and self.model.num_kv_heads != self.model.heads:
            why = ", which does not support grouped-query attention"
        if why:
            what = f"has checkpoint_version {self._stored.version:g}{why}"
            raise CheckpointError(what, where=self._stored.where, fix="convert it with the Megatron-LM that wrote it")
        self._check()

    def rectangle(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a rectangle of our parameter `name`. Maps and joins the parts that the parameter consists of."""
        whole = self._joined(self._parameters[name])
        return whole[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]

    def _check(self) -> None:
        """Raise CheckpointError unless the parts of all tensors have the expected shapes and no other tensor exists."""
        problems = []
        for name, parameter in self._parameters.items():
            parts = self._stored.tensors.get(name, [])
            expected = self._part_shape(parameter)
            shapes = [part.shape for part in parts]
            if len(parts) != self._degree or any(shape != expected for shape in shapes):
                what = f"is {shapes or 'missing'}, expected {self._degree} parts of shape {list(expected)}"
                problems.append(Problem(name, what, "copy the complete checkpoint"))
        tied_copy = {"head.weight"} if self.model.tied_embeddings else set()
        for name in sorted(self._stored.tensors.keys() - self._parameters.keys() - tied_copy):
            problems.append(
                Problem(
                    name,
                    "is in the checkpoint, but not in the model that its arguments describe",
                    "see docs/megatron.md",
                )
            )
        if problems:
            raise CheckpointError(first_of(problems))

    def _part_shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the shape of one tensor rank's part in Megatron's form, with matrices of two dimensions."""
        if parameter.name in VOCABULARY:
            return (self._stored.arguments["padded_vocab_size"] // self._degree, parameter.shape[1])
        shape = self._part_of_ours(parameter)
        if parameter.kind is ParameterKind.VECTOR:
            return (prod(shape),)
        return (prod(shape[:-1]), shape[-1])

    def _part_of_ours(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the shape of one tensor rank's part in our form.

        A size that the degree does not divide is rounded down, so that the shape check fails.
        """
        how = parameter.axes.get("tp")
        return tuple(
            size // self._degree if isinstance(how, Split) and dim == how.dim else size
            for dim, size in enumerate(parameter.shape)
        )

    def _joined(self, parameter: Parameter) -> Tensor:
        name = parameter.name
        parts = [part.read() for part in self._stored.tensors[parameter.name]]
        how = parameter.axes.get("tp")
        if not isinstance(how, Split):
            return self._same(name, parts)
        if name in VOCABULARY:
            whole = torch.cat(parts)[: self.model.vocab_size]
            return torch.nn.functional.pad(whole, (0, 0, 0, parameter.shape[0] - len(whole)))
        if ".attention.qkv." in name:
            return torch.cat([self._heads(part) for part in parts])
        return torch.cat([part.reshape(self._part_of_ours(parameter)) for part in parts], how.dim)

    def _heads(self, part: Tensor) -> Tensor:
        """Return one rank's rows as (g, Q + 2, D[, H]) with g key/value heads and Q query heads for each."""
        D = self.model.dim_per_head
        rest = part.shape[1:]
        if self._stored.version >= 2:
            return part.reshape(-1, self.model.heads // self.model.num_kv_heads + 2, D, *rest)
        if self._stored.version == 1:  # rows of query, key and value alternate within a head
            return part.reshape(-1, D, 3, *rest).transpose(1, 2)
        return part.reshape(3, -1, D, *rest).transpose(0, 1)  # all queries, then all keys, then all values

    def _same(self, name: str, copies: Sequence[Tensor]) -> Tensor:
        for number, copy in enumerate(copies[1:], start=1):
            if not torch.equal(copies[0], copy):
                apart = float((copies[0].double() - copy.double()).abs().max())
                what = (
                    f"differs by up to {apart:.3g} between tensor ranks 0 and {number}, which should have equal copies"
                )
                raise CheckpointError(
                    what,
                    where=f"{self._stored.where}: {name}",
                    fix="find out which copy is correct, and write it to all files",
                )
        return copies[0]
