"""The shipped code objects, for tests that execute them."""

from __future__ import annotations

import pytest

from frontier_llm.errors import BackendError
from frontier_llm.ops.cdna2 import disassembly
from tests.harness.system import missing


@pytest.fixture(scope="session")
def objects(gfx90a):
    """The folder of gfx90a's code objects, on a machine that can disassemble them."""
    try:
        disassembly.find_objdump()
    except BackendError as error:
        missing(str(error))
    return gfx90a
