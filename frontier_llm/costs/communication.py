"""What a training step moves, by axis and operation: the same calls and bytes that `comm`'s ledger counts, in closed form.

Bytes are payloads as the caller sees them: all_reduce the tensor, all_gather the gathered result, reduce_scatter the full input,
send and recv the message. This is the one place that knows; times come from `costs.collectives`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from frontier_llm.blueprint import rank_parameters
from frontier_llm.config import ModelConfig, RunConfig
from frontier_llm.costs.workload import DTYPE_BYTES, statistics_bytes
from frontier_llm.schedule import build, rule
from frontier_llm.topology import BUCKET_ALIGNMENT, ParallelPlan

STATISTICS = 3  # maximum, sum of exponentials and target logit per token


@dataclass
class Traffic:
    """Calls and bytes by (axis, operation) of one rank and step."""

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, axis: str, operation: str, size_bytes: int, calls: int = 1) -> None:
        """Record `calls` calls of `size_bytes` each."""
        if calls:
            self.calls[axis, operation] += calls
            self.bytes[axis, operation] += size_bytes * calls


def step_traffic(config: RunConfig, plan: ParallelPlan, pp_rank: int) -> Traffic:
    """Everything that one rank of pipeline rank `pp_rank` moves in one training step."""
    traffic = Traffic()
    tensor_traffic(config, plan, pp_rank, traffic)
    pipeline_traffic(config, plan, pp_rank, traffic)
    data_traffic(config, plan, pp_rank, traffic)
    if config.data.reset_at_documents and plan.grid.dp > 1:
        traffic.add("dp", "all_reduce", 8)  # targets of the step: which ones count, each replica finds in its own samples
    world = plan.grid.world_size
    if world > 1:
        further = len(config.train.loss_weights)
        traffic.add("world", "all_reduce", (4 + further) * 8)  # losses, squared gradient norm, wishes to stop and to save, fp64
    return traffic


def tensor_traffic(config: RunConfig, plan: ParallelPlan, pp_rank: int, traffic: Traffic) -> None:
    """Tensor parallelism: per layer and microbatch two sums forward and two backward of S·B·H elements.

    Without sequence parallelism each is an all-reduce. With it, forward gathers before and reduce-scatters behind each of the
    two pairs of products; backward gathers the gradient, gathers the input again for the weight gradient and reduce-scatters the
    input gradient; a weight gradient that waits for its W gathers its own gradient again. Full recomputation repeats the forward's.
    The embedding sums once forward (with sequence parallelism gathers once backward), the head sums its input gradient once (and
    gathers forward and again backward). The cross-entropy gathers three statistics per token.
    """
    tp, m = plan.grid.tp, plan.microbatches
    if tp == 1:
        return
    tokens = config.model.sequence_length * config.batch.micro_batch
    size = tokens * config.model.hidden * DTYPE_BYTES[config.precision.dtype]
    statistics = STATISTICS * tokens * tp * statistics_bytes(config.precision.dtype)
    forwards, pieces = 2 if config.train.recompute == "full" else 1, config.comm.tensor_chunks
    for stage in plan.stages_of(pp_rank):
        n = stage.num_layers
        if plan.sequence_parallel:
            # beside products in chunks: before both pairs and the head, behind both pairs, and of the gradient before their backward
            gathers, scatters = 2 * n * forwards + 2 * n + stage.head, 2 * n * forwards
            traffic.add("tp", "all_gather", size // pieces, gathers * m * pieces)
            traffic.add("tp", "reduce_scatter", size // pieces, scatters * m * pieces)
            # whole, under the weight gradient: the input again and its gradient; and the embedding, which has no product
            traffic.add("tp", "all_gather", size, (2 * n + stage.head + stage.embedding) * m)
            traffic.add("tp", "reduce_scatter", size, (2 * n + stage.head + stage.embedding) * m)
            if rule(plan.schedule).splits_backward:
                traffic.add("tp", "all_gather", size, 2 * n * m)  # the gradient behind both pairs once more, at its W
        else:
            traffic.add("tp", "all_reduce", size // pieces, 2 * n * forwards * m * pieces)
            traffic.add("tp", "all_reduce", size, (2 * n + stage.embedding + stage.head) * m)  # input gradients, under the weight gradient
        if stage.head:
            traffic.add("tp", "all_gather", statistics, m)
            traffic.add("tp", "all_reduce", 8, m * len(config.train.loss_weights) * plan.sequence_parallel)  # further losses, fp64


def pipeline_traffic(config: RunConfig, plan: ParallelPlan, pp_rank: int, traffic: Traffic) -> None:
    """Messages of S·B·H elements (S/tp with sequence parallelism), counted on the very action list that is played."""
    sequence = config.model.sequence_length // (plan.grid.tp if plan.sequence_parallel else 1)
    size = sequence * config.batch.micro_batch * config.model.hidden * DTYPE_BYTES[config.precision.dtype]
    schedule = build(plan.schedule, plan.grid.pp, plan.microbatches, plan.chunks)
    for action in schedule.actions[pp_rank]:
        if not action.kind.computes:
            channel = schedule.placement.channel(action.kind, action.position)
            traffic.add(f"pp.{channel.value}", "send" if action.kind.sends else "recv", size)


def data_traffic(config: RunConfig, plan: ParallelPlan, pp_rank: int, traffic: Traffic) -> None:
    """Gradients in fp32 (fp64 under fp64) bucket by bucket: summed over tp or the tied stages where they must be, then over dp.

    ZeRO-1: reduce-scatter of the gradients and all-gather of the working weights over dp; otherwise one all-reduce. Gradients that
    travel in 16 bits go by all-to-all and, without ZeRO, come back by all-gather.
    """
    dp = plan.grid.dp
    weight_bytes = DTYPE_BYTES[config.precision.dtype]
    gradient_bytes = statistics_bytes(config.precision.dtype)
    wire = config.precision.gradient_wire
    for numel, extra in buckets(config.model, plan, pp_rank, config.comm.bucket_elements):
        if extra:
            traffic.add(extra, "all_reduce", numel * gradient_bytes)
        if dp == 1:
            continue
        if wire != "full":
            traffic.add("dp", "all_to_all", numel * DTYPE_BYTES[wire])
        else:
            traffic.add("dp", "reduce_scatter" if plan.zero else "all_reduce", numel * gradient_bytes)
        if plan.zero:
            traffic.add("dp", "all_gather", numel * weight_bytes)
        elif wire != "full":
            traffic.add("dp", "all_gather", numel * DTYPE_BYTES[wire])


def buckets(model: ModelConfig, plan: ParallelPlan, pp_rank: int, bucket_numel: int) -> Iterator[tuple[int, str]]:
    """(elements with padding, axis summed over before dp or '') of each of a pipeline rank's buckets."""
    degrees = {"tp": plan.grid.tp}
    declared = [
        (parameter.rank_numel(degrees), parameter.decay, next(iter(parameter.partial_axes()), ""))
        for parameter in rank_parameters(model, plan.stages_of(pp_rank), plan.sequence_parallel)
    ]
    chunk_numel = BUCKET_ALIGNMENT * plan.grid.dp

    def kind(piece: tuple[int, bool, str]) -> tuple[bool, str]:
        return piece[1:]

    backwards = declared[::-1]  # the order in which backward completes them; sorting is stable
    for key, members in groupby(sorted(backwards, key=kind), key=kind):
        filled, padded = 0, 0
        for numel, _, _ in members:
            if filled and filled + numel > bucket_numel:
                yield -(-padded // chunk_numel) * chunk_numel, key[1]
                filled, padded = 0, 0
            filled += numel
            padded += -(-numel // BUCKET_ALIGNMENT) * BUCKET_ALIGNMENT
        yield -(-padded // chunk_numel) * chunk_numel, key[1]
