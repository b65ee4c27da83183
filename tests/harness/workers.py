"""Distribution of the tests over several workers of pytest-xdist. `tests/conftest.py` imports the hooks."""

from __future__ import annotations

from typing import Any

import pytest

# The files and folders that take longest, in the order in which workers begin them. Without this order, one worker
# would run the last of them for minutes after the others have ended. tests/slurm is first, because its tests mostly
# wait.
LONGEST = (
    "tests/slurm/",
    "tests/docs/test_commands.py",
    "tests/unit/certificate/axis_types/test_check.py",
    "tests/unit/scripts/test_first_gpu.py",
    "benchmarks/tests/test_smoke.py",
    "tests/unit/cluster/test_submit.py",
    "tests/unit/inference/test_commands.py",
    "tests/unit/ops/test_build.py",
)
# The fixture with the code objects of gfx90a, which take minutes of CPU time to compile.
COMPILED = "gfx90a"
# the tests of this file share no fixture, so each test may run on another worker
INDEPENDENT = "benchmarks/tests/test_smoke.py"


def scope(nodeid: str) -> str:
    """Return the name of the group of tests that runs on one worker.

    A group is a file, because its tests share fixtures. The folder tests/slurm is one group, because its clusters start
    once. Each test of `INDEPENDENT` is a group.
    """
    if nodeid.startswith("tests/slurm/"):
        return "tests/slurm"
    file = nodeid.partition("::")[0]
    return nodeid if file == INDEPENDENT else file


def begin_order(nodeid: str) -> int:
    """Return the index of a test's file in `LONGEST`. Tests of other files follow with one common value."""
    indices = (index for index, start in enumerate(LONGEST) if nodeid.startswith(start))
    return next(indices, len(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that assigns the groups of `scope` to workers, in the order of the collected tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False
    return ByScope(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need compiled kernels as thorough, and sort the tests of several workers by `begin_order`."""
    for item in items:
        if COMPILED in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.thorough)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: begin_order(item.nodeid))
