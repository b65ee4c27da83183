"""Every GPU kernel that is built: its arguments, its variants, and the block sizes chosen for each architecture.

The build reads this to compile, the runtime to launch: neither tunes nor guesses. A variant is named by
(kernel, dtype, variant name); `T` among the argument types stands for the dtype. No torch and no Triton here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# target: (Triton's back-end, its name for the architecture, threads of a wave or warp, bytes of LDS or shared memory per block)
ARCHITECTURES: dict[str, tuple[str, str | int, int, int]] = {
    "gfx90a": ("hip", "gfx90a", 64, 65536),
    "gfx942": ("hip", "gfx942", 64, 65536),
    "sm_80": ("cuda", 80, 32, 166912),
    "sm_90": ("cuda", 90, 32, 232448),
}
DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Variant:
    """Compile-time constants of one variant and how many warps run a block."""

    constants: dict[str, int]
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class Kernel:
    """One Triton function: `arguments` are (name, type) in order, without the constants."""

    name: str
    module: str  # of frontier_llm.ops.triton
    arguments: tuple[tuple[str, str], ...]
    dtypes: tuple[str, ...] = DTYPES

    def signature(self, dtype: str) -> dict[str, str]:
        """Argument types with T put in."""
        return {name: kind.replace("T", dtype) for name, kind in self.arguments}


def _arguments(text: str) -> tuple[tuple[str, str], ...]:
    """'x:*T rows:i32' as pairs."""
    return tuple((name, kind) for name, kind in (item.split(":") for item in text.split()))


_ATTENTION_INPUTS = "q:*T k:*T v:*T slopes:*fp32 documents:*i32"
_QKV_STRIDES = "q_s:i32 q_b:i32 q_a:i32 k_s:i32 k_b:i32 k_g:i32 v_s:i32 v_b:i32 v_g:i32"
_HALVES = ("bf16", "fp16")

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "norm_forward",
            "norm",
            _arguments(
                "x:*T residual:*T weight:*T bias:*T out:*T total:*T mean:*fp32 scale:*fp32 columns:i32 eps:fp32 has_residual:i32 has_bias:i32"
            ),
        ),
        Kernel(
            "norm_backward",
            "norm",
            _arguments("grad:*T grad_total:*T total:*T weight:*T mean:*fp32 scale:*fp32 grad_x:*T columns:i32 has_grad_total:i32"),
        ),
        Kernel(
            "norm_weight_gradient",
            "norm",
            _arguments(
                "grad:*T total:*T mean:*fp32 scale:*fp32 partial_weight:*fp32 partial_bias:*fp32 rows:i32 columns:i32 rows_per_program:i32"
            ),
        ),
        Kernel(
            "rope",
            "pointwise",
            _arguments(
                "x:*T cos:*fp32 sin:*fp32 out:*T sign:fp32 batch:i32 heads:i32 head_dim:i32 half:i32 "
                "x_s:i32 x_b:i32 x_a:i32 angle_s:i32 angle_b:i32"
            ),
        ),
        Kernel("swiglu_forward", "pointwise", _arguments("x:*T out:*T columns:i32")),
        Kernel("swiglu_backward", "pointwise", _arguments("grad:*T x:*T grad_x:*T columns:i32")),
        Kernel("gelu_forward", "pointwise", _arguments("x:*T bias:*T out:*T columns:i32 has_bias:i32")),
        Kernel("gelu_backward", "pointwise", _arguments("grad:*T x:*T bias:*T grad_x:*T columns:i32 has_bias:i32")),
        Kernel("column_sums", "pointwise", _arguments("x:*T partial:*fp32 rows:i32 columns:i32 rows_per_program:i32")),
        Kernel(
            "cross_entropy_stats",
            "loss",
            _arguments("logits:*T targets:*i64 stats:*fp32 rows:i32 columns:i32 row_stride:i32 first_vocab:i32"),
        ),
        Kernel(
            "cross_entropy_backward",
            "loss",
            _arguments("logits:*T targets:*i64 logsumexp:*fp32 grad_loss:*fp32 columns:i32 row_stride:i32 first_vocab:i32"),
        ),
        Kernel(
            "adamw",
            "optimizer",
            _arguments(
                "master:*fp32 grad:*fp32 exp_avg:*fp32 exp_avg_sq:*fp32 weights:*T grad_scale:*fp32 count:i64 "
                "step_size:fp32 beta1:fp32 beta2:fp32 eps:fp32 keep:fp32 root:fp32 write_weights:i32"
            ),
        ),
        Kernel("squares", "optimizer", _arguments("x:*T partial:*fp64 count:i64 per_program:i32")),
        Kernel("accumulate", "optimizer", _arguments("main_grad:*fp32 grad:*T count:i64")),
        Kernel(
            "embedding_backward",
            "optimizer",
            _arguments("main_grad:*fp32 rows:*i64 order:*i64 grad:*T tokens:i32 columns:i32 vocab_rows:i32"),
        ),
        Kernel(
            "attention_forward",
            "attention",
            _arguments(
                f"{_ATTENTION_INPUTS} o:*T logsumexp:*fp32 scale:fp32 sequence:i32 heads:i32 group:i32 head_dim:i32 "
                f"{_QKV_STRIDES} o_s:i32 o_b:i32 o_a:i32"
            ),
            _HALVES,
        ),
        Kernel(
            "attention_delta",
            "attention",
            _arguments("o:*T grad_o:*T delta:*fp32 sequence:i32 heads:i32 head_dim:i32 o_s:i32 o_b:i32 o_a:i32 g_s:i32 g_b:i32 g_a:i32"),
            _HALVES,
        ),
        Kernel(
            "attention_grad_kv",
            "attention",
            _arguments(
                f"{_ATTENTION_INPUTS} grad_o:*T logsumexp:*fp32 delta:*fp32 grad_k:*T grad_v:*T scale:fp32 sequence:i32 heads:i32 group:i32 "
                f"head_dim:i32 {_QKV_STRIDES} g_s:i32 g_b:i32 g_a:i32 gk_s:i32 gk_b:i32 gk_g:i32"
            ),
            _HALVES,
        ),
        Kernel(
            "attention_grad_q",
            "attention",
            _arguments(
                f"{_ATTENTION_INPUTS} grad_o:*T logsumexp:*fp32 delta:*fp32 grad_q:*T scale:fp32 sequence:i32 heads:i32 group:i32 "
                f"head_dim:i32 {_QKV_STRIDES} g_s:i32 g_b:i32 g_a:i32 gq_s:i32 gq_b:i32 gq_a:i32"
            ),
            _HALVES,
        ),
    )
}

# Arguments that are always multiples of 16 (elements or bytes): the compiler may then use 16-byte accesses. ops/gpu.py keeps the promise.
ALIGNED = frozenset(
    {"head_dim", "q_s", "q_b", "q_a", "k_s", "k_b", "k_g", "v_s", "v_b", "v_g", "o_s", "o_b", "o_a", "g_s", "g_b", "g_a"}
    | {"gk_s", "gk_b", "gk_g", "gq_s", "gq_b", "gq_a"}
)
# kernels whose pointers may start anywhere: slices of flat buffers, shards of logits
UNALIGNED_KERNELS = frozenset({"adamw", "squares", "accumulate", "cross_entropy_stats", "cross_entropy_backward"})

# (BLOCK_M, BLOCK_N, warps, stages) of the attention kernels by padded head dim: blocks as large as the registers hold without a spill,
# found by compiling (tests/unit/ops/test_build.py holds them to it). AMD: 64 KiB of LDS, so one stage.
_ATTENTION_BLOCKS: dict[str, dict[str, dict[int, tuple[int, int, int, int]]]] = {
    "hip": {
        "attention_forward": {64: (128, 64, 4, 1), 128: (128, 64, 4, 1), 256: (64, 32, 4, 1)},
        "attention_grad_kv": {64: (32, 64, 4, 1), 128: (32, 64, 4, 1), 256: (32, 32, 4, 1)},
        "attention_grad_q": {64: (64, 64, 4, 1), 128: (64, 32, 4, 1), 256: (32, 32, 4, 1)},
        "attention_delta": {64: (64, 0, 4, 1), 128: (64, 0, 4, 1), 256: (32, 0, 4, 1)},
    },
    "cuda": {
        "attention_forward": {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
        "attention_grad_kv": {64: (64, 64, 4, 2), 128: (32, 64, 8, 2), 256: (32, 32, 8, 1)},
        "attention_grad_q": {64: (64, 64, 4, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 2)},
        "attention_delta": {64: (64, 0, 4, 1), 128: (64, 0, 4, 1), 256: (32, 0, 4, 1)},
    },
}
HEAD_DIMS = (64, 128, 256)


def variants(kernel: str, architecture: str) -> dict[str, Variant]:
    """Every variant of a kernel for an architecture, by name."""
    vendor = ARCHITECTURES[architecture][0]
    return dict(_variants(kernel, vendor))


def _variants(kernel: str, vendor: str) -> Iterator[tuple[str, Variant]]:
    if kernel in _ATTENTION_BLOCKS[vendor]:
        for head_dim in HEAD_DIMS:
            block_m, block_n, warps, stages = _ATTENTION_BLOCKS[vendor][kernel][head_dim]
            if kernel == "attention_delta":
                yield f"d{head_dim}", Variant({"BLOCK_M": block_m, "BLOCK_D": head_dim}, warps)
                continue
            for extras in (0, 1):
                constants = {"EXTRAS": extras, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": head_dim}
                yield f"d{head_dim}{'-extras' if extras else ''}", Variant(constants, warps, stages)
    elif kernel == "norm_weight_gradient":
        for name, centred in (("rmsnorm", 0), ("layernorm", 1)):
            yield name, Variant({"CENTRED": centred, "BLOCK": 256}, 2)
    elif kernel.startswith("norm_"):
        for name, centred in (("rmsnorm", 0), ("layernorm", 1)):
            for block in (1024, 4096):  # rows longer than the block take several turns
                yield f"{name}-{block}", Variant({"CENTRED": centred, "BLOCK": block}, 4 if block == 1024 else 8)
    elif kernel == "rope":
        for half in (32, 64, 128):
            yield f"r{half}", Variant({"BLOCK_HEADS": 512 // half, "BLOCK_HALF": half}, 4)
    elif kernel.startswith("gelu_"):
        for name, tanh in (("erf", 0), ("tanh", 1)):
            yield name, Variant({"TANH": tanh, "BLOCK": 1024}, 4)
    elif kernel == "column_sums":
        yield "any", Variant({"BLOCK": 256}, 2)
    else:
        block = {"cross_entropy_stats": 4096, "cross_entropy_backward": 4096}.get(kernel, 1024)
        yield "any", Variant({"BLOCK": block}, 8 if block == 4096 else 4)
