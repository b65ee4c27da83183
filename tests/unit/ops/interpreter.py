"""Runs the Triton sources on the CPU by Triton's interpreter, behind the same `Kernels` face as the prebuilt code objects."""

from __future__ import annotations

import importlib
import os
import sys

import torch

# Triton reads this when it is imported, also for its own library (tl.sum …), and torch may have imported it already.
os.environ["TRITON_INTERPRET"] = "1"
for name in [name for name in sys.modules if name.partition(".")[0] == "triton" and not name.startswith("triton._C")]:
    del sys.modules[name]

from frontier_llm.ops.kernel_table import KERNELS, variants  # noqa: E402
from frontier_llm.ops.prebuilt import address_or_number  # noqa: E402


class InterpretedKernels:
    """Checks its arguments as `PrebuiltKernels` does."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture

    def block(self, kernel, variant, name):
        return variants(kernel, self.architecture)[variant].constants[name]

    def launch(self, kernel, dtype, variant, grid, *arguments):
        table = KERNELS[kernel]
        signature = table.signature({torch.float16: "fp16", torch.float32: "fp32"}[dtype])
        values = [address_or_number(name, kind, a, -1) for (name, kind), a in zip(signature.items(), arguments, strict=True)]
        if table.aligned_only:
            assert not [a.name for a, value in zip(table.arguments, values, strict=True) if a.by16 and value % 16]
        function = getattr(importlib.import_module(f"frontier_llm.ops.triton.{table.module}"), kernel)
        filler = next(a for a in arguments if isinstance(a, torch.Tensor))
        named = {name: filler if a is None else a for name, a in zip(signature, arguments, strict=True)}
        function[grid](**named, **variants(kernel, self.architecture)[variant].constants)
