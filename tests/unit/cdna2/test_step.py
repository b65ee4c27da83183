"""Trains complete steps on a simulated MI250X. All ops except torch's products execute the shipped machine code.

The same steps with the reference ops in bf16 show the error of bf16's roundings compared with float64. The error of the
machine code must not be larger.
"""

from __future__ import annotations

import dataclasses

import pytest

from frontier_llm.ops.kernel_table import all_kernels
from tests.cdna2.driver import SimulatedGpu
from tests.harness.marks import but_first, exhaustive, thorough
from tests.parity.cases import Case
from tests.unit.cdna2.steps import differences, executed, on_machine_code, together

# Widths are multiples of 16, as the aligned code requires, but not multiples of a block. The vocabulary size is odd.
# With initial weights of standard deviation 0.1, bf16's gradients have errors of 1 %. With smaller weights attention
# has hardly any effect. With larger weights the errors of bf16 grow (2 to 4 % at 0.2).
SHAPE = (
    "model.layers=2",
    "model.hidden=80",
    "model.heads=4",
    "model.ffn_hidden=96",
    "model.vocab_size=61",
    "model.sequence_length=40",
    "model.init_std=0.1",
    "optimizer.warmup_steps=0",
    "batch.global_batch=2",
)
CASES = {
    # RoPE, grouped heads, SwiGLU, RMSNorm
    "llama": Case("llama", settings=(*SHAPE, "model.kv_heads=2", "model.head_dim=32")),
    # ALiBi, GELU, LayerNorm
    "mpt": Case(
        "mpt", documents=True, settings=(*SHAPE, "model.head_dim=48", "model.bias=true", "model.norm_bias=true")
    ),
}
# Kernels of `all_kernels()` that no case launches: for long rows of more than 8192 columns, dropout, experts, queries
# normalised before rotation (rope), and other families. Experts are left out because a rounding can change the router's
# choice.
NOT_NEEDED = {
    name
    for name in all_kernels()
    if name.endswith("_long") or name.startswith(("grouped_", "route_")) or name in ("drop", "rope", "gather_rows")
}
OTHERS = {"llama": {"gelu_forward", "gelu_backward"}, "mpt": {"heads", "swiglu_forward", "swiglu_backward"}}
VARIANTS = {"llama": {"rmsnorm-2048", "split-r32", "join-r32", "d64"}, "mpt": {"layernorm-2048", "erf", "d64-extras"}}


@pytest.mark.parametrize("name", but_first(list(CASES), in_ci=1))
def test_three_steps_are_as_near_to_float64_as_the_reference_in_bf16(objects, name):
    rank = on_machine_code(0, CASES[name], 3, objects)
    lines = executed([rank], objects)
    assert {line["kernel"] for line in lines} == all_kernels().keys() - NOT_NEEDED - OTHERS[name]
    assert {line["variant"] for line in lines} >= VARIANTS[name]
    assert all(line["aligned"] for line in lines)
    assert differences(together([rank]), CASES[name]) == []


@pytest.mark.thorough
def test_two_ranks_of_tensor_parallelism(objects, ranks):
    """The vocabulary and the heads are sharded. Between the blocks, the sequence is sharded too. The result is compared
    with the same float64 run on one rank.
    """
    case = dataclasses.replace(CASES["llama"], tp=2, sequence_parallel=True)
    both = ranks.run(2, on_machine_code, case, 2, objects, timeout_s=600.0)
    assert all(line["aligned"] for line in executed(both, objects))
    assert differences(together(both), case) == []


class PlantedGpu(SimulatedGpu):
    """Loads one kernel without its instructions of one kind."""

    def __init__(self, kernel, without):
        super().__init__()
        self._kernel = kernel
        self._without = without

    def load(self, device, code, image):
        function = super().load(device, code, image)
        if code.symbol == self._kernel:
            kernel = self._kernels[function]
            left = [
                dataclasses.replace(instruction, mnemonic="s_nop", text="s_nop 0")
                if self._without in instruction.mnemonic
                else instruction
                for instruction in kernel.program.instructions
            ]
            assert tuple(left) != kernel.program.instructions
            program = dataclasses.replace(kernel.program, instructions=tuple(left))
            self._kernels[function] = dataclasses.replace(kernel, program=program)
        return function


@pytest.mark.parametrize(
    ("name", "kernel", "without", "seen"),
    [
        ("llama", "heads", "fma_f32", "losses"),
        thorough("llama", "attention_grad_q", "v_mfma", "gradients of layers.1.attention.qkv.weight"),
        exhaustive("llama", "adamw", "v_sqrt_f32", "weights of all"),
        thorough("mpt", "gelu_backward", "v_exp_f32", "gradients of layers.1.mlp.up.weight"),
        ("mpt", "norm_backward", "v_pk_add_f32", "gradients of final_norm.bias"),
    ],
)
def test_a_kernel_without_some_of_its_instructions_is_noticed(objects, name, kernel, without, seen):
    case = dataclasses.replace(CASES[name], settings=(*CASES[name].settings, "batch.global_batch=1"))
    wrong = on_machine_code(0, case, 1, objects, PlantedGpu(kernel, without))
    assert any(line.startswith(seen) for line in differences(together([wrong]), case))
