"""Detects wrong arithmetic: at intervals, all replicas compute the gradients of one batch twice and compare the bits.

If the two results of a rank differ, the error is transient, or an op is not deterministic. If both results of a rank
are equal but differ from other data-parallel ranks, this rank computes wrongly every time. In Llama 3's 54 days on
16,384 GPUs, six silent data corruptions occurred (Dubey et al. 2024, table 5). A comparison of the weights does not
find such errors, because all replicas update with the same summed gradient.

With tensor or pipeline parallelism a wrong value spreads within its replica. Every rank with a wrong gradient is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from frontier_llm.comm import Mesh, all_gather, all_gather_json
from frontier_llm.errors import Problem
from frontier_llm.run.failure import Suspect
from frontier_llm.run.rank_env import node_name
from frontier_llm.training.guard.replicas import checksum
from frontier_llm.training.guard.suspects import WrongResults

TRANSIENT = "transient"
PERSISTENT = "persistent"


class WrongArithmetic(WrongResults):
    """A rank computes wrongly every time."""


@dataclass(frozen=True)
class UntrustedRank:
    """A rank with wrong results."""

    rank: int
    host: str
    kind: str
    tensor: str  # first tensor whose gradient differs

    def __str__(self) -> str:
        if self.kind == TRANSIENT:
            how = "two computations of the same step differ"
        else:
            how = "two computations agree, but differ from the other replicas"
        return f"{self.kind} error on rank {self.rank} on {self.host}: {how}, first in the gradient of {self.tensor}"


class Recompute:
    """Computes gradients twice on every rank and compares them. Changes only the contents of the gradient buffers."""

    def __init__(self, compute: Callable[[], Mapping[str, torch.Tensor]], mesh: Mesh) -> None:
        """`compute()` returns this rank's unsummed gradients. All data-parallel ranks compute the same batch."""
        self._compute = compute
        self._mesh = mesh
        self._hosts: list[str] = []  # hosts of all ranks

    def findings(self) -> list[UntrustedRank]:
        """Return the ranks with wrong results, the same list on every rank. Collective over the world."""
        first = self._sums()
        again = self._sums()
        mine = torch.stack([*first.values(), *again.values()])
        table = all_gather(mine, self._mesh.dp).view(self._mesh.dp.size, 2, -1).cpu().tolist()
        kind, place = _judge(table[self._mesh.dp.rank], table)
        answers = all_gather_json([node_name(), kind, list(first)[place]], self._mesh.world, mine.device)
        self._hosts = [host for host, _, _ in answers]
        return [UntrustedRank(rank, host, kind, tensor) for rank, (host, kind, tensor) in enumerate(answers) if kind]

    def check(self, step: int) -> list[UntrustedRank]:
        """Return the ranks with transient errors, after which the run may continue. Collective over the world.

        Raises WrongArithmetic if a rank has a persistent error.
        """
        findings = self.findings()
        lasting = [finding for finding in findings if finding.kind == PERSISTENT]
        if lasting:
            fix = (
                "start again without these hosts, from a checkpoint that was written before the error if its step "
                "is known"
            )
            suspects = [Suspect(finding.rank, finding.host, finding.tensor) for finding in lasting]
            raise WrongArithmetic(
                (Problem(f"step {step}", str(finding), fix) for finding in lasting),
                suspects,
                self._hosts,
            )
        return findings

    def _sums(self) -> dict[str, torch.Tensor]:
        return {name: checksum(gradient) for name, gradient in self._compute().items()}


def _judge(own: list[list[int]], table: list[list[list[int]]]) -> tuple[str, int]:
    """Return (kind of error or '', index of the first checksum that differs) of the replica with the two results `own`.

    A result is stable if both computations of a replica are equal. A stable result is a persistent error if it differs
    from the stable result of most replicas. Without a majority, every stable result counts as a persistent error.
    """
    first, again = own
    if first != again:
        return TRANSIENT, _first_difference(first, again)
    ranking = Counter(tuple(row) for row, second in table if row == second).most_common()
    others = [list(row) for row, _ in ranking if list(row) != first]
    common, count = ranking[0]
    if not others or (list(common) == first and count > sum(times for _, times in ranking) / 2):
        return "", 0
    return PERSISTENT, _first_difference(first, others[0])


def _first_difference(a: list[int], b: list[int]) -> int:
    return next(index for index, (left, right) in enumerate(zip(a, b, strict=True)) if left != right)
