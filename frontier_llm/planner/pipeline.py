"""Simulation of a training step: the engine's list of pipeline actions, each with a predicted duration.

Only a part of a long schedule is simulated. After its warm-up, every stage repeats one pattern of actions with each
microbatch (interleaved schedules: with each round). Each further microbatch then adds exactly one period.
`simulate_step` increases the number of simulated microbatches until the pattern repeats. A test compares the result
with a simulation of all actions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.parameters import StageSpec
from frontier_llm.config import ModelConfig
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.parameters import by_rank, expert_numel, stage_columns, stage_numel
from frontier_llm.planner.costs.seconds import Times, of_stages, times
from frontier_llm.planner.costs.time import (
    StepTail,
    between_microbatches_s,
    layer_s,
    meets_inside,
    p2p_s,
    pair_s,
    tail,
    tied_sum_s,
)
from frontier_llm.planner.costs.update import whole_update
from frontier_llm.schedule import (
    Action,
    Kind,
    Schedule,
    Timeline,
    beside,
    build,
    one_end,
    rule,
    simulate,
    simulate_one_in_flight,
)

# number of microbatches after the warm-up that are simulated before the repeating pattern is searched
STEADY_MICROBATCHES = 24


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one microbatch on one virtual stage."""

    forward_s: float
    backward_s: float  # input and weight gradient
    weight_s: float  # the part of backward_s for the weight gradient
    pair_s: float = 0.0  # seconds that forward and backward save if they run as a pair


@dataclass(frozen=True)
class SimulatedStep:
    """Result of the simulation: the times of one step and its parts, in seconds."""

    timeline: Timeline  # Timeline of the simulated part of the schedule.
    pipeline_s: float  # Makespan of the complete schedule.
    busy_s: tuple[float, ...]  # Compute time per pipeline rank in the complete schedule.
    end_s: tuple[float, ...]  # End of the last action per pipeline rank in the complete schedule.
    reduce_s: float  # Time of the gradient reduction that compute does not hide.
    optimizer_s: float
    gather_s: float
    message_s: float  # Time of one message between pipeline neighbours.
    # Per pipeline rank: seconds of expert communication that another microbatch's compute hides. They are not in
    # busy_s.
    hidden_s: tuple[float, ...]
    stage_times: tuple[StageTimes, ...]  # By virtual stage.

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.pipeline_s + self.reduce_s + self.optimizer_s + self.gather_s

    @property
    def bubble(self) -> float:
        """Share of the pipeline's time in which an average rank does not compute. Waiting for messages is included."""
        return max(1 - float(np.mean(self.busy_s)) / self.pipeline_s, 0.0)


def stage_times(
    model: ModelConfig,
    layout: Layout,
    rates: Rates,
    stages: tuple[StageSpec, ...],
) -> tuple[StageTimes, ...]:
    """Return the times of every virtual stage: its layers, and the embedding or the head if the stage has them."""
    of_each = of_stages(model, stages, lambda layers: times(model, layout, rates, layers))
    parts = of_each[0]
    m = layout.microbatches
    embedding = parts.embedding.both(m, rates)
    head = parts.head.both(m, rates)
    host = float(between_microbatches_s(layout, rates)) / 2 / layout.chunks + (
        float(p2p_s(model, layout, rates)) if rates.blocking_messages else 0.0
    )

    def seconds(stage: StageSpec, block: Times, side: int) -> float:
        return (
            float(
                stage.num_layers * layer_s(block, layout, rates)[side]
                + stage.embedding * embedding[side]
                + stage.head * head[side]
            )
            + host
        )

    return tuple(
        StageTimes(
            seconds(stage, block, 0),
            seconds(stage, block, 1),
            stage.num_layers * float(block.weights(m)),
            stage.num_layers * float(pair_s(block, layout, rates)),
        )
        for stage, block in zip(stages, (each.block for each in of_each), strict=True)
    )


def simulate_step(model: ModelConfig, layout: Layout, rates: Rates, stages: tuple[StageSpec, ...]) -> SimulatedStep:
    """Simulate one step of the layout with these virtual stages."""
    stage_s = stage_times(model, layout, rates, stages)
    message_s = 0.0 if rates.blocking_messages else float(p2p_s(model, layout, rates))
    timeline, period_s = _until_steady(layout, rates, stage_s, message_s)
    missing_rounds = (layout.microbatches - timeline.schedule.microbatches) / _round_size(layout)
    added_s = missing_rounds * period_s
    end_s = np.array([stage_ends[-1] + added_s for stage_ends in timeline.end_s])
    busy_s, hidden_s = _busy_and_hidden_s(timeline, layout.microbatches, stage_s)
    after = _after_pipeline(model, layout, rates, stages, stage_s)
    has_end = np.array([stage.embedding or stage.head for stage in stages])
    tied_s = (by_rank(has_end, layout) > 0) * float(tied_sum_s(model, layout, rates))
    # every rank reduces the gradients of its own stages after its last backward
    reduced_s = end_s + after.reduce_s + tied_s
    return SimulatedStep(
        timeline=timeline,
        pipeline_s=float(end_s.max()),
        busy_s=busy_s,
        end_s=tuple(end_s.tolist()),
        reduce_s=float(np.max(reduced_s) - end_s.max()),
        optimizer_s=float(np.max(after.optimizer_s)),
        gather_s=float(np.max(after.gather_s)),
        message_s=message_s,
        hidden_s=hidden_s,
        stage_times=stage_s,
    )


