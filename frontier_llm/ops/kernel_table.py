"""Every GPU kernel that is built: its variants, and the block sizes chosen for each architecture. Its arguments are its
source's to say.

The build reads this to compile, the runtime to launch: neither tunes nor guesses. A variant is named by
(kernel, dtype, variant name); `T` among the argument types stands for the dtype. No torch and no Triton here.
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
    """A GPU that kernels are built for. A core is AMD's compute unit or NVIDIA's SM: 4 SIMDs with 512 registers a
    lane each.
    """

    backend: str  # "hip" or "cuda"
    target: str | int  # Triton's name
    wave: int  # threads of a wave or warp
    block_shared_bytes: int  # LDS or shared memory that one block may have
    core_shared_bytes: int
    block_overhead_bytes: int  # shared memory that the driver keeps for itself per block
    max_waves: int  # per SIMD
    options: tuple[tuple[str, int], ...] = ()  # for Triton's compiler

    def waves_per_simd(self, warps: int, registers: int, shared_bytes: int) -> float:
        """Waves of one kernel that a SIMD holds at a time: what registers, shared memory and the hardware's limit
        leave.
        """
        by_registers = min(self.max_waves, 512 // (-(-registers // 8) * 8)) * 4 // warps
        by_shared = self.core_shared_bytes // max(1, shared_bytes + self.block_overhead_bytes)
        return min(by_registers, by_shared) * warps / 4


# AMD CDNA2 and CDNA3 instruction set guides; CUDA C++ programming guide, table of compute capabilities
ARCHITECTURES: dict[str, Architecture] = {
    "gfx90a": Architecture("hip", "gfx90a", 64, 65536, 65536, 0, 8, options=(("kpack", 2),)),
    "gfx942": Architecture("hip", "gfx942", 64, 65536, 65536, 0, 8),
    "sm_80": Architecture("cuda", 80, 32, 166912, 167936, 1024, 16),
    "sm_90": Architecture("cuda", 90, 32, 232448, 233472, 1024, 16),
}
DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Variant:
    """Compile-time constants of one variant and how many warps run a block."""

    constants: dict[str, int]
    warps: int
    stages: int = 1
    matrix: int = 0  # rows and columns of AMD's matrix instruction; 0: the compiler's choice
    waves: int = 0  # per SIMD, for which AMD's compiler must leave registers; 0: its choice
    strategy: str = ""  # of LLVM's scheduler on AMD; "": its choice


@dataclass(frozen=True)
class Argument:
    """One argument of a Triton function, in whose signature it stands as Triton writes types: "*T:16", "i32" …

    `by16` (":16"): the aligned build assumes a multiple of 16 (bytes of an address, or the integer itself).
    """

    name: str
    kind: str  # "*T" points to the kernel's dtype, "*fp32" …, "i32", "i64", "fp32"
    by16: bool


@dataclass(frozen=True)
class Kernel:
    """One Triton function: its arguments in order, without the constants.

    Each variant is built once assuming its `by16` arguments (16-byte accesses: as fast as memory) and, except for
    attention, once without. The launcher looks at the arguments and takes the one that fits.
    """

    name: str
    module: str  # of frontier_llm.ops.triton
    arguments: tuple[Argument, ...]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What T stands for. Products on the matrix units are of 16-bit numbers, a router's of none."""
        if self.module == "routing":
            return ("fp32",)
        return ("bf16", "fp16") if self.module in ("attention", "grouped") else DTYPES

    @property
    def builds(self) -> tuple[bool, ...]:
        """The alignments it is built for. What attention cannot read in 16-byte accesses is copied first."""
        return (True,) if self.module == "attention" else (True, False)

    def signature(self, dtype: str) -> dict[str, str]:
        """Argument types with T put in."""
        return {argument.name: argument.kind.replace("T", dtype) for argument in self.arguments}


