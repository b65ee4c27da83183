"""What the hardware is: machine files with the source of every number, node affinity, and the environment that RCCL
wants.
"""

from frontier_llm.machine.load import OWN_STACK, load_machine, machine_names, own_stack, provenance, rates, stack_name
from frontier_llm.machine.precision import fp16_note
from frontier_llm.machine.rates import Rates
from frontier_llm.machine.schema import Machine, Number, Stack

__all__ = [
    "OWN_STACK",
    "Machine",
    "Number",
    "Rates",
    "Stack",
    "fp16_note",
    "load_machine",
    "machine_names",
    "own_stack",
    "provenance",
    "rates",
    "stack_name",
]
