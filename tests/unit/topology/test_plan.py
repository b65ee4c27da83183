"""make_plan derives the layout. plan_problems reports each violated rule with values that would be valid."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.config import BatchConfig, ModelConfig, ParallelConfig, RunConfig
from frontier_llm.errors import LayoutError, Problem
from frontier_llm.topology.grid import AXIS_ORDERS
from frontier_llm.topology.plan import make_plan, plan_problems

MODEL: dict[str, Any] = {
    "layers": 8,
    "hidden": 96,
    "heads": 12,
    "kv_heads": 4,
    "ffn_hidden": 256,
    "vocab_size": 1000,
    "sequence_length": 64,
}


def config(model: dict[str, Any] | None = None, batch: dict[str, Any] | None = None, **parallel: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(**{**MODEL, **(model or {})}),
        batch=BatchConfig(**{"global_batch": 16, **(batch or {})}),
        parallel=ParallelConfig(**parallel),
    )


def only(run: RunConfig, world_size: int, where: str) -> Problem:
    """Return the single problem of a config that violates one rule."""
    problems = plan_problems(run, world_size)
    assert [problem.where for problem in problems] == [where]
    with pytest.raises(LayoutError, match=where.replace(".", r"\.")):
        make_plan(run, world_size)
    return problems[0]


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 4),
    dp=st.sampled_from([1, 2, 4]),
    chunks=st.integers(1, 2),
    order=st.sampled_from(AXIS_ORDERS),
    micro_batch=st.sampled_from([1, 2, 4]),
)
def test_legal_layouts_have_plans(tp: int, pp: int, dp: int, chunks: int, order: str, micro_batch: int) -> None:
    chunks = chunks if pp > 1 else 1
    run = config(
        tensor=tp, pipeline=pp, chunks=chunks, schedule="interleaved", axis_order=order, sequence_parallel=True,
        batch={"global_batch": 16, "micro_batch": micro_batch},
    )  # fmt: skip
    plan = make_plan(run, tp * pp * dp)
    assert (plan.grid.tp, plan.grid.pp, plan.grid.dp, plan.grid.order) == (tp, pp, dp, order)
    assert plan.microbatches * micro_batch * dp == 16
    assert plan.sequence_parallel == (tp > 1)
    held = sorted(layer for stage in range(pp) for held in plan.stages_of(stage) for layer in held.layers)
    assert held == list(range(8))


def test_virtual_stages_alternate_between_ranks() -> None:
    plan = make_plan(config(pipeline=2, chunks=2, schedule="interleaved"), 2)
    assert [[list(held.layers) for held in plan.stages_of(rank)] for rank in range(2)] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]
    assert plan.stages_of(0)[0].embedding and plan.stages_of(1)[1].head


def test_description_names_what_matters() -> None:
    plan = make_plan(config(tensor=2, pipeline=2, chunks=2, schedule="interleaved", sequence_parallel=True), 8)
    assert plan.describe() == "TP2 x PP2 x 2 chunks x DP2, interleaved, 8 microbatches, sequence parallel"


def test_world_size_must_be_a_multiple_of_the_model_ranks() -> None:
    problem = only(config(tensor=2, pipeline=4), 12, "world size")
    assert "12 is not a multiple of tensor 2 x pipeline 4 = 8" in problem.what
    assert "8 or 16" in problem.fix


def test_a_given_data_degree_must_fit() -> None:
    problem = only(config(tensor=2, data=4), 4, "parallel.data")
    assert "start 8 ranks, set data=2" in problem.fix


def test_global_batch_must_divide() -> None:
    problem = only(config(batch={"global_batch": 10, "micro_batch": 2}), 4, "batch.global_batch")
    assert "micro_batch 2 x dp 4 = 8" in problem.what
    assert "8 or 16" in problem.fix


def test_axis_order_must_exist() -> None:
    problem = only(config(axis_order="pp-tp-dp"), 1, "parallel.axis_order")
    assert all(order in problem.fix for order in AXIS_ORDERS)


def test_tensor_parallelism_stays_inside_a_node() -> None:
    wide = {"heads": 16, "kv_heads": 16}
    problem = only(config(tensor=16, model=wide), 16, "parallel.tensor")
    assert problem.what == "16 tensor ranks span nodes: a node of machine local has 8 devices"
    assert (
        problem.fix
        == "set parallel.tensor=8 or less, or parallel.cross_node_tensor=true to allow tensor parallelism across nodes"
    )
    measured = config(tensor=16, model=wide, cross_node_tensor=True)
    assert make_plan(measured, 16).grid.tp == 16


def test_a_tensor_degree_that_does_not_divide_a_node_is_refused_on_several_nodes() -> None:
    """With 3 ranks per group, ranks 6 to 8 would be on two nodes of 8 devices. On a single node this cannot happen."""
    three = {"heads": 12, "kv_heads": 12, "ffn_hidden": 384, "vocab_multiple": 3}
    problem = only(config(tensor=3, model=three), 24, "parallel.tensor")
    assert "some groups of 3 tensor ranks span nodes: 3 does not divide the 8 devices of a node" in problem.what
    assert (
        problem.fix
        == "set parallel.tensor=2 or 4, or parallel.cross_node_tensor=true to allow tensor parallelism across nodes"
    )
    assert make_plan(config(tensor=3, model=three), 6).grid.tp == 3
    assert make_plan(config(tensor=3, model=three, cross_node_tensor=True), 24).grid.tp == 3


@pytest.mark.parametrize(
    ("where", "model", "tensor"),
    [
        ("model.kv_heads", {"heads": 12, "kv_heads": 6}, 4),
        ("model.ffn_hidden", {"ffn_hidden": 258}, 4),
        ("model.vocab_multiple", {"vocab_size": 997, "vocab_multiple": 1}, 4),
    ],
)
def test_tensor_degree_must_divide(where: str, model: dict[str, Any], tensor: int) -> None:
    problem = only(config(model, tensor=tensor), tensor, where)
    assert f"is not divisible by tensor {tensor}" in problem.what
    assert "set parallel.tensor to one of [1" in problem.fix


def test_heads_must_divide_too() -> None:
    problems = plan_problems(config({"heads": 6, "kv_heads": 6, "hidden": 96}, tensor=4), 4)
    assert {problem.where for problem in problems} == {"model.heads", "model.kv_heads"}
    assert all("one of [1, 2, 3]" not in problem.fix and "[1, 2]" in problem.fix for problem in problems)


def test_sequence_parallel_needs_a_divisible_sequence() -> None:
    run = config({"sequence_length": 66}, tensor=4, sequence_parallel=True)
    assert "the sequence (sequence_parallel), 66" in only(run, 4, "model.sequence_length").what
    assert plan_problems(config({"sequence_length": 66}, tensor=4), 4) == []


def test_every_tensor_rank_needs_a_real_vocabulary_row() -> None:
    problem = only(config({"vocab_size": 768, "vocab_multiple": 1024}, tensor=4), 4, "model.vocab_multiple")
    assert "gives the last of 4 tensor ranks only padding rows" in problem.what
    assert plan_problems(config({"vocab_size": 769, "vocab_multiple": 1024}, tensor=4), 4) == []
    both = plan_problems(config({"vocab_size": 600, "vocab_multiple": 1024, "ffn_hidden": 258}, tensor=4), 4)
    assert [problem.where for problem in both] == ["model.ffn_hidden", "model.vocab_multiple"]
    assert "set parallel.tensor to one of [1, 2]" in both[0].fix


EXPERTS = {"bias": False, "moe": {"experts": 4, "top_k": 2, "expert_hidden": 64}}


def test_tensor_ranks_split_the_shared_expert() -> None:
    moe = {**EXPERTS["moe"], "shared_hidden": 102}
    problem = only(config({**EXPERTS, "moe": moe}, tensor=4), 4, "model.moe.shared_hidden")
    assert "the shared expert's width, 102, is not divisible by tensor 4" in problem.what
    assert problem.fix == "set parallel.tensor to one of [1, 2]"


def test_tensor_ranks_route_equal_parts_of_a_context_ranks_sequence() -> None:
    """Otherwise each tp rank would route all positions, and the gradients of router and experts would be too large."""
    problem = only(config({**EXPERTS, "sequence_length": 24}, tensor=4, context=4), 16, "model.sequence_length")
    assert "24 / context 4 = 6 is not divisible by tensor 4" in problem.what
    assert plan_problems(config({**EXPERTS, "sequence_length": 32}, tensor=4, context=4), 16) == []


def test_suggested_tensor_degrees_are_legal() -> None:
    """Each value that the fix proposes must be legal."""
    problem = plan_problems(config(tensor=8), 8)[0]
    suggested = [int(word) for word in problem.fix.split("[")[1].rstrip("]").split(",")]
    assert suggested and all(plan_problems(config(tensor=degree), degree) == [] for degree in suggested)


def test_no_more_pieces_than_layers() -> None:
    problem = only(config(pipeline=3, chunks=3, schedule="interleaved"), 3, "parallel.pipeline")
    assert "3 stages x 3 chunks = 9 virtual stages, more than the 8 layers" in problem.what


def test_chunks_need_the_interleaved_schedule() -> None:
    problem = only(config(pipeline=2, chunks=2, schedule="1f1b"), 2, "parallel.chunks")
    assert "schedule=interleaved" in problem.fix


def test_chunks_need_stages() -> None:
    assert "chunks=1" in only(config(pipeline=1, chunks=2, schedule="interleaved"), 1, "parallel.chunks").fix


@pytest.mark.parametrize("counts", [(4, 5), (8,), (2, 3, 3)])
def test_given_stage_layers_must_fit(counts: tuple[int, ...]) -> None:
    problem = only(config(pipeline=2, stage_layers=counts), 2, "parallel.stage_layers")
    assert "give 2 entries with the sum 8" in problem.fix


def test_given_stage_layers_are_used() -> None:
    assert [stage.num_layers for stage in make_plan(config(pipeline=2, stage_layers=(5, 3)), 2).stages] == [5, 3]


def test_all_violations_are_reported_at_once() -> None:
    run = config(
        {"heads": 10, "kv_heads": 3, "norm_bias": True}, batch={"global_batch": 7, "micro_batch": 2},
        tensor=4, pipeline=3, chunks=4, schedule="1f1b", axis_order="pp-dp-tp",
    )  # fmt: skip
    with pytest.raises(LayoutError) as caught:
        make_plan(run, 12)
    places = {problem.where for problem in caught.value.problems}
    assert places >= {
        "parallel.axis_order",
        "batch.global_batch",
        "model.heads",
        "model.kv_heads",
        "model.norm_bias",
        "parallel.pipeline",
        "parallel.chunks",
    }
    assert all(problem.fix for problem in caught.value.problems)
    assert all(problem.where in str(caught.value) for problem in caught.value.problems)


def test_context_parallel_ranks_need_two_equal_chunks_each() -> None:
    problem = only(config(context=3), 3, "model.sequence_length")
    assert "2 x context 3" in problem.what and "60 or 66" in problem.fix
    plan = make_plan(config(context=4, tensor=2), 16)
    assert (plan.grid.cp, plan.grid.dp) == (4, 2) and plan.describe().startswith("TP2 x CP4 x PP1 x DP2")
    assert "context 4" in plan_problems(config(context=4, tensor=2), 12)[0].what
