"""Computes the communication of a training step by axis and operation: the calls and bytes that `comm`'s ledger counts.

The collectives over tp and cp are computed from the work lists of blocks, embedding and head (`blueprint/work.py`). The
pipeline's messages are computed from the schedule, and the collectives over replicas from the optimizer's buckets.
Bytes are payloads as the caller sees them. For all_reduce this is the tensor, for all_gather the gathered result, for
reduce_scatter the full input, for send and recv the message.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from frontier_llm.blueprint.expert_work import Rows, even_rows, expert_work
from frontier_llm.blueprint.items import Collective, Software
from frontier_llm.blueprint.layout import DTYPE_BYTES, layer_modes, layout_of, statistics_bytes
from frontier_llm.blueprint.matrices import NEWTON_SCHULZ_STEPS, Part, matrices_of
from frontier_llm.blueprint.optimizers import optimizer_rule
from frontier_llm.blueprint.parameters import Parameter, rank_parameters
from frontier_llm.blueprint.work import block_work, embedding_work, head_work
from frontier_llm.config import OUTPUT_Z, RunConfig
from frontier_llm.errors import LayoutError
from frontier_llm.schedule import Kind
from frontier_llm.topology.buckets import BucketPlan, plan_buckets
from frontier_llm.topology.plan import ParallelPlan, pipeline_schedule


@dataclass
class Traffic:
    """Number of calls and bytes, by (axis, operation)."""

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, axis: str, operation: str, size_bytes: int, calls: int = 1) -> None:
        """Record `calls` calls of `size_bytes` each."""
        if calls:
            self.calls[axis, operation] += calls
            self.bytes[axis, operation] += size_bytes * calls


def uncounted_engine(config: RunConfig) -> str:
    """Return the engine that starts collectives of its own, which the ledger does not count: 'fsdp', 'deepspeed'
    or ''.
    """
    if config.parallel.data_mode == "fsdp":
        return "fsdp"
    return "deepspeed" if config.optimizer.engine == "deepspeed" else ""


def step_traffic(
    config: RunConfig,
    plan: ParallelPlan,
    pp_rank: int,
    routed: Sequence[Rows] | None = None,
    owner: int = 0,
    *,
    prompts: bool = False,
) -> Traffic:
    """Return the communication of one rank of pipeline rank `pp_rank` in one training step.

    `owner` is the rank's index among its replicas. `routed` has the token rows that this rank's routers sent, for each
    layer with experts and each microbatch. None means that the rows are distributed evenly. `prompts` is true if some
    tokens of the data are only input, without a loss. Raises LayoutError for an engine whose collectives are not
    counted.
    """
    engine = uncounted_engine(config)
    if engine:
        raise LayoutError(
            f"the communication of a step with {engine} is not known, because {engine} starts collectives of its own",
            "set parallel.data_mode=zero and optimizer.engine=native",
        )
    traffic = Traffic()
    layer_traffic(config, plan, pp_rank, traffic)
    expert_traffic(config, plan, pp_rank, traffic, routed)
    pipeline_traffic(config, plan, pp_rank, traffic)
    data_traffic(config, plan, pp_rank, traffic)
    update_traffic(config, plan, pp_rank, owner, traffic)
    masked = config.data.reset_at_documents or config.data.packing == "best-fit" or prompts
    if masked and plan.grid.degree(plan.grid.replicas) > 1:
        # The sum over replicas of the number of targets with a loss.
        traffic.add(plan.grid.replicas, "all_reduce", 8)
    world = plan.grid.world_size
    if world > 1:
        model = config.model
        further = len(config.train.loss_weights) + (
            0 if model.moe is None else 2 + len(model.routed_layers) * (model.moe.experts + 2)
        )
        # One fp64 all-reduce sums the losses, the squared gradient norm, and the requests to stop and to save. With
        # experts it also sums the routers' two losses and the load.
        traffic.add("world", "all_reduce", (4 + further) * 8)
    return traffic


def layer_traffic(config: RunConfig, plan: ParallelPlan, pp_rank: int, traffic: Traffic) -> None:
    """Add the tp and cp collectives in the work lists of blocks, embedding and head.

    A collective occurs once per microbatch. Collectives that only a split backward executes occur once per I action
    (backward of the inputs). Collectives that a recomputed forward repeats are counted twice.
    """
    model = config.model
    layout = layout_of(config, plan.grid.world_size)
    software = Software()
    dense, routed = (block_work(model, layout, software, layer) for layer in (0, model.layers - 1))
    embedding = embedding_work(model, layout)
    head = head_work(model, layout, software)
    schedule = pipeline_schedule(config, plan)
    splits = Counter(action.position for action in schedule.actions[pp_rank] if action.kind is Kind.BACKWARD_INPUT)
    for position, stage in zip(schedule.placement.positions_of(pp_rank), plan.stages_of(pp_rank), strict=True):
        kinds = Counter(
            zip(
                (layer in model.routed_layers for layer in stage.layers),
                layer_modes(layout.recompute, stage.num_layers),
                strict=True,
            )
        )
        blocks = [(routed if has_experts else dense, count, mode) for (has_experts, mode), count in kinds.items()]
        for items, times, mode in (*blocks, (embedding, int(stage.embedding), "none"), (head, int(stage.head), "none")):
            for item in items:
                if isinstance(item.work, Collective) and item.work.axis in ("tp", "cp"):
                    pieces = layout.tensor_chunks if item.work.beside else 1
                    runs = splits[position] if item.apart else plan.microbatches
                    calls = runs * pieces * item.work.calls * times * (2 if mode in item.repeated_by else 1)
                    for operation in ("send", "recv") if item.work.operation == "exchange" else (item.work.operation,):
                        traffic.add(item.work.axis, operation, item.work.size_bytes // pieces, calls)
        if layout.tp > 1 and any(layer in model.routed_layers for layer in stage.layers):
            wide = max(8, DTYPE_BYTES[layout.dtype])
            traffic.add("tp", "all_reduce", 2 * wide, plan.microbatches)  # both losses of the routers, as fp64 numbers
        if stage.head and layout.sequence_parallel:
            further = len(config.train.loss_weights.keys() - {OUTPUT_Z})
            traffic.add("tp", "all_reduce", 8, plan.microbatches * further)  # fp64


def expert_traffic(
    config: RunConfig, plan: ParallelPlan, pp_rank: int, traffic: Traffic, routed: Sequence[Rows] | None
) -> None:
    """Add the all-to-alls of experts: token rows to the ranks of their experts and back, and the row counts."""
    model = config.model
    layout = layout_of(config, plan.grid.world_size)
    modes = sorted(
        mode
        for stage in plan.stages_of(pp_rank)
        for layer, mode in zip(stage.layers, layer_modes(layout.recompute, stage.num_layers), strict=True)
        if layer in model.routed_layers
    )
    if routed is None:
        routed = [even_rows(model, layout)] * (len(modes) * plan.microbatches) if modes else []
    for number, rows in enumerate(routed):
        mode = modes[number // plan.microbatches]  # the order of layers matters only if the rows are uneven
        for item in expert_work(model, layout, Software(), rows):
            if isinstance(item.work, Collective) and item.work.axis.startswith("ep"):
                traffic.add(
                    item.work.axis, item.work.operation, item.work.size_bytes, 2 if mode in item.repeated_by else 1
                )


def pipeline_traffic(config: RunConfig, plan: ParallelPlan, pp_rank: int, traffic: Traffic) -> None:
    """Add messages of S·B·H elements (S/tp with sequence parallelism), counted on the list of actions that the engine
    executes.
    """
    sequence = config.model.sequence_length // plan.grid.cp // (plan.grid.tp if plan.sequence_parallel else 1)
    size = sequence * config.batch.micro_batch * config.model.hidden * DTYPE_BYTES[config.precision.dtype]
    schedule = pipeline_schedule(config, plan)
    for action in schedule.actions[pp_rank]:
        if not action.kind.computes:
            channel = schedule.placement.channel(action.kind, action.position)
            traffic.add(f"pp.{channel.value}", "send" if action.kind.sends else "recv", size)


def data_traffic(config: RunConfig, plan: ParallelPlan, pp_rank: int, traffic: Traffic) -> None:
    """Add gradients in fp32 (fp64 under fp64), bucket by bucket: first sums over tp or the tied stages, if needed, then
    over the replicas.

    ZeRO-1 uses reduce-scatter of the gradients and all-gather of the working weights. Otherwise there is one
    all-reduce. Gradients that are sent in 16 bits use all-to-all and, without ZeRO, all-gather for the result.
    """
    weight_bytes = DTYPE_BYTES[config.precision.dtype]
    gradient_bytes = statistics_bytes(config.precision.dtype)
    wire = config.precision.gradient_wire
    for bucket in buckets(config, plan, pp_rank):
        numel = bucket.numel
        parameter = bucket.members[0]
        replicas = axis_of(parameter.replicas, plan)
        for axis in parameter.partial_axes():
            if axis == "tied" or plan.grid.degree(axis) > 1:
                traffic.add(axis, "all_reduce", numel * gradient_bytes)
        if plan.grid.degree(replicas) == 1:
            continue
        if wire != "full":
            traffic.add(replicas, "all_to_all", numel * DTYPE_BYTES[wire])
        else:
            traffic.add(replicas, "reduce_scatter" if plan.zero else "all_reduce", numel * gradient_bytes)
        if plan.zero:
            traffic.add(replicas, "all_gather", numel * (gradient_bytes if parameter.wide else weight_bytes))
        elif wire != "full":
            traffic.add(replicas, "all_gather", numel * DTYPE_BYTES[wire])


def axis_of(replicas: str, plan: ParallelPlan) -> str:
    """Return the mesh's axis of a parameter's replicas. dp may be joined with cp."""
    return plan.grid.replicas if replicas == "dp" else replicas


def update_traffic(config: RunConfig, plan: ParallelPlan, pp_rank: int, owner: int, traffic: Traffic) -> None:
    """Add the collectives of an optimizer that updates complete tensors (Muon) or sums statistics (Adafactor).

    A tensor whose slices are on several ranks is gathered. The owner's matrices use collectives over tp (for experts:
    etp).
    """
    rule = optimizer_rule(config.optimizer.name)
    for bucket in buckets(config, plan, pp_rank):
        replicas = axis_of(bucket.members[0].replicas, plan)
        owners = plan.grid.degree(replicas) if plan.zero else 1
        _statistics_traffic(
            config,
            plan,
            replicas if owners > 1 else None,
            [one for member in bucket.members for one in rule.statistics(member)],
            traffic,
        )
        if not (rule.gathers and bucket.whole):
            continue
        if not bucket.apart and owners > 1:
            traffic.add(replicas, "all_gather", bucket.numel * DTYPE_BYTES[config.precision.dtype])
        size = bucket.numel // owners
        start = size * (owner % owners)
        held = [
            parameter
            for parameter, offset in zip(bucket.members, bucket.offsets, strict=True)
            if offset < start + size and start < offset + rank_numel(parameter, plan)
        ]
        _matrix_traffic(config, plan, bucket.members[0].tensor_axis, held, traffic)


def _statistics_traffic(
    config: RunConfig, plan: ParallelPlan, owners: str | None, held: Iterable[Parameter], traffic: Traffic
) -> None:
    """Add the sums of an optimizer's statistics in a bucket: over the owners of slices, then over the axes of each
    statistic.
    """
    sizes = Counter[tuple[str, ...]]()
    for one in held:
        sizes[one.partial_axes()] += rank_numel(one, plan) * statistics_bytes(config.precision.dtype)
    if owners and sizes:
        traffic.add(owners, "all_reduce", sizes.total())
    for axes, size_bytes in sizes.items():
        for axis in axes:
            if plan.grid.degree(axis) > 1:
                traffic.add(axis, "all_reduce", size_bytes)


def _matrix_traffic(
    config: RunConfig, plan: ParallelPlan, axis: str, held: Iterable[Parameter], traffic: Traffic
) -> None:
    """Add the collectives of an owner's matrices. Matrices split along their short side are gathered. For all other
    matrices the norms and Gram matrices are summed.
    """
    tp = plan.grid.degree(axis)
    ep = plan.grid.degree("ep") if axis == "etp" else 1
    item_bytes = DTYPE_BYTES[config.precision.dtype]
    matrices = [one for parameter in held for one in matrices_of(parameter, config.optimizer.heads == "groups")]
    if cut := [one for one in matrices if one.part(tp) is Part.SHORT]:
        traffic.add(axis, "all_gather", sum(tp * prod(one.on_rank(tp, ep)) for one in cut) * item_bytes)
    summed = Counter[tuple[int, int]]()
    for one in matrices:
        if one.part(tp) is Part.LONG:
            summed[one.short, one.long] += one.on_rank(tp, ep)[0]
    if summed:
        traffic.add(axis, "all_reduce", summed.total() * statistics_bytes(config.precision.dtype))
    for (short, _), count in summed.items():
        traffic.add(axis, "all_reduce", count * short**2 * item_bytes, NEWTON_SCHULZ_STEPS)


def rank_numel(parameter: Parameter, plan: ParallelPlan) -> int:
    """Return the number of a parameter's elements on a rank."""
    return int(parameter.rank_numel({axis: plan.grid.degree(axis) for axis in ("tp", "ep", "etp")}))


def buckets(config: RunConfig, plan: ParallelPlan, pp_rank: int) -> Iterator[BucketPlan[Parameter]]:
    """Yield a pipeline rank's buckets, as `optim/buckets.py` fills them."""
    declared = list(rank_parameters(config.model, plan.stages_of(pp_rank), plan.sequence_parallel))
    return plan_buckets(
        declared[::-1],
        lambda parameter: (parameter, rank_numel(parameter, plan)),
        optimizer_rule(config.optimizer.name),
        lambda replicas: plan.grid.degree(axis_of(replicas, plan)),
        bool(plan.zero),
        config.comm.bucket_elements,
    )
