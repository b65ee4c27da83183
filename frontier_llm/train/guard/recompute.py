"""Is the arithmetic right? Every so often all replicas compute one and the same step's gradients, twice, and compare the bits.

Two results of a rank that differ: an error that came and went, or an op that is not deterministic. Two equal ones that differ from those
of the other data-parallel ranks: that rank computes wrongly every time. Llama 3's 54 days on 16,384 GPUs saw six silent corruptions
(Dubey et al. 2024, table 5); a checksum of weights finds them only when replicas disagree on weights, which a summed gradient never makes them.

With tensor or pipeline parallelism a wrong value spreads within its replica, so all ranks that show it are named.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from frontier_llm.checkpoint.exchange import all_gather_json
from frontier_llm.comm import Mesh, all_gather
from frontier_llm.errors import FrontierError, Problem
from frontier_llm.train.guard.replicas import checksum

TRANSIENT, PERSISTENT = "transient", "persistent"


class WrongArithmetic(FrontierError):
    """A rank computes wrongly every time. Every rank raises it."""

    exit_code = 1


@dataclass(frozen=True)
class Finding:
    """A rank whose results cannot be trusted."""

    rank: int
    host: str
    kind: str

    def __str__(self) -> str:
        how = "two runs of one step differ" if self.kind == TRANSIENT else "its gradients differ from the other replicas', twice alike"
        return f"{self.kind} error on rank {self.rank} on {self.host}: {how}"


class Recompute:
    """Collective over the world; nothing of the run is changed but the contents of the gradient buffers."""

    def __init__(self, compute: Callable[[], Sequence[torch.Tensor]], mesh: Mesh) -> None:
        """`compute()` gives this rank's unsummed gradients of one step, the same step on every data-parallel rank."""
        self._compute, self._mesh = compute, mesh

    def findings(self) -> list[Finding]:
        """The same on every rank; empty when all is well."""
        mine = torch.cat([self._sums(), self._sums()])
        table = all_gather(mine, self._mesh.dp).view(self._mesh.dp.size, 2, -1).cpu().tolist()
        first, second = table[self._mesh.dp.rank]
        kind = TRANSIENT if first != second else PERSISTENT if _is_odd(first, [row for row, again in table if row == again]) else None
        answers = all_gather_json([socket.gethostname(), kind], self._mesh.world, mine.device)
        return [Finding(rank, host, kind) for rank, (host, kind) in enumerate(answers) if kind]

    def check(self, step: int) -> list[Finding]:
        """Findings that the run may go on with. Raises WrongArithmetic for persistent ones."""
        findings = self.findings()
        lasting = [finding for finding in findings if finding.kind == PERSISTENT]
        if lasting:
            fix = "exclude these hosts and start again from a checkpoint that was written before the error, if its step is known"
            raise WrongArithmetic(Problem(f"step {step}", str(finding), fix) for finding in lasting)
        return findings

    def _sums(self) -> torch.Tensor:
        return torch.stack([checksum(gradients) for gradients in self._compute()])


def _is_odd(own: list[int], stable: list[list[int]]) -> bool:
    """Whether `own` is not what most of the replicas with a stable result have; without a majority none can be trusted."""
    (common, count), *_ = Counter(map(tuple, stable)).most_common(1)
    return len(set(map(tuple, stable))) > 1 and (count <= len(stable) / 2 or tuple(own) != common)
