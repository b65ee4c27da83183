"""RunConfig + world size → ParallelPlan: every rule of the layout checked in one place, before anything expensive starts."""

from __future__ import annotations

from dataclasses import dataclass

from frontier_llm.config import ModelConfig, RunConfig, model_problems
from frontier_llm.errors import LayoutError, Problem, divisors, nearest
from frontier_llm.topology.grid import AXIS_ORDERS, Grid
from frontier_llm.topology.stages import StageSpec, split_layers


@dataclass(frozen=True)
class ParallelPlan:
    """The layout of a run, derived once and passed to every room that needs it."""

    grid: Grid
    chunks: int
    schedule: str
    microbatches: int  # per data-parallel replica and step
    stages: tuple[StageSpec, ...]  # by virtual stage
    sequence_parallel: bool
    zero: int

    def stage_of(self, pp_rank: int, chunk: int) -> StageSpec:
        """What chunk `chunk` of pipeline rank `pp_rank` holds."""
        return self.stages[chunk * self.grid.pp + pp_rank]

    def describe(self) -> str:
        """'TP2 x PP2 x DP1, 1f1b, 4 microbatches' for logs."""
        extra = f" x {self.chunks} chunks" if self.chunks > 1 else ""
        sp = ", sequence parallel" if self.sequence_parallel else ""
        return f"TP{self.grid.tp} x PP{self.grid.pp}{extra} x DP{self.grid.dp}, {self.schedule}, {self.microbatches} microbatches{sp}"


def plan_problems(config: RunConfig, world_size: int) -> list[Problem]:
    """Every rule that this config violates on `world_size` ranks; empty when the layout is legal."""
    return [*model_problems(config.model), *_degree_problems(config, world_size), *_tensor_problems(config), *_pipeline_problems(config)]


def make_plan(config: RunConfig, world_size: int) -> ParallelPlan:
    """The layout of this config on `world_size` ranks.

    Raises LayoutError with every violated rule, its value and the nearest valid values.
    """
    problems = plan_problems(config, world_size)
    if problems:
        raise LayoutError(problems)
    parallel, batch = config.parallel, config.batch
    dp = world_size // (parallel.tensor * parallel.pipeline)
    return ParallelPlan(
        grid=Grid(parallel.tensor, parallel.pipeline, dp, parallel.axis_order),
        chunks=parallel.chunks,
        schedule=parallel.schedule,
        microbatches=batch.global_batch // (batch.micro_batch * dp),
        stages=split_layers(config.model, parallel.pipeline * parallel.chunks, parallel.stage_layers),
        # one tp rank holds the whole sequence either way, so the flag means nothing there
        sequence_parallel=parallel.sequence_parallel and parallel.tensor > 1,
        zero=parallel.zero,
    )


def _degree_problems(config: RunConfig, world_size: int) -> list[Problem]:
    parallel, batch = config.parallel, config.batch
    problems = []
    if parallel.axis_order not in AXIS_ORDERS:
        problems.append(
            Problem("parallel.axis_order", f"{parallel.axis_order!r} is not an order with tp innermost", f"use one of {list(AXIS_ORDERS)}")
        )
    model_ranks = parallel.tensor * parallel.pipeline
    if world_size % model_ranks:
        valid = nearest(world_size, range(model_ranks, 2 * world_size + model_ranks + 1, model_ranks))
        problems.append(
            Problem(
                "world size",
                f"{world_size} is not a multiple of tensor {parallel.tensor} x pipeline {parallel.pipeline} = {model_ranks}",
                f"start {' or '.join(map(str, valid))} ranks, or change the degrees",
            )
        )
        return problems
    dp = world_size // model_ranks
    if parallel.data is not None and parallel.data != dp:
        problems.append(
            Problem(
                "parallel.data",
                f"{parallel.data} x {model_ranks} model ranks is not the world size {world_size}",
                f"start {parallel.data * model_ranks} ranks, set data={dp} or leave it out",
            )
        )
    step = batch.micro_batch * dp
    if batch.global_batch % step:
        valid = nearest(batch.global_batch, range(step, 2 * batch.global_batch + step + 1, step))
        problems.append(
            Problem(
                "batch.global_batch",
                f"{batch.global_batch} is not a multiple of micro_batch {batch.micro_batch} x dp {dp} = {step}",
                f"use {' or '.join(map(str, valid))}",
            )
        )
    return problems


def _tensor_problems(config: RunConfig) -> list[Problem]:
    model, tp = config.model, config.parallel.tensor
    rules = [
        ("model.heads", "attention heads", model.heads),
        ("model.kv_heads", "key/value heads", model.num_kv_heads),
        ("model.ffn_hidden", "the MLP's width", model.ffn_hidden),
        ("model.vocab_multiple", "the padded vocabulary", model.padded_vocab_size),
    ]
    if config.parallel.sequence_parallel:
        rules.append(("model.sequence_length", "the sequence (sequence_parallel)", model.sequence_length))
    padding = model.padded_vocab_size - model.vocab_size
    if padding and padding >= model.padded_vocab_size // tp:
        fix = "lower model.vocab_multiple or parallel.tensor"
        what = f"padding the vocabulary to {model.padded_vocab_size} leaves the last of {tp} tensor ranks no real row"
        return [Problem("model.vocab_multiple", what, fix)]
    common = [degree for degree in divisors(tp_limit(model)) if all(size % degree == 0 for _, _, size in rules)]
    return [
        Problem(key, f"{what}, {size}, is not divisible by tensor {tp}", f"set parallel.tensor to one of {nearest(tp, common, 3)}")
        for key, what, size in rules
        if size % tp
    ]


def tp_limit(model: ModelConfig) -> int:
    """The largest tensor degree the attention allows: each rank needs a whole key/value head."""
    return model.num_kv_heads


def _pipeline_problems(config: RunConfig) -> list[Problem]:
    model, parallel = config.model, config.parallel
    virtual = parallel.pipeline * parallel.chunks
    problems = []
    if virtual > model.layers:
        problems.append(
            Problem(
                "parallel.pipeline",
                f"{parallel.pipeline} stages x {parallel.chunks} chunks = {virtual} pieces for {model.layers} layers",
                f"at most {model.layers} pieces; lower pipeline or chunks",
            )
        )
    if parallel.chunks > 1 and parallel.schedule != "interleaved":
        problems.append(
            Problem(
                "parallel.chunks",
                f"{parallel.chunks} chunks need the interleaved schedule, not {parallel.schedule}",
                "set parallel.schedule=interleaved or parallel.chunks=1",
            )
        )
    if parallel.chunks > 1 and parallel.pipeline == 1:
        problems.append(Problem("parallel.chunks", "chunks without pipeline stages only add work", "set parallel.chunks=1"))
    counts = parallel.stage_layers
    if counts is not None and (len(counts) != virtual or sum(counts) != model.layers):
        problems.append(
            Problem(
                "parallel.stage_layers",
                f"{list(counts)} has {len(counts)} entries summing to {sum(counts)}",
                f"give {virtual} entries that sum to {model.layers}, or leave it out",
            )
        )
    return problems
