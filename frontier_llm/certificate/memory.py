"""Memory: the planner's figure for each pipeline stage, its parts, and the room that is left."""

from __future__ import annotations

from collections.abc import Iterator

from frontier_llm.certificate.section import Section, judged
from frontier_llm.certificate.subject import Subject
from frontier_llm.config import phases_of
from frontier_llm.planner.report import layout_words
from frontier_llm.planner.search import Plan, memory_summary, search
from frontier_llm.units import GIB

NAME = "memory"
FULL_SHARE = 54 / 64  # share of the device's memory above which a roomier layout is shown
LEAST_GIB = 0.05  # smaller parts of a stage's memory are not listed


def check_memory(subject: Subject) -> Section:
    """Refuse a run whose predicted memory exceeds the device's memory."""
    plan = subject.fullest_plan
    fullest, _ = memory_summary(plan)
    shown = sorted({0, fullest, len(plan.memory) - 1})
    limit = plan.limit_bytes / GIB
    peak = plan.peak_bytes / GIB
    evidence = [
        f"{peak:.1f} of {limit:.0f} GiB on the fullest stage ({fullest}), {limit - peak:.1f} GiB left (predicted)"
    ]
    evidence += [_stage_words(plan, stage) for stage in shown]
    if plan.peak_bytes > FULL_SHARE * plan.limit_bytes:
        evidence += _roomier(subject, plan)
    return judged(NAME, evidence, subject.predicted.memory_problems())


def _stage_words(plan: Plan, stage: int) -> str:
    lines = plan.memory[stage]
    parts = [f"{name} {size / GIB:.1f}" for name, size in lines.items() if size >= LEAST_GIB * GIB]
    return f"stage {stage}: {sum(lines.values()) / GIB:.1f} GiB = {' + '.join(parts)}"


def _roomier(subject: Subject, plan: Plan) -> Iterator[str]:
    """Yield the fastest of the planner's finalists that leaves more room than FULL_SHARE."""
    config = max(phases_of(subject.config), key=lambda phase: phase.config.model.sequence_length).config
    outcome = search(
        config.model,
        subject.rates,
        subject.nodes_of_ranks,
        config.batch.global_batch,
        {},
        dtype=config.precision.dtype,
        optimizer=config.optimizer.name,
    )
    roomier = [other for other in outcome.plans if other.peak_bytes <= FULL_SHARE * other.limit_bytes]
    if not roomier:
        yield "none of the planner's finalists leaves more room"
        return
    best = min(roomier, key=lambda other: other.step_s)
    yield (
        f"a layout with more room: {layout_words(best)}: {best.peak_bytes / GIB:.1f} GiB, "
        f"{100 * (best.step_s / plan.step_s - 1):+.1f} % time"
    )
