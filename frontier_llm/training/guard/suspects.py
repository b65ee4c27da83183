"""Ranks with wrong results. Every rank stops, failure.json names the suspects, and their hosts are excluded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from frontier_llm.errors import FrontierError, Problem
from frontier_llm.run.failure import Suspect


class WrongResults(FrontierError):
    """Replicas that must be bit-equal are not. Every rank raises it with the same content."""

    exit_code = 1

    def __init__(self, problems: Iterable[Problem], suspects: Sequence[Suspect], all_hosts: Collection[str]) -> None:
        super().__init__(problems)
        self.suspects = tuple(suspects)
        self._all_hosts = frozenset(all_hosts)

    @property
    def hosts_to_exclude(self) -> list[str]:
        """Hosts of the suspects, to be excluded.

        Empty if they are more than half of the run's hosts. The comparison then cannot tell the wrong hosts from the
        correct ones.
        """
        named = sorted({suspect.host for suspect in self.suspects})
        if len(named) == 1 or 2 * len(named) <= len(self._all_hosts):
            return named
        return []
