"""Copies that must stay bit-equal, compared every so often: one flipped bit in one of them otherwise trains on unnoticed.

Weights are held by every data-parallel rank (and with zero=0 the optimizer state too), norm weights and row-parallel biases by
every tensor-parallel rank (with their optimizer state), a tied embedding by two stages. BLOOM-176B found after two weeks that
the layer norms of its tensor-parallel ranks had drifted apart.

A tensor's checksum is the sum of its bits read as integers: any single flipped bit changes it by a power of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.checkpoint.exchange import all_gather_json, maximum
from frontier_llm.comm import Axis, Mesh, all_gather
from frontier_llm.errors import FrontierError, Problem
from frontier_llm.optim import Optimizer
from frontier_llm.topology import ShardSpec

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaDrift(FrontierError):
    """Copies of one tensor differ; the message names tensors and ranks. Every rank raises it."""

    exit_code = 1


@dataclass(frozen=True)
class _Copy:
    """One thing that every rank of an axis holds."""

    name: str
    values: Tensor


class ReplicaCheck:
    """Compares all copies; collective over dp, tp and tied."""

    def __init__(self, optimizer: Optimizer, mesh: Mesh) -> None:
        def over_dp(spec: ShardSpec) -> bool:
            return True

        def over_tp(spec: ShardSpec) -> bool:
            return spec.tp_replicas > 1

        def tied(spec: ShardSpec) -> bool:
            return spec.tied_copies > 1

        whole_state = [] if optimizer.sharded else list(_state(optimizer, over_dp))
        self._copies: list[tuple[Axis, list[_Copy]]] = [
            (mesh.dp, [*_weights(optimizer, over_dp), *whole_state]),
            (mesh.tp, [*_weights(optimizer, over_tp), *_state(optimizer, over_tp)]),
            (mesh.tied, list(_weights(optimizer, tied))),
        ]
        self._optimizer, self._device = optimizer, optimizer.device

    def problems(self) -> list[Problem]:
        """Each tensor whose copies differ, with the ranks that are alone with their value; as this rank's groups see it."""
        found = []
        self._optimizer.settle()
        for axis, copies in self._copies:
            if axis.size > 1 and copies:
                mine = torch.stack([checksum(copy.values) for copy in copies])
                table = all_gather(mine, axis).view(axis.size, -1).cpu()
                for column in (table != table[0]).any(0).nonzero().flatten().tolist():
                    found.append(_describe(copies[column].name, table[:, column].tolist(), axis))
        return found

    def check(self, step: int, world: Axis) -> None:
        """Raises ReplicaDrift on every rank when copies differ anywhere. Collective over the world."""
        problems = self.problems()
        if maximum([len(problems)], world, self._device)[0]:
            rows = all_gather_json([vars(problem) for problem in problems[:5]], world, self._device)
            unique = dict.fromkeys(Problem(**row) for ranks in rows for row in ranks)
            head = Problem(
                f"step {step}",
                "replicas have drifted apart",
                "suspect these ranks' memory; exclude their nodes and start again from the newest checkpoint, which was compared before it was saved",
            )
            raise ReplicaDrift([*unique, head])


def checksum(values: Tensor) -> Tensor:
    """0-dim int64: the sum of the bits, modulo 2^64, in words of eight bytes where they are aligned (four times as fast as by element)."""
    flat, narrow = values.reshape(-1), _INTEGERS[values.element_size()]
    per_word = 8 // values.element_size()
    words = flat.numel() // per_word * per_word if flat.storage_offset() % per_word == 0 else 0
    rest = flat[words:].view(narrow).sum(dtype=torch.int64)
    return rest + flat[:words].view(torch.int64).sum() if words else rest


def _weights(optimizer: Optimizer, replicated: Callable[[ShardSpec], bool]) -> Iterator[_Copy]:
    yield from (_Copy(f"weights of {spec.name}", values) for spec, values in optimizer.weights() if replicated(spec))


def _state(optimizer: Optimizer, replicated: Callable[[ShardSpec], bool]) -> Iterator[_Copy]:
    """The same parameters lie in the same places on every tp rank, and without ZeRO on every dp rank: so the rectangles correspond."""
    for part in optimizer.state():
        if replicated(part.spec):
            yield from (_Copy(f"{kind} of {part.name}", values) for kind, values in part.tensors.items())


def _describe(name: str, sums: list[int], axis: Axis) -> Problem:
    """Names the minority; with two copies, or without a majority, all of them."""
    (common, count), *_ = Counter(sums).most_common(1)
    odd = [axis.ranks[index] for index, value in enumerate(sums) if value != common] if count > len(sums) / 2 else list(axis.ranks)
    who = f"rank {odd[0]} differs from the other {axis.name} ranks" if len(odd) == 1 else f"{axis.name} ranks {odd} differ"
    return Problem(name, who)
