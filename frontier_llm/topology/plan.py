"""Derives the parallel layout of a run (`ParallelPlan`) from its configuration and world size, and checks its rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from frontier_llm import schedule
from frontier_llm.blueprint.items import Software
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.parameters import StageSpec
from frontier_llm.blueprint.work import block_work, flops, head_work
from frontier_llm.config import ModelConfig, RunConfig, model_problems, optimizer_problems, phases_of
from frontier_llm.errors import LayoutError, Problem, divisors, nearest
from frontier_llm.machine.load import load_machine
from frontier_llm.schedule import Placement, Schedule
from frontier_llm.topology.engine_rules import engine_problems
from frontier_llm.topology.expert_rules import expert_problems
from frontier_llm.topology.grid import AXIS_ORDERS, Grid, tensor_groups_stay_in_nodes
from frontier_llm.topology.streams import queue_problem
from frontier_llm.units import plural


def head_cost_in_layers(model: ModelConfig) -> float:
    """Return forward FLOPs of the output head / forward FLOPs of one layer, with causal attention."""
    layout = Layout()
    software = Software()
    layer = flops(block_work(model, layout, software), causal=True, forward_only=True)
    return flops(head_work(model, layout, software), forward_only=True) / layer


def balanced(model: ModelConfig, virtual_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage. The numbers minimise the work of the busiest stage, output
    head included.

    If the layers cannot be divided evenly, the first stages get one more layer each. Then layers move from the head's
    stage to others as long as this reduces the work of the busiest stage. In large models the split remains even: the
    head costs V/12H layers (V vocabulary, H hidden size), which are 0.17 layers for the 1T model and 0.69 for 22B. A
    small model with a large vocabulary (8 layers, H 384, V 8192) gets 5 + 3 layers on two stages, because its head
    costs as much as 1.7 layers.
    """
    base, remainder = divmod(model.layers, virtual_stages)
    counts = [base + (stage < remainder) for stage in range(virtual_stages)]
    head = head_cost_in_layers(model)
    while virtual_stages > 1 and counts[-1] > 1:
        lightest = min(range(virtual_stages - 1), key=lambda stage: counts[stage])
        if counts[lightest] + 1 >= counts[-1] + head:
            break
        counts[lightest] += 1
        counts[-1] -= 1
    return tuple(counts)


def split_layers(
    model: ModelConfig,
    virtual_stages: int,
    counts: tuple[int, ...] | None = None,
) -> tuple[StageSpec, ...]:
    """Return one StageSpec per virtual stage in model order. `counts` overrides the balanced split."""
    counts = counts or balanced(model, virtual_stages)
    last = virtual_stages - 1
    first_layers = [sum(counts[:index]) for index in range(virtual_stages)]
    return tuple(
        StageSpec(first, count, embedding=index == 0, head=index == last)
        for index, (first, count) in enumerate(zip(first_layers, counts, strict=True))
    )


@dataclass(frozen=True)
class ParallelPlan:
    """The layout of a run. It is derived once and passed to every module that needs it."""

    grid: Grid
    placement: Placement  # which pipeline rank holds which virtual stage
    schedule: str
    microbatches: int  # microbatches per data-parallel replica and step
    stages: tuple[StageSpec, ...]  # stages by position in the model
    sequence_parallel: bool
    zero: int

    @property
    def chunks(self) -> int:
        """Number of virtual stages per pipeline rank."""
        return self.placement.chunks

    def stages_of(self, pp_rank: int) -> tuple[StageSpec, ...]:
        """Return the virtual stages that a pipeline rank holds, in the order of the model."""
        return tuple(self.stages[position] for position in self.placement.positions_of(pp_rank))

    def describe(self) -> str:
        """Return for example 'TP2 x PP2 x DP1, 1f1b, 4 microbatches', for logs."""
        degrees = self.grid.describe(self.chunks)
        if self.grid.ep > 1 or self.grid.etp > 1:
            split = f"ETP{self.grid.etp} x " if self.grid.etp > 1 else ""
            degrees += f", experts {split}EP{self.grid.ep} x EDP{self.grid.edp}"
        sequence = ", sequence parallel" if self.sequence_parallel else ""
        return f"{degrees}, {self.schedule}, {plural(self.microbatches, 'microbatch')}{sequence}"


