"""A program that runs one rank of expert parallelism with megatron-core's own MoE layer, on the CPU in float64.

It runs forward and backward and writes all results to a file.
megatron-core expects CUDA. tests/harness/megatron_on_cpu.py patches torch so that it runs without a GPU.
The program therefore runs in separate processes: `python -m tests.unit.parallel.expert.megatron_layer VARIANT FOLDER
RANK RANKS`.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.harness.megatron_on_cpu import experts_on_cpu, run_on_cpu

S = 12
B = 4
H = 32
EXPERTS = 8
TOP_K = 3
EXPERT_HIDDEN = 20
SHARED_HIDDEN = 28
# Weights of the auxiliary losses, large enough to change every gradient.
BALANCE = 0.3
Z = 0.1
VARIANTS = {
    "softmax-after-top-k": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": BALANCE},
    "softmax-before-top-k": {
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": BALANCE,
        "moe_z_loss_coeff": Z,
    },
    "sigmoid-with-bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "none",
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": SHARED_HIDDEN,
    },
    "sigmoid-with-gated-shared": {
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": BALANCE,
        "moe_shared_expert_intermediate_size": SHARED_HIDDEN,
        "moe_shared_expert_gate": True,
    },
}


def whole_weights(generator: torch.Generator) -> dict[str, Tensor]:
    """Return all weights that a variant may have, with this package's names and shapes."""
    shapes = {
        "router.weight": (EXPERTS, H), "router.bias": (EXPERTS,), "experts.up.weight": (EXPERTS, 2, EXPERT_HIDDEN, H),
        "experts.down.weight": (EXPERTS, H, EXPERT_HIDDEN), "shared.up.weight": (2, SHARED_HIDDEN, H),
        "shared.down.weight": (H, SHARED_HIDDEN), "shared_gate.weight": (1, H),
    }  # fmt: skip
    return {name: 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def counterparts(
    layer: torch.nn.Module, weights: dict[str, Tensor], rank: int
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return pairs of megatron-core's tensor and the matching values of this package, by this package's name."""
    experts = layer.experts.local_experts
    own = slice(rank * len(experts), (rank + 1) * len(experts))
    up = weights["experts.up.weight"].flatten(1, 2)[own]
    down = weights["experts.down.weight"][own]
    pairs = {
        "router.weight": [(layer.router.weight, weights["router.weight"])],
        "experts.up.weight": [(one.linear_fc1.weight, part) for one, part in zip(experts, up, strict=True)],
        "experts.down.weight": [(one.linear_fc2.weight, part) for one, part in zip(experts, down, strict=True)],
    }
    if layer.shared_experts is not None:
        pairs["shared.up.weight"] = [
            (layer.shared_experts.linear_fc1.weight, weights["shared.up.weight"].flatten(0, 1))
        ]
        pairs["shared.down.weight"] = [(layer.shared_experts.linear_fc2.weight, weights["shared.down.weight"])]
        if layer.shared_experts.gate_weight is not None:
            pairs["shared_gate.weight"] = [(layer.shared_experts.gate_weight, weights["shared_gate.weight"])]
    if layer.router.expert_bias is not None:
        pairs["router.bias"] = [(layer.router.expert_bias, weights["router.bias"])]
    return pairs


def main(variant: str, folder: Path, rank: int, ranks: int) -> None:
    run_on_cpu()
    experts_on_cpu()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=4,
        ffn_hidden_size=40,
        gated_linear_unit=True,
        add_bias_linear=False,
        activation_func=torch.nn.functional.silu,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=EXPERT_HIDDEN,
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp64",
        expert_model_parallel_size=ranks,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        **VARIANTS[variant],
    )
    layer = build_module(get_moe_module_spec(use_te=False, num_experts=EXPERTS), config=config)
    layer.set_layer_number(1)
    generator = torch.Generator().manual_seed(1)
    weights = whole_weights(generator)
    x_SBH, upstream_SBH = (torch.randn(S, B, H, generator=generator, dtype=torch.float64) for _ in range(2))
    pairs = counterparts(layer, weights, rank)
    with torch.no_grad():
        for theirs, ours in (pair for each in pairs.values() for pair in each):
            theirs.copy_(ours)
    own = slice(rank * B // ranks, (rank + 1) * B // ranks)
    x = x_SBH[:, own].clone().requires_grad_()
    y, _ = layer(x)
    y.backward(upstream_SBH[:, own])
    gradients = {
        name: torch.stack([theirs.grad for theirs, _ in each])
        for name, each in pairs.items()
        if each[0][0].grad is not None
    }
    torch.save(
        {
            "weights": {name: weights[name] for name in pairs},
            "x": x_SBH,
            "upstream": upstream_SBH,
            "y": y.detach(),
            "x_gradient": x.grad,
            "gradients": gradients,
        },
        folder / f"rank{rank}.pt",
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
