"""Compares X-MoE's published rates (arXiv:2508.13337, table 3) with the planner's prediction for the layouts in its
authors' scripts.

The result is for docs/benchmarks/moe.md. The authors count FLOPs with two matrices per expert, attention without a
causal mask, and neither router nor recomputation. Their layouts have no pipeline and distribute experts over eight
nodes and more. No constant is fitted on these rows.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.harness import parse_arguments
from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import ModelConfig, load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.costs.time import step_s

TERA = 1e12
ROWS = (  # model, TFLOP/s per GCD as published, GCDs, tp, ep, sequences per microbatch, sequences per step, sharding
    ("xmoe-small", 44.0, 256, 1, 8, 4, 8192, "optimizer"),
    ("xmoe-medium", 24.2, 256, 1, 64, 1, 1024, "optimizer"),
    ("xmoe-large", 24.1, 256, 2, 64, 1, 1024, "optimizer"),
    ("xmoe-super", 10.2, 1024, 8, 256, 1, 1024, "gradients"),
)


def their_flops_per_token(model: ModelConfig) -> float:
    """Return the FLOPs per token as the authors count them: 6 [L (4 H² + 2 S H + 2 H F k) + V H]."""
    assert model.moe is not None
    L = model.layers
    H = model.hidden
    S = model.sequence_length
    F = model.expert_hidden
    V = model.vocab_size
    return 6.0 * (L * (4 * H * H + 2 * S * H + 2 * H * F * model.moe.top_k) + V * H)


def priced(name: str, stack: str, gcds: int, layout: Layout) -> float:
    """Return the predicted TFLOP/s per GCD, with the authors' count of FLOPs."""
    model = load_model(name)
    seconds = float(step_s(model, layout, rates(load_machine("frontier"), stack)))
    return their_flops_per_token(model) * model.sequence_length * layout.global_batch / seconds / gcds / TERA


def main() -> int:
    parse_arguments(
        argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter), smoke=[]
    )
    stacks = ("frontier-llm", "megatron-deepspeed")
    print(f"| model | layout | published | {' | '.join(stacks)} |\n|---|---|---:|{'---:|' * len(stacks)}")
    for name, published, gcds, tp, ep, micro_batch, sequences, sharding in ROWS:
        dp = gcds // tp
        layout = Layout(
            tp=tp,
            dp=dp,
            ep=ep,
            micro_batch=micro_batch,
            microbatches=sequences // dp // micro_batch,
            sequence_parallel=tp > 1,
            sharding=sharding,
            dtype="fp16",
        )
        cells = (
            f"{value:.1f} ({100 * (value / published - 1):+.0f} %)"
            for value in (priced(name, stack, gcds, layout) for stack in stacks)
        )
        print(
            f"| {name} | TP{tp} DP{dp} EP{ep}, microbatch {micro_batch} x {layout.microbatches} | {published} | "
            f"{' | '.join(cells)} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
