"""Table of all GPU kernels: their variants, and the block sizes for each architecture.

Argument names and types are parsed from the kernels' sources. The build compiles from this table, and the runtime
launches from it. Neither the build nor the runtime tunes block sizes. A variant is identified by (kernel, dtype,
variant name). `T` in an argument type stands for the dtype. This module imports neither torch nor Triton.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Architecture:
    """A GPU architecture for which kernels are built.

    A core is AMD's compute unit or NVIDIA's SM. It has 4 SIMDs with 512 registers per lane each.
    """

    backend: str  # "hip" or "cuda"
    target: str | int  # Triton's name of the architecture
    wave: int  # threads of a wave or warp
    block_shared_bytes: int  # LDS or shared memory that one block may have
    core_shared_bytes: int  # LDS or shared memory of a core
    block_overhead_bytes: int  # shared memory per block that the driver reserves
    max_waves: int  # largest number of waves per SIMD
    options: tuple[tuple[str, int], ...] = ()  # options of Triton's compiler

    def waves_per_simd(self, warps: int, registers: int, shared_bytes: int) -> float:
        """Return the number of waves of one kernel that fit on a SIMD.

        The limits are registers, shared memory, and the hardware's maximum.
        """
        by_registers = min(self.max_waves, 512 // (-(-registers // 8) * 8)) * 4 // warps
        by_shared = self.core_shared_bytes // max(1, shared_bytes + self.block_overhead_bytes)
        return min(by_registers, by_shared) * warps / 4


# Sources: AMD's CDNA2 and CDNA3 instruction set guides; CUDA C++ programming guide, table of compute capabilities.
ARCHITECTURES: dict[str, Architecture] = {
    "gfx90a": Architecture("hip", "gfx90a", 64, 65536, 65536, 0, 8, options=(("kpack", 2),)),
    "gfx942": Architecture("hip", "gfx942", 64, 65536, 65536, 0, 8),
    "sm_80": Architecture("cuda", 80, 32, 166912, 167936, 1024, 16),
    "sm_90": Architecture("cuda", 90, 32, 232448, 233472, 1024, 16),
}
DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Variant:
    """Compile-time constants of one variant, and the compiler's options for it."""

    constants: dict[str, int]
    warps: int  # number of warps or waves of a block
    stages: int = 1  # number of stages of Triton's software pipeline
    matrix: int = 0  # rows and columns of AMD's matrix instruction; 0: the compiler's choice
    waves: int = 0  # waves per SIMD for which AMD's compiler limits the registers; 0: the compiler's choice
    strategy: str = ""  # strategy of LLVM's scheduler on AMD; "": LLVM's default


@dataclass(frozen=True)
class Argument:
    """One argument of a Triton function. The function's signature has its type in Triton's notation: "*T:16", "i32" …

    `by16` (":16"): the aligned build assumes a multiple of 16 (bytes of an address, or the integer itself).
    """

    name: str
    kind: str  # "*T" points to the kernel's dtype, "*fp32" …, "i32", "i64", "fp32"
    by16: bool