def pipeline_schedule(config: RunConfig, plan: ParallelPlan) -> Schedule:
    """Return the schedule that the pipeline engine executes for this layout."""
    return schedule.build(
        plan.schedule,
        plan.grid.pp,
        plan.microbatches,
        plan.chunks,
        pairs=config.comm.overlap_experts and plan.grid.ep > 1,
    )


def plan_problems(config: RunConfig, world_size: int) -> list[Problem]:
    """Return a Problem for every rule that this config violates on `world_size` ranks, in any of its phases.

    The list is empty if the layout is legal.
    """
    problems = layout_problems(config, world_size)
    if not problems and not config.train.phases:  # streams can be counted only for a legal layout
        plan = plan_as_given(config, world_size)
        problem = queue_problem(config, plan.grid, plan.placement)
        problems += [problem] if problem else []
    return problems


def layout_problems(config: RunConfig, world_size: int) -> list[Problem]:
    """Return the problems of `plan_problems`. For a run without phases, hardware queues are not checked."""
    if config.train.phases:
        return _phase_problems(config, world_size)
    return [
        *model_problems(config.model),
        *optimizer_problems(config.optimizer),
        *_degree_problems(config, world_size),
        *_node_problems(config, world_size),
        *_tensor_problems(config),
        *_context_problems(config),
        *_tensor_chunk_problems(config),
        *expert_problems(config, world_size),
        *_pipeline_problems(config),
        *engine_problems(config, world_size),
    ]


def make_plan(config: RunConfig, world_size: int) -> ParallelPlan:
    """Return the layout of this config on `world_size` ranks.

    A run with phases has the layout of its first phase. The other phases differ in the number of microbatches. Raises
    LayoutError with every violated rule, its value and the nearest valid values.
    """
    problems = plan_problems(config, world_size)
    if problems:
        raise LayoutError(problems)
    return plan_as_given(phases_of(config)[0].config, world_size)


def plan_as_given(config: RunConfig, world_size: int) -> ParallelPlan:
    """Return the layout without checking its rules, for a run that has already been executed."""
    parallel = config.parallel
    batch = config.batch
    dp = world_size // parallel.model_ranks
    return ParallelPlan(
        grid=Grid(
            tp=parallel.tensor,
            pp=parallel.pipeline,
            dp=dp,
            order=parallel.axis_order,
            cp=parallel.context,
            ep=parallel.expert,
            etp=parallel.expert_tensor,
        ),
        placement=schedule.rule(parallel.schedule).placement(parallel.pipeline, parallel.chunks),
        schedule=parallel.schedule,
        microbatches=batch.global_batch // (batch.micro_batch * dp),
        stages=split_layers(config.model, parallel.pipeline * parallel.chunks, parallel.stage_layers),
        # a single tp rank holds the complete sequence either way, so the flag has no effect
        sequence_parallel=parallel.sequence_parallel and parallel.tensor > 1,
        zero=parallel.zero,
    )


def _phase_problems(config: RunConfig, world_size: int) -> list[Problem]:
    """Return the problems of all phases, each once, and a Problem if the engine or the data mode does not support
    phases.
    """
    problems: dict[Problem, int] = {}
    phases = phases_of(config)
    for phase in phases:
        for problem in plan_problems(phase.config, world_size):
            problems.setdefault(problem, phase.number)
    learned = config.model.position == "learned"
    lengths = {phase.config.model.sequence_length for phase in phases}
    if learned and len(lengths | {config.model.sequence_length}) > 1:
        what = "cannot differ between phases: learned positions have one vector for each position"
        problems[
            Problem(
                where="model.sequence_length",
                what=what,
                fix="use the same length in all phases, or model.position=rope or alibi",
            )
        ] = len(phases)
    prefixes = {number: f"train.phases.{number - 1}." if number > 1 else "" for number in problems.values()}
    named = [replace(problem, where=prefixes[number] + problem.where) for problem, number in problems.items()]
    if config.optimizer.engine == "deepspeed" or config.parallel.data_mode == "fsdp":
        what = "have been tested only with the native engine"
        named.append(
            Problem(where="train.phases", what=what, fix="use optimizer.engine=native and parallel.data_mode=zero")
        )
    return named