def _round_size(layout: Layout) -> int:
    """Return the number of microbatches after which the pattern of a schedule may repeat."""
    return layout.pp if layout.chunks > 1 and not one_end(layout.schedule) else 1


def _first_length(layout: Layout, rates: Rates) -> int:
    """Return the number of microbatches to simulate before the repeating pattern is searched."""
    m = layout.microbatches
    pp = layout.pp
    round_size = _round_size(layout)
    repeats = layout.schedule != "gpipe" and not rates.contention  # GPipe has no pattern: simulate all of it
    if not repeats or m <= pp + 2 * STEADY_MICROBATCHES + round_size:
        return m
    # 1F1B repeats its pattern after pp microbatches, an interleaved schedule after pp·v chunks and two rounds.
    # A V-shaped schedule without pairs repeats its pattern earlier.
    rounds = 3 if one_end(layout.schedule) and not rule(layout.schedule).pairs else 4
    wanted = (pp + STEADY_MICROBATCHES) if layout.chunks == 1 else rounds * pp
    return min(m, wanted + (m - wanted) % round_size)


def _until_steady(
    layout: Layout,
    rates: Rates,
    times: tuple[StageTimes, ...],
    message_s: float,
) -> tuple[Timeline, float]:
    """Simulate microbatches until the pattern of the schedule repeats.

    Returns the timeline of the simulated microbatches, and the seconds that one more round of microbatches adds. These
    are 0 if all microbatches of the step were simulated.
    """
    m = layout.microbatches
    round_size = _round_size(layout)
    length = _first_length(layout, rates)
    while True:
        timeline = simulate_schedule(
            layout.schedule,
            layout.pp,
            length,
            layout.chunks,
            times,
            message_s,
            _in_flight(layout, rates),
        )
        timeline = _contended(timeline, layout, rates)
        period_s = 0.0 if length == m else _period(timeline, times, round_size)
        if period_s is not None:
            return timeline, period_s
        length = min(m, length + round_size * max(1, length // round_size))


def _busy_and_hidden_s(
    timeline: Timeline,
    m: int,
    times: tuple[StageTimes, ...],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return `busy_s` and `hidden_s` of `SimulatedStep` for a step of `m` microbatches."""
    schedule = timeline.schedule
    missing = m - schedule.microbatches
    busy_s = []
    hidden_s = []
    for rank, saved_s in enumerate(_pairs_s(schedule, times)):
        pairs = len(beside(schedule, rank))
        # each additional microbatch adds two pairs on a rank, one for each direction of the V
        rank_hidden_s = saved_s * (pairs + 2 * missing * (pairs > 0))
        rank_busy_s = (timeline.busy_s(rank) + saved_s * pairs) * m / schedule.microbatches
        hidden_s.append(rank_hidden_s)
        busy_s.append(rank_busy_s - rank_hidden_s)
    return tuple(busy_s), tuple(hidden_s)


def _after_pipeline(
    model: ModelConfig,
    layout: Layout,
    rates: Rates,
    stages: tuple[StageSpec, ...],
    times: tuple[StageTimes, ...],
) -> StepTail:
    """Return the seconds of gradient sum, update and weight gather on each pipeline rank."""
    layers, routed, embeds, heads = stage_columns(model, stages)
    parameters = stage_numel(model, layout.tp, layers, embeds > 0, heads > 0, routed=routed)
    return tail(
        layouts=layout,
        rates=rates,
        parameters=by_rank(parameters, layout),
        last_backward_s=by_rank(np.array([stage.backward_s for stage in times]), layout),
        first_forward_s=by_rank(np.array([stage.forward_s for stage in times]), layout),
        experts=by_rank(expert_numel(model, layout, layers, routed=routed), layout),
        whole=whole_update(model, layout, rates, by_rank(layers, layout), by_rank(routed, layout)),
    )


def _in_flight(layout: Layout, rates: Rates) -> str:
    """Return how many messages a rank may have in flight: "many", "one", or "waiting" (one, and compute waits for it).

    Compute waits if it contains collectives, because a message and a collective cannot be in flight together. Compute
    also waits on a CPU, which executes the message and the compute.
    """
    if not rates.one_in_flight or rates.blocking_messages or layout.pp == 1:
        return "many"
    return "waiting" if rates.host_executes or meets_inside(layout) else "one"


def _pairs_s(schedule: Schedule, times: tuple[StageTimes, ...]) -> list[float]:
    """Return the seconds that a forward-backward pair saves on each rank: the minimum over its virtual stages."""
    positions_of = schedule.placement.positions_of
    return [min(times[position].pair_s for position in positions_of(rank)) for rank in range(schedule.stages)]


def simulate_schedule(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int,
    times: tuple[StageTimes, ...],
    message_s: float,
    in_flight: str = "many",
) -> Timeline:
    """Return the timeline of a schedule whose virtual stages take `times`. `_in_flight` returns `in_flight`."""
    seconds = {}
    for position, one in enumerate(times):
        seconds[Kind.FORWARD, position] = one.forward_s
        seconds[Kind.BACKWARD, position] = one.backward_s
        seconds[Kind.BACKWARD_INPUT, position] = one.backward_s - one.weight_s
        seconds[Kind.BACKWARD_WEIGHT, position] = one.weight_s

    schedule = build(
        name=name,
        stages=stages,
        microbatches=microbatches,
        chunks=chunks,
        messages=in_flight != "many",
        pairs=any(one.pair_s for one in times),
    )
    paired = beside(schedule)
    less_s = _pairs_s(schedule, times)

    def duration(stage: int, action: Action) -> float:
        return seconds[action.kind, action.position] - (less_s[stage] if paired and action in paired else 0.0)

    if in_flight == "many":
        return simulate(schedule, duration, message_s)
    return simulate_one_in_flight(schedule, duration, message_s, in_flight == "waiting")


def _contended(timeline: Timeline, layout: Layout, rates: Rates) -> Timeline:
    """Return the timeline on devices that slow each other down, for example CPU ranks that share cores.

    The durations in `timeline` are valid while all devices of a node are busy. With fewer busy devices each device is
    faster, by a factor from `Rates.contention`. At each moment the factor is the same for all busy devices, so the time
    axis is compressed.
    """
    if not rates.contention:
        return timeline
    counts, shares = zip(*rates.contention, strict=True)
    starts, ends = (np.sort(np.concatenate(times)) for times in (timeline.start_s, timeline.end_s))
    moments = np.unique(np.concatenate([[0.0], starts, ends]))
    busy = np.searchsorted(starts, moments, side="right") - np.searchsorted(ends, moments, side="right")
    devices = busy * layout.tp * layout.replicas
    speed = np.where(devices > 0, np.interp(devices, counts, shares), 1.0)
    stretched = np.concatenate([[0.0], np.cumsum(np.diff(moments) * speed[:-1])])

    def later(times: tuple[list[float], ...]) -> tuple[list[float], ...]:
        return tuple(list(np.interp(stage, moments, stretched)) for stage in times)

    return Timeline(timeline.schedule, later(timeline.start_s), later(timeline.end_s))


def _period(timeline: Timeline, times: tuple[StageTimes, ...], round_size: int) -> float | None:
    """Return the seconds that one more round of microbatches adds, or None if the pattern does not repeat yet.

    There are two cases. In the first case, the rank with most work is saturated: its backwards follow each other as
    fast as its compute allows, so this rank alone sets the pace. In the second case, messages set the pace, and the
    first, middle and last rank advance at the same pace.
    """
    pp = timeline.schedule.stages
    seconds = [one.forward_s + one.backward_s for one in times]
    placement = timeline.schedule.placement
    work = [sum(seconds[position] for position in placement.positions_of(rank)) for rank in range(pp)]
    busiest = int(np.argmax(work))
    own = work[busiest] * round_size
    pace = _pace(timeline, busiest, round_size)
    if _is_steady(pace) and abs(float(pace[-1]) - own) <= 1e-9 * own:
        return own
    return _common([_pace(timeline, rank, round_size) for rank in (0, pp // 2, pp - 1)])


def _common(paces: list[np.ndarray]) -> float | None:
    """Return the common pace of all ranks, or None if their paces differ or are not steady."""
    if all(_is_steady(pace) for pace in paces) and np.ptp([pace[-1] for pace in paces]) <= 1e-9 * paces[0][-1]:
        return float(paces[0][-1])
    return None


def _pace(timeline: Timeline, rank: int, round_size: int) -> np.ndarray:
    """Return the seconds between the backwards of successive rounds on a rank, for the last rounds before the drain."""
    kinds = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
    first = timeline.schedule.placement.positions_of(rank)[0]
    ends = np.array(
        [end for action, _, end in timeline.spans(rank) if action.kind in kinds and action.position == first]
    )
    steps = ends[round_size:] - ends[:-round_size]
    drain = min(timeline.schedule.stages * (1 if timeline.schedule.chunks == 1 else 2), max(len(steps) - 9, 0))
    return steps[len(steps) - drain - 6 : len(steps) - drain]


def _is_steady(pace: np.ndarray) -> bool:
    return len(pace) >= 3 and float(np.ptp(pace)) <= 1e-9 * float(pace.mean())
