"""Runs the Triton sources on the CPU by Triton's interpreter, behind the same `Kernels` face as the prebuilt code objects."""

from __future__ import annotations

import importlib
import os
import sys

# Triton reads this when it is imported, also for its own library (tl.sum …), and torch may have imported it already.
os.environ["TRITON_INTERPRET"] = "1"
for name in [name for name in sys.modules if name.partition(".")[0] == "triton" and not name.startswith("triton._C")]:
    del sys.modules[name]

from frontier_llm.ops.kernel_table import KERNELS, variants  # noqa: E402


class InterpretedKernels:
    def __init__(self, architecture: str) -> None:
        self.architecture = architecture

    def block(self, kernel, variant, name):
        return variants(kernel, self.architecture)[variant].constants[name]

    def launch(self, kernel, dtype, variant, grid, *arguments):
        table = KERNELS[kernel]
        assert len(arguments) == len(table.arguments), f"{kernel} takes {len(table.arguments)} arguments, got {len(arguments)}"
        function = getattr(importlib.import_module(f"frontier_llm.ops.triton.{table.module}"), kernel)
        filler = next(a for a, (_, kind) in zip(arguments, table.arguments, strict=True) if kind == "*T")
        named = {name: filler if a is None else a for a, (name, _) in zip(arguments, table.arguments, strict=True)}
        function[grid](**named, **variants(kernel, self.architecture)[variant].constants)
