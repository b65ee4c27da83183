"""A functional simulator of gfx90a (CDNA2, the MI250X). It executes code objects on host memory with numpy.

It also reports faults that hardware hides. README.md describes the scope, the sources and the accuracy.
"""

from .disassembly import Program, disassemble
from .fault import Fault, SimulatorError
from .global_memory import Memory
from .launch import Kernel, launch, load
from .simulator import Counts, run

__all__ = ["Counts", "Fault", "Kernel", "Memory", "Program", "SimulatorError", "disassemble", "launch", "load", "run"]