@dataclass(frozen=True)
class Kernel:
    """One Triton function with its arguments in order, without the compile-time constants.

    Each variant has an aligned build, which assumes that its `by16` arguments are multiples of 16. It uses 16-byte
    accesses, which reach the memory's bandwidth. All kernels except attention also have a build without this
    assumption. The launcher selects a build by the values of the arguments.
    """

    name: str
    module: str  # name of a module in frontier_llm.ops.triton
    arguments: tuple[Argument, ...]

    @property
    def is_attention(self) -> bool:
        """True for the forward and the gradients of attention."""
        return self.module.startswith("attention_")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Types that T stands for. Kernels that use the matrix units have 16-bit inputs. Kernels without T use fp32."""
        if not any("T" in argument.kind for argument in self.arguments):
            return ("fp32",)
        return ("bf16", "fp16") if self.is_attention or self.module == "grouped" else DTYPES

    @property
    def builds(self) -> tuple[bool, ...]:
        """Values of `aligned` with a build. Tensors that attention cannot read in 16-byte accesses are copied first."""
        return (True,) if self.is_attention else (True, False)

    def signature(self, dtype: str) -> dict[str, str]:
        """Return the argument types with T replaced by `dtype`."""
        return {argument.name: argument.kind.replace("T", dtype) for argument in self.arguments}


@cache
def all_kernels() -> dict[str, Kernel]:
    """Return every kernel by name: the functions in ops/triton whose arguments have types.

    Their signatures are the only definition of the order and the types of the arguments.
    """
    kernels = {}
    for path in sorted((Path(__file__).parent / "triton").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                declared = [
                    (x.arg, str(x.annotation.value)) for x in node.args.args if isinstance(x.annotation, ast.Constant)
                ]
                arguments = tuple(
                    Argument(name, kind.removesuffix(":16"), kind.endswith(":16")) for name, kind in declared
                )
                if arguments:
                    kernels[node.name] = Kernel(node.name, path.stem, arguments)
    return kernels


class Blocks(NamedTuple):
    """Block sizes and compiler options of a variant of attention. Fields without a comment are as in `Variant`."""

    m: int  # BLOCK_M, number of queries
    n: int  # BLOCK_N, number of keys
    warps: int
    stages: int = 1
    matrix: int = 0
    waves: int = 0
    # Number of key blocks that are loaded early (AHEAD of triton/attention_scores.py); attention_grad_q has no such
    # option
    ahead: int = 0
    strategy: str = ""


# Block sizes by kernel and variant. A missing "-softcap" variant uses the sizes of "-extras" (documents and ALiBi). A
# missing "-extras" variant uses the sizes of the plain variant. CDNA's sizes are the best that
# `benchmarks/ops/tune_attention.py` found by simulation (docs/benchmarks/ops.md). NVIDIA's sizes are the largest that
# fit into the registers. Each warp must have its own rows of a block (queries, or keys in attention_grad_kv). For
# example, 4 warps with 32 x 32 matrix instructions on 64 rows compute everything twice (tests/unit/ops/test_build.py).
_AttentionBlocks = dict[str, dict[str, Blocks]]
_CDNA: _AttentionBlocks = {
    "attention_forward": {
        "d64": Blocks(128, 64, 4),
        "d64-extras": Blocks(128, 32, 4, matrix=16),
        "d128": Blocks(128, 32, 4, 2),
        "d128-extras": Blocks(128, 32, 4),
        "d256": Blocks(64, 32, 4, matrix=16),
    },
    "attention_grad_kv": {
        "d64": Blocks(32, 64, 4, 2, matrix=16),
        "d64-extras": Blocks(32, 128, 4, matrix=16),
        "d128": Blocks(16, 64, 4, 2),
        "d128-extras": Blocks(32, 64, 4, matrix=16),
        "d256": Blocks(32, 64, 4, matrix=16),
    },
    "attention_grad_q": {
        "d64": Blocks(128, 32, 4, 2),
        "d64-extras": Blocks(128, 32, 4, matrix=16),
        "d128": Blocks(128, 32, 4),
        "d128-extras": Blocks(64, 64, 4, matrix=16),
        "d256": Blocks(64, 16, 4, matrix=16),
    },
}
# With ahead=1 the kernel itself loads the next block of keys early, instead of Triton's pipelining (num_stages=2). With
# num_stages=2 Triton does not swizzle keys in shared memory. Keys are read transposed, so eight lanes would access the
# same bank (docs/benchmarks/ops.md).
_CDNA2_FORWARD = {
    "d64": Blocks(128, 32, 4, waves=3, ahead=1, strategy="max-ilp"),
    "d128": Blocks(128, 32, 4, waves=2, ahead=1, strategy="max-ilp"),
}
_CDNA2_GRAD_KV = {"d128": Blocks(32, 64, 4, matrix=16, waves=2, ahead=1)}
_CDNA2_GRAD_Q = {"d128-extras": Blocks(64, 32, 4, matrix=16, waves=2)}
_CDNA2 = {
    **_CDNA,
    "attention_forward": {**_CDNA["attention_forward"], **_CDNA2_FORWARD},
    "attention_grad_kv": {**_CDNA["attention_grad_kv"], **_CDNA2_GRAD_KV},
    "attention_grad_q": {**_CDNA["attention_grad_q"], **_CDNA2_GRAD_Q},
}
_AMPERE: _AttentionBlocks = {
    "attention_forward": {"d64": Blocks(128, 64, 8, 2), "d128": Blocks(128, 32, 8), "d256": Blocks(64, 32, 8, 2)},
    "attention_grad_kv": {"d64": Blocks(32, 128, 8, 2), "d128": Blocks(32, 64, 8, 2), "d256": Blocks(32, 32, 8)},
    "attention_grad_q": {"d64": Blocks(128, 64, 8, 2), "d128": Blocks(64, 32, 4, 2), "d256": Blocks(64, 32, 8, 2)},
}
_HOPPER: _AttentionBlocks = {
    "attention_forward": {"d64": Blocks(128, 64, 8, 3), "d128": Blocks(128, 64, 8, 3), "d256": Blocks(128, 32, 8, 2)},
    "attention_grad_kv": {
        "d64": Blocks(64, 128, 8, 3),
        "d64-extras": Blocks(32, 128, 8, 2),
        "d128": Blocks(16, 128, 8, 2),
        "d256": Blocks(32, 32, 8),
    },
    "attention_grad_q": {
        "d64": Blocks(128, 64, 8, 2),
        "d128": Blocks(128, 64, 8, 2),
        "d256": Blocks(64, 32, 8, 2),
        "d256-softcap": Blocks(64, 16, 8, 2),
    },
}
ATTENTION_BLOCKS = {"gfx90a": _CDNA2, "gfx942": _CDNA, "sm_80": _AMPERE, "sm_90": _HOPPER}
HEAD_DIMS = (64, 128, 256)
ATTENTION_KINDS = ("", "-extras", "-softcap")  # "-softcap" adds score capping and sliding windows to "-extras".
# The length of attention's per-row statistics and documents is padded to a multiple of this number. The number is a
# multiple of every block size, so blocks are read completely and without a mask.
ROWS_PER_PAD = 128
ROPE_BLOCKS = (32, 64, 128)  # highest number of rotated pairs of a head, by variant of rope and heads.
# Highest number of experts, by variant of the routing kernels
ROUTE_BLOCKS = (64, 256, 1024)
MOST_CHOICES = 16  # highest number of experts of a token.
# Longest row of each variant of norm_forward and norm_backward. Longer rows use the *_long kernels.
NORM_BLOCKS = (2048, 4096, 8192)


def variants(kernel: str, architecture: str) -> dict[str, Variant]:
    """Return every variant of a kernel for an architecture, by name."""
    return dict(_variants(kernel, ATTENTION_BLOCKS[architecture], ARCHITECTURES[architecture].wave))


def _variants(kernel: str, attention: _AttentionBlocks, wave: int) -> Iterator[tuple[str, Variant]]:
    if kernel in attention:
        for head_dim, kind in itertools.product(HEAD_DIMS, ATTENTION_KINDS):
            plain = f"d{head_dim}"
            extras = f"d{head_dim}-extras"
            name = f"d{head_dim}{kind}"
            blocks = (
                attention[kernel].get(name)
                or attention[kernel].get(extras if kind else plain)
                or attention[kernel][plain]
            )
            constants = {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "BLOCK_D": head_dim, "SOFT_BF16": int(wave == 64)}
            constants |= {"EXTRAS": int(kind != ""), "SOFTCAP": int(kind == "-softcap")}
            if kernel != "attention_grad_q":
                constants["AHEAD"] = blocks.ahead
            yield name, Variant(constants, blocks.warps, blocks.stages, blocks.matrix, blocks.waves, blocks.strategy)
    elif kernel in ("norm_forward", "norm_backward"):
        # These numbers of warps are the fastest on an H200 (docs/benchmarks/h200.md).
        warps_of_block = {2048: 256 // wave, 4096: 512 // wave, 8192: 8}
        for block in NORM_BLOCKS:
            for name, centred in (("rmsnorm", 0), ("layernorm", 1)):
                yield f"{name}-{block}", Variant({"CENTRED": centred, "BLOCK": block}, warps_of_block[block])
    elif kernel == "grouped_product":
        for name, along_depth in (("linear", 1), ("input-gradient", 0)):
            constants = {"ALONG_DEPTH": along_depth, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "BLOCK_E": 256}
            yield name, Variant(constants, 256 // wave, 2)
    elif kernel == "grouped_weight_gradient":
        yield "any", Variant({"BLOCK_M": 32, "BLOCK_N": 128, "BLOCK_K": 128}, 256 // wave, 2)
    elif kernel.startswith("norm_"):
        block, warps = (256, 2) if kernel == "norm_weight_gradient_long" else (4096, 8)
        for name, centred in (("rmsnorm", 0), ("layernorm", 1)):
            yield name, Variant({"CENTRED": centred, "BLOCK": block}, warps)
    elif kernel in ("rope", "heads"):
        for half in ROPE_BLOCKS:
            constants = {"BLOCK_HEADS": 512 // half, "BLOCK_HALF": half}
            ways = {"": {}} if kernel == "rope" else {"split-": {"JOIN": 0}, "join-": {"JOIN": 1}}
            for way, direction in ways.items():
                yield f"{way}r{half}", Variant(direction | constants, 4)
    elif kernel.startswith("route_"):
        for block in ROUTE_BLOCKS:
            choices = {"BLOCK_K": MOST_CHOICES} if kernel == "route_forward" else {}
            yield f"e{block}", Variant({"BLOCK_N": 1024 // block, "BLOCK_E": block} | choices, 4)
    elif kernel == "drop":
        # A lane has eight features, so with 2048 columns three quarters of a block of 1024 lanes are idle. One warp of
        # 256 lanes is fastest on an H200 (docs/benchmarks/h200.md). Waves of 64 keep 1024, which was not timed: with
        # one wave of 256 lanes, Triton sends the mask through shared memory.
        yield "any", Variant({"BLOCK": 256}, 1) if wave == 32 else Variant({"BLOCK": 1024}, 4)
    elif kernel == "accumulate_rows":
        # A program has few columns, so that a norm of 4,096 columns gives work to all compute units. If a wave has 64
        # threads, one wave computes the sum, without shared memory.
        yield "any", Variant({"BLOCK_ROWS": 64, "BLOCK": 32}, 64 // wave)
    elif kernel.startswith("gelu_"):
        for name, tanh in (("erf", 0), ("tanh", 1)):
            yield name, Variant({"TANH": tanh, "BLOCK": 1024}, 4)
    else:
        block = {"cross_entropy_stats": 4096, "cross_entropy_backward": 4096}.get(kernel, 1024)
        yield "any", Variant({"BLOCK": block}, 8 if block == 4096 else 4)
