"""Fixtures: the code objects of gfx90a that tests of the GPU ops inspect and execute."""

from __future__ import annotations

import importlib.util

import pytest

from tests.cdna2.disassembly import find_objdump
from tests.cdna2.fault import SimulatorError
from tests.harness import code_objects
from tests.harness.system import missing


@pytest.fixture(scope="session")
def gfx90a():
    """Return the folder of gfx90a's code objects, as shipped."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("pip install --no-deps triton")
    return code_objects.folder()


@pytest.fixture(scope="session")
def objects(gfx90a):
    """Return the same folder. Skips the test if the machine cannot disassemble code objects."""
    try:
        find_objdump()
    except SimulatorError as error:
        missing(str(error))
    return gfx90a