def _degree_problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    batch = config.batch
    if parallel.axis_order not in AXIS_ORDERS:
        what = f"{parallel.axis_order!r} is not an order with tp innermost"
        yield Problem(where="parallel.axis_order", what=what, fix=f"use one of {list(AXIS_ORDERS)}")
    model_ranks = parallel.model_ranks
    if world_size % model_ranks:
        context = f"context {parallel.context} x " if parallel.context > 1 else ""
        what = (
            f"{world_size} is not a multiple of tensor {parallel.tensor} x {context}pipeline {parallel.pipeline} "
            f"= {model_ranks}"
        )
        valid = nearest(world_size, range(model_ranks, 2 * world_size + model_ranks + 1, model_ranks))
        yield Problem(
            where="world size",
            what=what,
            fix=f"start {' or '.join(map(str, valid))} ranks, or change the degrees",
        )
        return
    dp = world_size // model_ranks
    if parallel.data is not None and parallel.data != dp:
        what = f"{parallel.data} x {model_ranks} model ranks is not the world size {world_size}"
        yield Problem(
            where="parallel.data",
            what=what,
            fix=f"start {plural(parallel.data * model_ranks, 'rank')}, set data={dp} or leave it out",
        )
    step = batch.micro_batch * dp
    if batch.global_batch % step:
        what = f"{batch.global_batch} is not a multiple of micro_batch {batch.micro_batch} x dp {dp} = {step}"
        valid = nearest(batch.global_batch, range(step, 2 * batch.global_batch + step + 1, step))
        fix = f"set batch.global_batch={' or '.join(map(str, valid))}, or lower batch.micro_batch or parallel.data"
        yield Problem(where="batch.global_batch", what=what, fix=fix)


@cache
def _node_devices(machine: str) -> int:
    """Return the devices of a node. Cached, because a search checks hundreds of layouts of one machine."""
    return load_machine(machine).devices_per_node


def _node_problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.tensor == 1 or parallel.cross_node_tensor:
        return
    tp = parallel.tensor
    devices = _node_devices(config.machine)
    if tensor_groups_stay_in_nodes(tp, devices, world_size):
        return
    if tp > devices:
        what = f"{tp} tensor ranks span nodes: a node of machine {config.machine} has {devices} devices"
        fix = f"{devices} or less"
    else:
        what = f"some groups of {tp} tensor ranks span nodes: {tp} does not divide the {devices} devices of a node"
        fix = " or ".join(map(str, nearest(tp, divisors(devices))))
    fix = f"set parallel.tensor={fix}, or parallel.cross_node_tensor=true to allow tensor parallelism across nodes"
    yield Problem(where="parallel.tensor", what=what, fix=fix)


def _tensor_sizes(model: ModelConfig) -> list[tuple[str, str, int]]:
    """Return (key, name, size) of each size of the model that tp must divide."""
    sizes = [
        ("model.heads", "attention heads", model.heads),
        ("model.kv_heads", "key/value heads", model.num_kv_heads),
        ("model.ffn_hidden", "the MLP's width", model.ffn_hidden),
        ("model.vocab_multiple", "the padded vocabulary", model.padded_vocab_size),
    ]
    if model.moe is not None and model.moe.shared_hidden:
        sizes.append(("model.moe.shared_hidden", "the shared expert's width", model.moe.shared_hidden))
    return sizes


