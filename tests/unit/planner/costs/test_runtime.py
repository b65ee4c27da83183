"""The predictions of `costs` equal the runtime: bytes in the ledger, parameters and optimizer state in memory (gloo,
CPU).
"""

from __future__ import annotations

import numpy as np
import pytest

from frontier_llm.blueprint.optimizers import _RULES, OptimizerRule
from frontier_llm.blueprint.parameters import ParameterKind, rank_parameters
from frontier_llm.config.load import build, load_model, merge
from frontier_llm.config.schema import RunConfig
from frontier_llm.data.loader import SampleBatch
from frontier_llm.topology.plan import make_plan
from frontier_llm.topology.traffic import buckets, step_traffic
from tests.harness.pool import RankPool


def config_of(model: str, parallel: dict, batch: dict, recompute: str = "none", dtype: str = "fp32") -> RunConfig:
    content = {
        "model": load_model(model).model_dump(),
        "parallel": parallel,
        "batch": batch,
        "train": {"recompute": recompute},
    }
    return build(RunConfig, merge(content, {"precision": {"dtype": dtype}}))


class RandomSource:
    """Random tokens. Their values do not change the traffic."""

    reset_at_documents = masks_targets = False

    def __init__(self, config: RunConfig, microbatches: int) -> None:
        self.config = config
        self.microbatches = microbatches

    def microbatch(self, step: int, index: int) -> SampleBatch:
        shape = (self.config.batch.micro_batch, self.config.model.sequence_length + 1)
        return SampleBatch(np.random.default_rng(index).integers(0, self.config.model.vocab_size, shape), None, None)


def measure(rank: int, config: RunConfig, world: int) -> tuple[dict, dict, int, int, int, int]:
    """Return bytes, calls, parameters, gradient bytes, optimizer bytes and pp rank of one rank's training step."""
    import torch

    from frontier_llm.comm.groups import build_mesh
    from frontier_llm.training.build import build_state
    from frontier_llm.training.step import train_step

    plan = make_plan(config, world)
    mesh = build_mesh(plan.grid, rank, plan.placement, config.model.tied_embeddings)
    state = build_state(config, plan, mesh, torch.device("cpu"), RandomSource(config, plan.microbatches))
    mesh.ledger.calls.clear()
    mesh.ledger.bytes.clear()
    train_step(state)
    parameters = sum(parameter.numel() for bucket in state.optimizer.buckets for parameter in bucket.parameters)
    gradients = sum(bucket.gradients.nbytes for bucket in state.optimizer.buckets)
    optimizer = sum(moment.nbytes for one in state.optimizer.states for moment in (one["exp_avg"], one["exp_avg_sq"]))
    place = plan.grid.coordinates(rank)
    return dict(mesh.ledger.bytes), dict(mesh.ledger.calls), parameters, gradients, optimizer, place["pp"]


LAYOUTS = [
    ("gpt-tiny", {"tensor": 2}, {"global_batch": 4, "micro_batch": 2}, "none"),
    ("gpt-tiny", {"tensor": 2, "pipeline": 2}, {"global_batch": 4, "micro_batch": 1}, "full"),
    (
        "gpt-tiny",
        {"tensor": 2, "pipeline": 2, "sequence_parallel": True},
        {"global_batch": 4, "micro_batch": 1},
        "full",
    ),
    ("llama-tiny", {"tensor": 2, "sequence_parallel": True}, {"global_batch": 4, "micro_batch": 1}, "selective"),
    (
        "llama-tiny",
        {"pipeline": 2, "chunks": 2, "schedule": "interleaved"},
        {"global_batch": 8, "micro_batch": 1},
        "none",
    ),
    ("gpt-tiny", {"pipeline": 2, "schedule": "zb-h1"}, {"global_batch": 4, "micro_batch": 1}, "none"),
    ("mpt-tiny", {"pipeline": 2, "zero": 0}, {"global_batch": 8, "micro_batch": 1}, "none"),
]
V = {"tensor": 2, "pipeline": 2, "chunks": 2, "sequence_parallel": True}  # all backwards are split, or some of them
LAYOUTS += [
    ("llama-tiny", {**V, "schedule": name}, {"global_batch": 5, "micro_batch": 1}, "none")
    for name in ("zb-v", "dualpipe-v")
]
SWITCHES = {
    "comm": {"overlap_weights": True, "overlap_messages": False, "bucket_elements": 50_000},
    "precision": {"gradient_wire": "bf16"},
}


