"""A functional simulator of gfx90a (CDNA2, the MI250X): executes code objects on host memory, in numpy, and watches
what hardware does not.

Facts from AMD's "Instinct MI200 Instruction Set Architecture" and LLVM's "User Guide for AMDGPU Backend".
"""

from tests.cdna2.disassembly import Program, disassemble
from tests.cdna2.fault import Fault
from tests.cdna2.global_memory import Memory
from tests.cdna2.simulator import Counts, run

__all__ = ["Counts", "Fault", "Memory", "Program", "disassemble", "run"]
