"""Section "communication": checks that the lists of all ranks form one order without a circular wait, and reports the
bytes per step.

All ranks of a pipeline stage have the same list of actions, and a collective inside an action connects ranks of one
stage. A message connects two ranks with the same position in their stages. One list per stage therefore represents all
ranks of the job.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from frontier_llm.certificate.section import CertificateSection, judged
from frontier_llm.certificate.subject import Subject
from frontier_llm.config import RunConfig, phases_of
from frontier_llm.errors import Problem, first_of
from frontier_llm.machine.env import MOST_QUEUES
from frontier_llm.planner.costs.time import p2p_bytes
from frontier_llm.planner.links import axis_links
from frontier_llm.schedule import Schedule, ScheduleError, build, check, posted_ahead
from frontier_llm.schedule.dry_run import check_order, steps
from frontier_llm.topology.engine_rules import in_flight
from frontier_llm.topology.plan import pipeline_schedule, plan_as_given
from frontier_llm.topology.streams import most_streams, queue_problem
from frontier_llm.topology.traffic import step_traffic, uncounted_engine
from frontier_llm.units import format_bytes, plural

NAME = "communication"
LINKS = {
    "tp": "tensor",
    "cp": "context",
    "pp": "pipeline",
    "dp": "data",
    "edp": "data",
}  # axis → its key in `axis_links`


def check_communication(subject: Subject) -> CertificateSection:
    """Refuse messages without a partner, circular waits, and streams without a hardware queue."""
    mode = in_flight(subject.config)
    evidence: list[str] = []
    problems: list[Problem] = []
    checked: set[int] = set()
    for phase in phases_of(subject.config):
        plan = plan_as_given(phase.config, subject.world_size)
        if plan.microbatches in checked:  # phases differ in their schedules only by the number of microbatches
            continue
        checked.add(plan.microbatches)
        schedule = pipeline_schedule(phase.config, plan)
        key = (plan.schedule, plan.grid.pp, plan.microbatches, plan.chunks, schedule.pairs)
        found = _problems_of(key, mode, phase.config.comm.overlap_messages)
        problems += found
        if not found:
            evidence += _order_evidence(subject, schedule, mode)
    plan = subject.plan
    queues = queue_problem(subject.config, plan.grid, plan.placement)
    if queues:
        problems.append(queues)
    evidence += _stream_evidence(subject, mode)
    evidence += _byte_evidence(subject)
    return judged(NAME, evidence, problems)


@lru_cache(maxsize=8)  # used if one process checks several runs of one layout, for example in a test
def _problems_of(key: tuple[str, int, int, int, bool], mode: str, overlap: bool) -> tuple[Problem, ...]:
    """Return the problems of a schedule. `key` is (name, stages, microbatches, chunks, pairs)."""
    name, stages, microbatches, chunks, pairs = key
    return tuple(order_problems(build(name, stages, microbatches, chunks, pairs=pairs), mode, overlap))


def order_problems(schedule: Schedule, mode: str, overlap: bool) -> list[Problem]:
    """Return the problems of the ranks' lists.

    `mode` is 'one' or 'many' communications in flight. With many and `overlap` the engine posts receives early.
    """
    try:
        for stage in range(schedule.stages):
            check(schedule, stage)
        if mode == "many" and overlap:
            ahead = tuple(tuple(posted_ahead(actions, schedule.pairs)) for actions in schedule.actions)
            schedule = replace(schedule, actions=ahead)
        check_order(steps(schedule), 1 if mode == "one" else None)
    except ScheduleError as error:
        return first_of(error.problems)
    return []


def _order_evidence(subject: Subject, schedule: Schedule, mode: str) -> Iterator[str]:
    actions = sum(map(len, schedule.actions))
    messages = sum(action.kind.sends for listed in schedule.actions for action in listed)
    yield (
        f"{plural(schedule.stages, 'stage')} of {schedule.name} with {plural(schedule.microbatches, 'microbatch')}: "
        f"{actions:,} actions in order, {messages:,} messages, each sent and received once"
    )
    if mode == "one":
        bound = "one communication in flight per rank: one common order without a circular wait"
    else:
        bound = "many communications in flight, without a circular wait"
    yield f"all {subject.world_size:,} ranks complete their lists of communications, with {bound}"


def _stream_evidence(subject: Subject, mode: str) -> Iterator[str]:
    if subject.machine.device.vendor != "amd":
        return
    ranks_per_node = min(subject.machine.devices_per_node, subject.world_size)
    streams = most_streams(subject.config, subject.plan.grid, subject.plan.placement, ranks_per_node)
    if mode == "one":
        yield f"{streams} streams per rank: with one communication in flight any assignment to hardware queues is safe"
    else:
        yield f"{streams} streams per rank, and a device has {MOST_QUEUES} hardware queues: each stream needs its own"


def _byte_evidence(subject: Subject) -> Iterator[str]:
    """Yield the bytes per step of each axis on the stage that moves the most, and the link that carries them."""
    config = subject.config
    engine = uncounted_engine(config)
    if engine:
        yield f"bytes per step are not listed: {engine} starts collectives of its own"
        return
    links = axis_links(subject.fullest_plan, subject.machine, subject.rates)
    for axis, (size, stage) in _busiest(subject).items():
        link = links.get(LINKS.get(axis.partition(".")[0], ""), "")
        yield f"{axis}: {format_bytes(size)} per rank and step on stage {stage}" + (f" ({link})" if link else "")
    if subject.plan.grid.pp > 1:
        yield _message_words(config, subject)


def _busiest(subject: Subject) -> dict[str, tuple[int, int]]:
    """Return axis → (bytes per step, stage) for the stage that moves the most bytes along the axis."""
    first = phases_of(subject.config)[0].config
    busiest: dict[str, tuple[int, int]] = {}
    for stage in _distinct_stages(subject):
        sizes: dict[str, int] = defaultdict(int)
        for (axis, _), size in step_traffic(first, subject.plan, stage).bytes.items():
            sizes[axis] += size
        for axis, size in sizes.items():
            if size > busiest.get(axis, (0, 0))[0]:
                busiest[axis] = (size, stage)
    return busiest


def _distinct_stages(subject: Subject) -> list[int]:
    """Return one stage of each kind: with the same layers, ends and numbers of actions of each kind."""
    plan = subject.plan
    routed = set(subject.config.model.routed_layers)
    schedule = pipeline_schedule(subject.config, plan)
    stages: dict[tuple[object, ...], int] = {}
    for stage in range(plan.grid.pp):
        held = [
            (spec.embedding, spec.head, tuple(layer in routed for layer in spec.layers))
            for spec in plan.stages_of(stage)
        ]
        kinds = Counter(action.kind for action in schedule.actions[stage])
        stages.setdefault((tuple(held), frozenset(kinds.items())), stage)
    return list(stages.values())


def _message_words(config: RunConfig, subject: Subject) -> str:
    plan = subject.fullest_plan
    planned = float(p2p_bytes(plan.model, plan.layout, subject.rates))
    return f"the planner counts {format_bytes(planned)} for a message between stages"