def _every_rank_has_a_token(model: ModelConfig, tp: int) -> bool:
    return model.padded_vocab_size - model.vocab_size < max(1, model.padded_vocab_size // tp)


def tensor_degrees(model: ModelConfig) -> list[int]:
    """Return the tp degrees that the model's sizes allow."""
    return [
        tp
        for tp in divisors(tp_limit(model))
        if all(size % tp == 0 for *_, size in _tensor_sizes(model)) and _every_rank_has_a_token(model, tp)
    ]


def _tensor_problems(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    tp = config.parallel.tensor
    rules = _tensor_sizes(model)
    if config.parallel.sequence_parallel:
        rules.append(
            (
                "model.sequence_length",
                "a rank's part of the sequence (sequence_parallel)",
                model.sequence_length // config.parallel.context,
            )
        )
    common = [degree for degree in tensor_degrees(model) if all(size % degree == 0 for *_, size in rules)]
    for key, what, size in rules:
        if size % tp:
            yield Problem(
                where=key,
                what=f"{what}, {size}, is not divisible by tensor {tp}",
                fix=f"set parallel.tensor to one of {nearest(tp, common, 3)}",
            )
    if not _every_rank_has_a_token(model, tp):
        what = (
            f"padding the vocabulary to {model.padded_vocab_size} gives the last of {tp} tensor ranks only padding rows"
        )
        yield Problem(where="model.vocab_multiple", what=what, fix="lower model.vocab_multiple or parallel.tensor")


def _context_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a Problem if cp does not divide the sequence into two chunks per rank, or does not divide the key/value
    heads that context_attention=heads distributes.
    """
    cp = config.parallel.context
    length = config.model.sequence_length
    kv_heads = config.model.num_kv_heads // config.parallel.tensor
    if cp == 1:
        return
    if config.parallel.context_attention == "heads" and kv_heads % cp:
        what = (
            f"heads is not possible: context {cp} does not divide the {plural(kv_heads, 'key/value head')} of a rank "
            f"with tensor {config.parallel.tensor}"
        )
        yield Problem(
            where="parallel.context_attention",
            what=what,
            fix="use gather or ring, or another parallel.context",
        )
    if length % (2 * cp):
        valid = nearest(length, range(2 * cp, 2 * length + 2 * cp + 1, 2 * cp))
        what = (
            f"{length} tokens are not a multiple of 2 x context {cp}: each rank has two equal chunks of every sequence"
        )
        yield Problem(
            where="model.sequence_length",
            what=what,
            fix=f"use {' or '.join(map(str, valid))}, or another parallel.context",
        )


def _tensor_chunk_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a Problem if comm.tensor_chunks does not cut a rank's part of the sequence into equal pieces."""
    chunks = config.comm.tensor_chunks
    tp = config.parallel.tensor
    length = config.model.sequence_length
    rows = length // config.parallel.context // (tp if config.parallel.sequence_parallel else 1)
    if chunks > 1 and tp == 1:
        what = f"is {chunks}, but without tensor parallelism there is no collective to overlap"
        yield Problem(where="comm.tensor_chunks", what=what, fix="set parallel.tensor=2 or comm.tensor_chunks=1")
    elif rows % chunks:
        what = f"{chunks} does not divide the {rows} tokens that a rank has of each sequence of {length}"
        yield Problem(where="comm.tensor_chunks", what=what, fix=f"use one of {nearest(chunks, divisors(rows))}")


def tp_limit(model: ModelConfig) -> int:
    """Return the largest tensor-parallel degree of the attention: each rank needs a complete key/value head."""
    return model.num_kv_heads


def _pipeline_problems(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    parallel = config.parallel
    virtual = parallel.pipeline * parallel.chunks
    if virtual > model.layers:
        chunks, or_chunks = (f" x {parallel.chunks} chunks", " or parallel.chunks") if parallel.chunks > 1 else ("", "")
        what = f"{parallel.pipeline} stages{chunks} = {virtual} virtual stages, more than the {model.layers} layers"
        yield Problem(
            where="parallel.pipeline",
            what=what,
            fix=f"lower parallel.pipeline{or_chunks} to at most {model.layers} virtual stages",
        )
    yield from schedule.problems(parallel.schedule, parallel.chunks)
    if parallel.chunks > 1 and parallel.pipeline == 1:
        yield Problem(
            where="parallel.chunks",
            what=f"is {parallel.chunks}, but without pipeline stages chunks have no use",
            fix="set parallel.chunks=1",
        )
    counts = parallel.stage_layers
    if counts is not None and (len(counts) != virtual or sum(counts) != model.layers):
        what = f"{list(counts)} has {len(counts)} entries with the sum {sum(counts)}"
        yield Problem(
            where="parallel.stage_layers",
            what=what,
            fix=f"give {virtual} entries with the sum {model.layers}, or remove it",
        )