@cache
def all_kernels() -> dict[str, Kernel]:
    """Every kernel by name: the public functions of the sources, whose signatures are the one place where arguments
    have order and type.
    """
    kernels = {}
    for path in sorted((Path(__file__).parent / "triton").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                declared = [
                    (x.arg, str(x.annotation.value)) for x in node.args.args if isinstance(x.annotation, ast.Constant)
                ]
                arguments = tuple(
                    Argument(name, kind.removesuffix(":16"), kind.endswith(":16")) for name, kind in declared
                )
                kernels[node.name] = Kernel(node.name, path.stem, arguments)
    return kernels


class Blocks(NamedTuple):
    """How a variant of attention is cut: BLOCK_M queries and BLOCK_N keys at a time; AHEAD (triton/attention.py; not
    for grad_q); and see `Variant`.
    """

    m: int
    n: int
    warps: int
    stages: int = 1
    matrix: int = 0
    waves: int = 0
    ahead: int = 0
    strategy: str = ""


# By kernel and variant; where soft caps ("-softcap") have none, they take those of documents and ALiBi ("-extras"), and
# these the plain variant's.
# CDNA's are the best that `benchmarks/ops/tune_attention.py` found by simulation (docs/benchmarks/ops.md), NVIDIA's the
# largest that the registers hold. A block's outer side must give each warp rows of its own: 4 warps with 32 x 32 matrix
# instructions on 64 rows compute everything twice (tests/unit/ops/test_build.py).
_AttentionBlocks = dict[str, dict[str, Blocks]]
_DELTA = {"d64": Blocks(64, 0, 4), "d128": Blocks(64, 0, 4), "d256": Blocks(32, 0, 4)}
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
    "attention_delta": _DELTA,
}
# Triton's own two stages lay keys that are read across without a swizzle: eight lanes at a bank
# (docs/benchmarks/ops.md). Hence AHEAD
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
    "attention_delta": _DELTA,
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
    "attention_delta": _DELTA,
}
ATTENTION_BLOCKS = {"gfx90a": _CDNA2, "gfx942": _CDNA, "sm_80": _AMPERE, "sm_90": _HOPPER}
HEAD_DIMS = (64, 128, 256)
ATTENTION_KINDS = ("", "-extras", "-softcap")  # the last bounds scores and knows a window beside the extras
# of attention's per-row statistics and documents: a multiple of every block, which reads them whole and unmasked
ROWS_PER_PAD = 128
ROPE_BLOCKS = (32, 64, 128)  # most rotated pairs of a head of rope's and heads' variants
# most experts of route's variants, and of a token
ROUTE_BLOCKS = (64, 256, 1024)
MOST_CHOICES = 16
# longest rows of norm_forward's and norm_backward's variants; longer ones have the *_long kernels
NORM_BLOCKS = (2048, 8192)


def variants(kernel: str, architecture: str) -> dict[str, Variant]:
    """Every variant of a kernel for an architecture, by name."""
    return dict(_variants(kernel, ATTENTION_BLOCKS[architecture], ARCHITECTURES[architecture].wave))


def _variants(kernel: str, attention: _AttentionBlocks, wave: int) -> Iterator[tuple[str, Variant]]:
    if kernel in attention:
        for head_dim, kind in itertools.product(HEAD_DIMS, ("",) if kernel == "attention_delta" else ATTENTION_KINDS):
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
            if kernel == "attention_delta":
                constants = {"BLOCK_M": blocks.m, "BLOCK_D": head_dim}
            yield name, Variant(constants, blocks.warps, blocks.stages, blocks.matrix, blocks.waves, blocks.strategy)
    elif kernel in ("norm_forward", "norm_backward"):
        for block in NORM_BLOCKS:
            for name, centred in (("rmsnorm", 0), ("layernorm", 1)):
                yield (
                    f"{name}-{block}",
                    Variant({"CENTRED": centred, "BLOCK": block}, 4 if block == NORM_BLOCKS[0] else 512 // wave),
                )
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
    elif kernel.startswith("gelu_"):
        for name, tanh in (("erf", 0), ("tanh", 1)):
            yield name, Variant({"TANH": tanh, "BLOCK": 1024}, 4)
    else:
        block = {"cross_entropy_stats": 4096, "cross_entropy_backward": 4096}.get(kernel, 1024)
        yield "any", Variant({"BLOCK": block}, 8 if block == 4096 else 4)
