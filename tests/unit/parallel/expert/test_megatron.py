"""One rank of this package's MoE layer computes the same outputs and gradients as megatron-core's MoE layer.

megatron-core runs on one rank, and with its experts over two.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from frontier_llm.blueprint.optimizers import ADAMW
from frontier_llm.blueprint.parameters import block_parameters
from frontier_llm.comm import serial_mesh
from frontier_llm.config import ModelConfig, OpsConfig
from frontier_llm.model.experts import MixtureOfExperts, Routed
from frontier_llm.model.layers import Mlp
from frontier_llm.ops import select_ops
from frontier_llm.optim import GradientSync, build_buckets
from frontier_llm.parallel.tensor import LayerContext, WeightGradients
from tests.harness.marks import exhaustive, thorough
from tests.unit.parallel.expert.megatron_layer import BALANCE, EXPERT_HIDDEN, EXPERTS, SHARED_HIDDEN, TOP_K, B, H, S, Z

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="pip install megatron-core")
ROOT = Path(__file__).resolve().parents[4]
OURS = {  # the keys of docs/moe.md with the meaning of megatron_layer.VARIANTS
    "softmax-after-top-k": {"balance": "microbatch"},
    "softmax-before-top-k": {"normalise": False},
    "sigmoid-with-bias": {"score": "sigmoid", "selection_bias": True, "scale": 2.5, "shared_hidden": SHARED_HIDDEN},
    "sigmoid-with-gated-shared": {"score": "sigmoid", "shared_hidden": SHARED_HIDDEN, "shared_gate": True},
}
CLOSE = 1e-6  # relative to the largest value; megatron-core computes softmax and sigmoid in fp32 for every dtype


def megatron(variant: str, ranks: int, folder: Path) -> list[dict]:
    """Return the results of each rank of megatron-core."""
    command = [sys.executable, "-m", "tests.unit.parallel.expert.megatron_layer", variant, str(folder)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks)], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        for rank in range(ranks)
    ]
    for process in started:
        errors = process.communicate(timeout=120)[1]
        assert process.returncode == 0, errors[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


def our_layer(
    variant: str, weights: dict[str, Tensor], x: Tensor, upstream: Tensor, microbatch: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output, and the gradients by name.

    megatron-core averages its auxiliary losses over a rank's microbatch of `microbatch` sequences.
    """
    moe = {
        "experts": EXPERTS,
        "top_k": TOP_K,
        "expert_hidden": EXPERT_HIDDEN,
        "z_weight": weight_of_z(variant),  # without a weight the z loss has no gradient
        **OURS[variant],
    }
    model = ModelConfig(
        layers=1, hidden=H, heads=4, ffn_hidden=40, vocab_size=16, vocab_multiple=16, sequence_length=S, moe=moe
    )
    mesh = serial_mesh()
    accumulation = WeightGradients()
    ops = select_ops(OpsConfig(), "cpu", torch.float64)
    context = LayerContext(mesh.tp, False, ops, accumulation, torch.float64)
    declared = {parameter.name: context.declare(parameter) for parameter in block_parameters(model, 0)}
    shared = Mlp(model, context, declared, "layers.0.moe.shared") if model.moe.shared_hidden else None
    layer = MixtureOfExperts(model, context, declared, "layers.0.moe", shared)
    buckets = build_buckets([layer], ADAMW, mesh.dp, 1, torch.device("cpu"), 10**6)
    named = {
        parameter.spec.parameter.name.removeprefix("layers.0.moe."): parameter
        for bucket in buckets
        for parameter in bucket.parameters
    }
    assert named.keys() == weights.keys()
    for name, parameter in named.items():
        with torch.no_grad():
            parameter.copy_(weights[name])
        if not parameter.layer_accumulates and parameter.requires_grad:
            accumulation.collect_from_autograd(parameter, ops)
    sync = GradientSync(buckets, mesh, microbatches=1)
    accumulation.on_accumulated = sync.accumulated
    sync.begin()
    y, routed = layer(x)
    ((y * upstream).sum() + auxiliary(variant, routed, microbatch)).backward()
    sync.finish()
    return y.detach(), {name: parameter.main_grad for name, parameter in named.items()}


def auxiliary(variant: str, routed: Routed, microbatch: int) -> Tensor:
    balance = 0.0 if variant == "sigmoid-with-bias" else BALANCE
    return balance * routed.balance / microbatch + weight_of_z(variant) * routed.z / (microbatch * S)


def weight_of_z(variant: str) -> float:
    return Z if variant == "softmax-before-top-k" else 0.0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variant", "ranks"),
    [
        ("softmax-before-top-k", 2),
        exhaustive("softmax-after-top-k", 1),
        exhaustive("sigmoid-with-bias", 2),
        thorough("sigmoid-with-gated-shared", 1),
    ],
)
def test_the_layer_computes_what_megatron_cores_computes(variant: str, ranks: int, tmp_path: Path) -> None:
    theirs = megatron(variant, ranks, tmp_path)
    x = theirs[0]["x"].requires_grad_()
    y, gradients = our_layer(variant, theirs[0]["weights"], x, theirs[0]["upstream"], B // ranks)
    pairs = {
        "output": (y, torch.cat([one["y"] for one in theirs], 1)),
        "gradient of the input": (x.grad, torch.cat([one["x_gradient"] for one in theirs], 1)),
    }
    assert gradients.keys() - {"router.bias"} == theirs[0]["gradients"].keys()
    for name, parts in ((name, [one["gradients"][name] for one in theirs]) for name in theirs[0]["gradients"]):
        # Each rank has the complete gradients of its own experts.
        whole = torch.cat(parts) if name.startswith("experts.") else sum(parts)
        pairs[name] = gradients[name], whole.reshape(gradients[name].shape)
    apart = {
        name: float((ours - expected).abs().max() / expected.abs().max()) for name, (ours, expected) in pairs.items()
    }
    assert max(apart.values()) < CLOSE, apart
