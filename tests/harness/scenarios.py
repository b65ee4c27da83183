"""Runs tests that mostly wait for Slurm's timers at the same time, each on its own local Slurm cluster.

`@scenario(nodes=3)` turns `def test_x(cluster, tmp_path)` into a test that waits for the result. When the first
selected scenario is requested, all selected scenarios start. A failure keeps its traceback and is reported for its own
test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.slurm import FLAT_NODE, ROOT, LocalSlurm, NodeShape, local_slurm

# All scenarios at once, because they sleep most of the time. Each has a controller, its node daemons and two or three
# ranks.
AT_ONCE = 9
Body = Callable[[LocalSlurm, Path], None]


@contextmanager
def training_cluster(nodes: int, shape: NodeShape = FLAT_NODE, settings: Sequence[str] = ()) -> Iterator[LocalSlurm]:
    """Start a local Slurm whose jobs run this checkout with this Python."""
    with local_slurm(nodes, shape, settings=settings) as cluster:
        cluster.env |= {
            "FRONTIER_LLM_PYTHON": sys.executable,
            "FRONTIER_LLM_SITE": "local",
            "FRONTIER_LLM_ROOT": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        yield cluster


class Scenarios:
    """The selected scenarios. All of them run at the same time, each in its own thread."""

    def __init__(self, items: list[pytest.Item], directory: Callable[[str], Path]) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._done: dict[str, Future[None]] = {}
        for item in reversed(items):  # the last tests start first, because they train and take longest
            if found := getattr(getattr(item, "function", None), "scenario", None):
                body, nodes = found
                self._done[item.name] = self._pool.submit(self._run, body, nodes, directory(item.name[:40]))

    @staticmethod
    def _run(body: Body, nodes: int, directory: Path) -> None:
        with training_cluster(nodes) as cluster:
            body(cluster, directory)

    def result(self, name: str) -> None:
        """Wait for one scenario and raise its exception."""
        self._done[name].result()

    def stop(self) -> None:
        """Start no further scenarios, and wait for the running scenarios."""
        self._pool.shutdown(cancel_futures=True)


def scenario(nodes: int) -> Callable[[Body], Callable[..., None]]:
    """Turn a function into a test that runs beside other tests, on its own cluster of `nodes` nodes. It may break the
    cluster.
    """

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
