from __future__ import annotations

import pytest
import torch

from frontier_llm.blueprint.optimizers import ADAMW
from frontier_llm.comm import build_mesh
from frontier_llm.config import OpsConfig, OptimizerConfig
from frontier_llm.model import build_stages
from frontier_llm.ops import select_ops
from frontier_llm.optim import Zero, build_buckets
from frontier_llm.parallel.tensor import LayerContext, WeightGradients
from frontier_llm.topology.grid import Grid
from frontier_llm.topology.plan import split_layers
from frontier_llm.training.guard.replicas import ReplicaCheck, ReplicaDrift, checksum
from tests.harness.pool import RankPool
from tests.unit.checkpoint.simulated import TINY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_checksum_sees_every_single_bit(dtype: torch.dtype) -> None:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    values = torch.randn(1003).to(dtype)[1:]  # starts and ends off an eight-byte boundary
    before = checksum(values)
    for bit in range(8 * dtype.itemsize):
        flipped = values.clone()
        one = torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(integers)
        flipped.view(integers)[bit * 7] ^= one
        assert checksum(flipped) != before, bit


def test_checksum_sees_the_last_odd_elements() -> None:
    values = torch.randn(1003).to(torch.bfloat16)
    before = checksum(values)
    values[-1] += 1
    assert checksum(values) != before


def drift(rank: int, grid: Grid, zero: int, where: str) -> tuple[list[str], str]:
    """Flip one bit on rank 1 and return the results of this rank's check before and after."""
    mesh = build_mesh(grid, rank)
    ops = select_ops(OpsConfig(), "cpu", torch.bfloat16)
    context = LayerContext(mesh.tp, False, ops, WeightGradients(), torch.bfloat16)
    stages = build_stages(TINY, split_layers(TINY, 1), context, torch.device("cpu"))
    buckets = build_buckets(stages, ADAMW, mesh.dp, zero, torch.device("cpu"), 10_000_000)
    optimizer = Zero(buckets, OptimizerConfig(), ops)
    check = ReplicaCheck(optimizer, mesh)
    check.check(1, mesh.world)
    if rank == 1:
        number, offset, parameter = next(
            (number, offset, parameter)
            for number, bucket in enumerate(buckets)
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True)
            if parameter.spec.name == "layers.2.mlp_norm.weight"
        )
        values = parameter.data if where == "weights" else optimizer.states[number][where][offset:]
        values.view(torch.int16 if where == "weights" else torch.int32)[3] ^= 1
    try:
        check.check(2, mesh.world)
    except ReplicaDrift as error:
        return [str(problem) for problem in error.problems], ""
    return [], "silent"


@pytest.mark.parametrize(("grid", "zero", "where"), [
    (Grid(1, 1, 3), 1, "weights"),
    (Grid(3, 1, 1), 1, "weights"),
    (Grid(1, 1, 3), 0, "exp_avg_sq"),
    (Grid(2, 1, 1), 1, "master"),
])  # fmt: skip
def test_one_flipped_bit_is_found_with_rank_and_tensor(grid: Grid, zero: int, where: str, ranks: RankPool) -> None:
    if grid.tp == 3:
        grid = Grid(2, 1, 2)
    answers = ranks.run(grid.world_size, drift, grid, zero, where)
    for problems, silent in answers:
        assert not silent
        assert f"{where} of layers.2.mlp_norm.weight" in problems[0]
        if grid.world_size == 3:
            assert "rank 1 differs from the other dp ranks" in problems[0]
        else:
            assert "1]" in problems[0]
    assert len({str(problems) for problems, _ in answers}) == 1
