"""Tests that mostly wait for Slurm's clocks, side by side: each on a cluster of its own, several at once.

`@scenario(nodes=3)` turns `def test_x(cluster, tmp_path)` into a test that waits for the result. All scenarios that
were selected start with the first of them; a failure keeps its traceback and is reported as that test's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.slurm import FLAT_NODE, ROOT, LocalSlurm, NodeShape, local_slurm

AT_ONCE = 9  # all of them: they sleep most of the time; each has a controller, its node daemons and two or three ranks
Body = Callable[[LocalSlurm, Path], None]


@contextmanager
def training_cluster(nodes: int, shape: NodeShape = FLAT_NODE) -> Iterator[LocalSlurm]:
    """A local Slurm whose jobs run this checkout with this Python."""
    with local_slurm(nodes, shape) as cluster:
        cluster.env |= {
            "FRONTIER_LLM_PYTHON": sys.executable,
            "FRONTIER_LLM_SITE": "local",
            "FRONTIER_LLM_ROOT": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        yield cluster


class Scenarios:
    """The selected scenarios, running or done."""

    def __init__(self, items: list[pytest.Item], directory: Callable[[str], Path]) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._done: dict[str, Future[None]] = {}
        for item in reversed(items):  # those that train take longest, and come last
            if found := getattr(getattr(item, "function", None), "scenario", None):
                body, nodes = found
                self._done[item.name] = self._pool.submit(self._play, body, nodes, directory(item.name[:40]))

    @staticmethod
    def _play(body: Body, nodes: int, directory: Path) -> None:
        with training_cluster(nodes) as cluster:
            body(cluster, directory)

    def result(self, name: str) -> None:
        """Wait for one; raises what it raised."""
        self._done[name].result()

    def stop(self) -> None:
        """Start no more, wait for those that run."""
        self._pool.shutdown(cancel_futures=True)


def scenario(nodes: int) -> Callable[[Body], Callable[..., None]]:
    """Make a body a test that runs beside others, on a cluster of `nodes` nodes that it may wreck."""

    def decorate(body: Body) -> Callable[..., None]:
        @pytest.mark.timeout(900)
        def test(scenarios: Scenarios, request: pytest.FixtureRequest) -> None:
            scenarios.result(request.node.name)

        test.__name__ = body.__name__
        test.__doc__ = body.__doc__
        test.__module__ = body.__module__
        test.scenario = body, nodes  # type: ignore[attr-defined]
        return test

    return decorate
