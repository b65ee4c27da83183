"""The error for wrong results. Every rank stops, failure.json names the ranks, and their hosts are excluded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from frontier_llm.errors import WRONG_RESULTS, FrontierError, Problem
from frontier_llm.run.failure import Suspect


class WrongResults(FrontierError):
    """Replicas that must be bit-equal differ. Every rank raises this error with the same content."""

    exit_code = 1
    cause = WRONG_RESULTS

    def __init__(self, problems: Iterable[Problem], suspects: Sequence[Suspect], all_hosts: Collection[str]) -> None:
        super().__init__(problems)
        self.suspects = tuple(suspects)
        self._all_hosts = frozenset(all_hosts)

    @property
    def hosts_to_exclude(self) -> list[str]:
        """Hosts of the ranks with wrong results, to be excluded from later jobs.

        Empty if these are more than half of the run's hosts, because the comparison then cannot tell which hosts are
        wrong.
        """
        named = sorted({suspect.host for suspect in self.suspects})
        if len(named) == 1 or 2 * len(named) <= len(self._all_hosts):
            return named
        return []