def check(ranks: RankPool, config: RunConfig, world: int) -> list[dict]:
    """Run one training step on `world` ranks and return the bytes of each rank.

    Compares calls and bytes by axis and operation, parameters, gradient buffers and optimizer state.
    """
    plan = make_plan(config, world)
    found = ranks.run(world, measure, config, world)
    for moved, calls, parameters, gradients, optimizer, pp_rank in found:
        expected = step_traffic(config, plan, pp_rank)
        assert moved == dict(expected.bytes)
        assert calls == dict(expected.calls)
        assert parameters == sum(
            one.rank_numel({"tp": plan.grid.tp}) for one in rank_parameters(config.model, plan.stages_of(pp_rank))
        )
        padded = sum(bucket.numel for bucket in buckets(config, plan, pp_rank))
        assert gradients == 4 * padded
        assert optimizer == 8 * padded // (plan.grid.dp if plan.zero else 1)
    return [moved for moved, *_ in found]


@pytest.mark.parametrize(("model", "parallel", "batch", "recompute"), LAYOUTS)
@pytest.mark.parametrize("switched", [False, True], ids=["plain", "switched"])
def test_ledger_and_memory(
    ranks: RankPool,
    model: str,
    parallel: dict,
    batch: dict,
    recompute: str,
    switched: bool,
) -> None:
    """`switched` inverts all overlap settings and sends gradients in 16 bits.

    It also splits tensor parallelism's collectives into chunks.
    """
    config = config_of(model, parallel, batch, recompute)
    if switched:
        content = merge(config.model_dump(), SWITCHES)
        content["comm"]["tensor_chunks"] = 4 if parallel.get("tensor") else 1
        config = build(RunConfig, content)
    degrees = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    world = 4 if degrees == 2 else degrees
    dp = make_plan(config, world).grid.dp
    assert all((("dp", "all_to_all") in moved) == (switched and dp > 1) for moved in check(ranks, config, world))


RULE = OptimizerRule(
    "whole-matrices",
    lambda parameter: ("mean",) if parameter.decay else ("mean", "square"),
    whole=lambda parameter: parameter.kind is ParameterKind.MATRIX,
)


@pytest.mark.parametrize("zero", [0, 1])
def test_buckets_are_those_that_the_optimizer_fills(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Includes an optimizer that updates complete matrices and keeps different states for different parameters."""
    import torch

    from frontier_llm.comm.axis import Axis, single
    from frontier_llm.model.stage import build_stages
    from frontier_llm.ops import select_ops
    from frontier_llm.optim import build_buckets
    from frontier_llm.optim.engines import gradient_destination
    from frontier_llm.parallel.tensor import LayerContext

    monkeypatch.setitem(_RULES, RULE.name, RULE)
    config = config_of("llama-tiny", {"zero": zero}, {"global_batch": 4, "micro_batch": 1})
    config = build(
        RunConfig,
        merge(config.model_dump(), {"optimizer": {"name": RULE.name}, "comm": {"bucket_elements": 20_000}}),
    )
    plan = make_plan(config, 2)
    context = LayerContext(
        single("tp"),
        False,
        select_ops(config.ops, "cpu", torch.float32),
        gradient_destination(config),
        torch.float32,
        1,
    )
    stages = build_stages(config.model, plan.stages_of(0), context, torch.device("meta"), "none", {})
    filled = build_buckets(
        stages,
        RULE,
        Axis("dp", 0, 2, (0, 1)),
        zero,
        torch.device("cpu"),
        config.comm.bucket_elements,
    )
    assert [(one.gradients.numel(), one.partial_axes) for one in filled] == [
        (bucket.numel, bucket.members[0].partial_axes()) for bucket in buckets(config, plan, 0)
    ]
