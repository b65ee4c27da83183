"""Runs the Triton sources on the CPU in Triton's interpreter, with the same `Kernels` interface as the prebuilt code
objects.

Each address that a program reads or writes must lie in a tensor of its launch.
Other addresses fail here. On a GPU they would cause a fault or damage data without an error.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys

import numpy as np
import torch

# Triton reads this variable when it is imported, also for its own library (tl.sum …). torch may have imported Triton
# already.
os.environ["TRITON_INTERPRET"] = "1"
for name in [name for name in sys.modules if name.partition(".")[0] == "triton" and not name.startswith("triton._C")]:
    del sys.modules[name]

from triton.runtime import interpreter  # noqa: E402

from frontier_llm.ops.kernel_table import all_kernels, variants  # noqa: E402
from frontier_llm.ops.prebuilt import POINTED, address_or_number  # noqa: E402

# The interpreter copies GPU tensors to the host and back. These copies are disabled, because in the tests every CPU
# tensor would be copied onto itself.
interpreter.GridExecutor._init_args_hst = lambda self, arguments, named: (arguments, named)
interpreter.GridExecutor._restore_args_dev = lambda self, *arguments: None


def _operand(x):
    """Flush subnormal operands to zero, as MI200's matrix instructions do. Kernels must be correct on every GPU."""
    return interpreter.TensorHandle(
        np.where(abs(x.data) < np.finfo(x.data.dtype).tiny, 0, x.data).astype(x.data.dtype), x.dtype
    )


_exact_dot = interpreter.interpreter_builder.create_dot
interpreter.interpreter_builder.create_dot = lambda a, b, *rest: _exact_dot(_operand(a), _operand(b), *rest)

VIRTUAL_BYTES = 2**30  # larger tensors are reserved memory that is never touched


# Bytes between the virtual addresses of two tensors. No wrong offset is large enough to reach another tensor.
FAR = 1 << 44


class _Pointer:
    """The stand-in for the index-th tensor that a kernel receives."""

    def __init__(self, index, dtype):
        self.index = index
        self.dtype = dtype

    def data_ptr(self):
        return (self.index + 1) * FAR


class _Memory:
    """The interpreter's loads and stores. Loads from virtual tensors return zeros, and stores to them are dropped."""

    def __init__(self, kernel, named):
        self.kernel = kernel
        self.names = list(named)
        self.real = interpreter._interpreter
        self.starts = np.array([x.data_ptr() for x in named.values()], dtype=np.int64)
        self.sizes = np.array([_span_bytes(x) for x in named.values()], dtype=np.int64)

    def __getattr__(self, name):
        return getattr(self.real, name)

    def load(self, pointers, mask, other, dtype):
        addresses, there = self.find(pointers, mask, np.dtype(dtype).itemsize)
        return np.where(mask & ~there, np.zeros((), dtype), self.real.load(addresses, mask & there, other, dtype))

    def store(self, pointers, values, mask):
        addresses, there = self.find(pointers, mask, values.dtype.itemsize)
        self.real.store(addresses, values, mask & there)

    def find(self, pointers, mask, size):
        """Return real addresses and a mask of those backed by memory.

        Raises IndexError if an unmasked address lies outside its tensor.
        """
        index, offset = np.divmod(pointers.astype(np.int64) + FAR // 2, FAR)
        index = np.clip(index - 1, 0, len(self.names) - 1)
        offset = offset - FAR // 2
        stray = mask & ((offset < 0) | (offset + size > self.sizes[index]))
        if stray.any():
            name = self.names[index[stray][0]]
            first = offset[stray][0]
            raise IndexError(
                f"{self.kernel} accesses {size} bytes at byte {first} of {name} ({self.sizes[index[stray][0]]} bytes)"
            )
        return (self.starts[index] + offset).astype(np.uint64), self.sizes[index] < VIRTUAL_BYTES


def _span_bytes(x):
    """Return the bytes from the first to the last element of a view."""
    return (
        (sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1) * x.itemsize
        if x.numel()
        else 0
    )


class InterpretedKernels:
    """Checks its arguments as `PrebuiltKernels` does.

    With `corners_only` only the first and last programs along each axis of the grid run.
    """

    def __init__(self, architecture, corners_only=False):
        self.architecture = architecture
        self.corners_only = corners_only

    def block(self, kernel, variant, name):
        return variants(kernel, self.architecture)[variant].constants[name]

    def launch(self, kernel, dtype, variant, grid, /, **arguments):
        table = all_kernels()[kernel]
        signature = table.signature({torch.float16: "fp16", torch.float32: "fp32"}[dtype])
        assert arguments.keys() == signature.keys()
        values = {
            name: address_or_number(name, POINTED.get(kind), arguments[name], -1) for name, kind in signature.items()
        }
        if False not in table.builds:
            assert not [argument.name for argument in table.arguments if argument.by16 and values[argument.name] % 16]
        function = getattr(importlib.import_module(f"frontier_llm.ops.triton.{table.module}"), kernel)
        tensors = {
            name: torch.empty(0, dtype=POINTED[kind]) if arguments[name] is None else arguments[name]
            for name, kind in signature.items()
            if kind.startswith("*")
        }
        pointers = {name: _Pointer(index, x.dtype) for index, (name, x) in enumerate(tensors.items())}
        named = arguments | pointers | variants(kernel, self.architecture)[variant].constants
        real = interpreter._interpreter
        builder = interpreter.interpreter_builder
        set_dim = builder.set_grid_dim
        set_idx = builder.set_grid_idx
        interpreter._interpreter = _Memory(kernel, tensors)
        try:
            if not self.corners_only:
                function[grid](**named)
                return
            builder.set_grid_dim = lambda *_: set_dim(*grid)
            for corner in itertools.product(*({0, blocks - 1} for blocks in grid)):
                builder.set_grid_idx = lambda *_, corner=corner: set_idx(*corner)
                function[(1, 1, 1)](**named)
        finally:
            interpreter._interpreter = real
            builder.set_grid_dim = set_dim
            builder.set_grid_idx = set_idx
