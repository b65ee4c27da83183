"""Compares tensors that several ranks hold as bit-equal copies. The comparison detects flipped bits in these tensors.

Without this check, training would continue after a flipped bit, with different weights on each replica.
These tensors have copies:

- weights, on every data-parallel rank (with `parallel.zero=0` their optimizer state too)
- FSDP's shards of master weights and optimizer state, in every group of replicas (HSDP)
- norm weights and row-parallel biases with their optimizer state, on every tensor-parallel rank
- a tied embedding, on the first and the last stage

In BLOOM-176B's training, the layer norms of tensor-parallel ranks had become different. This was found after two weeks.

A tensor's checksum is the sum of its bits read as integers. Any single flipped bit changes it by a power of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frontier_llm.blueprint.optimizers import STATISTIC
from frontier_llm.comm import Axis, Mesh, all_gather, all_gather_json, maximum
from frontier_llm.errors import Problem
from frontier_llm.optim import Optimizer
from frontier_llm.run.failure import Suspect
from frontier_llm.run.rank_env import node_name
from frontier_llm.training.guard.suspects import WrongResults

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaDrift(WrongResults):
    """Copies of one tensor differ. The message names tensors and ranks."""


@dataclass(frozen=True)
class Drift:
    """A tensor whose copies differ."""

    tensor: str
    axis: str
    # Ranks whose value differs from that of most ranks; all ranks if no value has a majority (always with two copies).
    ranks: tuple[int, ...]

    def problem(self) -> Problem:
        """Return a Problem that names the tensor and the ranks."""
        one = f"rank {self.ranks[0]} differs from the other {self.axis} ranks"
        return Problem(self.tensor, one if len(self.ranks) == 1 else f"{self.axis} ranks {list(self.ranks)} differ")


@dataclass(frozen=True)
class _Copies:
    """Tensors with copies on every `apart`-th rank of an axis. The ranks in between hold other shards."""

    axis: Axis
    apart: int
    tensors: list[tuple[str, Tensor]]

    def drifts(self, device: torch.device) -> Iterator[Drift]:
        """Yield the tensors of this rank whose copies differ. Collective over the axis."""
        first = self.axis.rank % self.apart
        ranks = self.axis.ranks[self.axis.rank % self.apart :: self.apart]
        if len(ranks) == 1:
            return
        # Ranks may hold different numbers of tensors, because a shard may have no elements of a parameter.
        width = len(self.tensors) if self.apart == 1 else maximum([len(self.tensors)], self.axis, device)[0]
        if not width:
            return
        mine = torch.zeros(width, dtype=torch.int64, device=device)
        for place, (_, values) in enumerate(self.tensors):
            mine[place] = checksum(values)
        table = all_gather(mine, self.axis).view(self.axis.size, -1)[first :: self.apart].cpu()
        for column in (table != table[0]).any(0).nonzero().flatten().tolist():
            yield Drift(self.tensors[column][0], self.axis.name, _odd(table[:, column].tolist(), ranks))


class ReplicaCheck:
    """Compares the copies of all tensors. Collective over the replicas and over every axis whose ranks hold copies."""

    def __init__(self, optimizer: Optimizer, mesh: Mesh) -> None:
        weights = [(f"weights of {spec.name}", spec, values) for spec, values in optimizer.weights()]
        tensors = [(kind, part, values) for part in optimizer.state() for kind, values in part.tensors.items()]
        # Every replica has the optimizer's statistics (Adafactor's means) of complete buckets, also with ZeRO. They
        # must be equal on all replicas.
        common = weights + [
            (f"{kind} of {part.name}", part.spec, values) for kind, part, values in tensors if kind == STATISTIC
        ]
        # All ranks of a stage, and all replicas with the same shard, hold the same parts of the same parameters in the
        # same order. So their n-th tensors are copies of each other.
        shares = [(f"{kind} of {part.name}", part.spec, values) for kind, part, values in tensors if kind != STATISTIC]
        self._copies = [
            _Copies(
                axis,
                apart,
                [(name, values) for name, spec, values in held if spec.parameter.replicas == name_of_axis],
            )
            for name_of_axis, axis in (("dp", mesh.replicas), ("edp", mesh.edp))
            for apart, held in ((1, common), (optimizer.shards, shares))
        ]
        copied = {axis for _, spec, _ in (*common, *shares) for axis in spec.coordinates if not spec.splits_over(axis)}
        for axis in sorted(copied - {mesh.replicas.name, "edp"}):
            # "tied" joins ranks of two stages. Their shards of the state differ, so only the weights are compared.
            held = weights if axis == mesh.tied.name else common + shares
            copies = [
                (name, values) for name, spec, values in held if axis in spec.coordinates and not spec.splits_over(axis)
            ]
            self._copies.append(_Copies(mesh.axis(axis), 1, copies))
        self._optimizer = optimizer
        self._device = optimizer.device

    def drifts(self) -> list[Drift]:
        """Return the tensors whose copies differ in this rank's groups."""
        self._optimizer.wait_for_gather()
        return [drift for copies in self._copies for drift in copies.drifts(self._device)]

    def check(self, step: int, world: Axis) -> None:
        """Raise ReplicaDrift on every rank if copies differ on any rank. Collective over the world."""
        drifts = self.drifts()
        if maximum([len(drifts)], world, self._device)[0]:
            answers = all_gather_json(
                [node_name(), [list(vars(drift).values()) for drift in drifts[:5]]],
                world,
                self._device,
            )
            hosts = [host for host, _ in answers]
            unique = list(
                dict.fromkeys(Drift(tensor, axis, tuple(ranks)) for _, rows in answers for tensor, axis, ranks in rows)
            )
            head = Problem(
                f"step {step}",
                "replicas of the same tensor differ",
                "the memory of these ranks may be faulty: start again without their nodes, from the newest checkpoint; "
                "its replicas were compared before it was saved",
            )
            suspects = [Suspect(rank, hosts[rank], drift.tensor) for drift in unique for rank in drift.ranks]
            raise ReplicaDrift([*(drift.problem() for drift in unique), head], suspects, hosts)


def checksum(values: Tensor) -> Tensor:
    """Return the sum of the bits modulo 2^64, as 0-dim int64.

    If the tensor is aligned to eight bytes, words of eight bytes are summed. This is four times as fast as a sum of
    single elements.
    """
    flat = values.reshape(-1)
    narrow = _INTEGERS[values.element_size()]
    per_word = 8 // values.element_size()
    words = flat.numel() // per_word * per_word if flat.storage_offset() % per_word == 0 else 0
    rest = flat[words:].view(narrow).sum(dtype=torch.int64)
    return rest + flat[:words].view(torch.int64).sum() if words else rest


def _odd(sums: list[int], ranks: Sequence[int]) -> tuple[int, ...]:
    (common, count), *_ = Counter(sums).most_common(1)
    return tuple(rank for rank, value in zip(ranks, sums, strict=True) if value != common or count <= len(sums) / 2)
