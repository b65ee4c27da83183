"""A functional simulator of gfx90a (CDNA2, the MI250X): executes code objects on host memory, in numpy, and watches what hardware does not.

Facts from AMD's "Instinct MI200 Instruction Set Architecture" and LLVM's "User Guide for AMDGPU Backend".
"""

from frontier_llm.ops.cdna2.disassembly import Program, disassemble
from frontier_llm.ops.cdna2.fault import Fault
from frontier_llm.ops.cdna2.global_memory import Memory
from frontier_llm.ops.cdna2.simulator import Counts, run

__all__ = ["Counts", "Fault", "Memory", "Program", "disassemble", "run"]
