"""The simulated pipeline as Chrome trace events (chrome://tracing, Perfetto): one row per pipeline rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from frontier_llm.files import write_atomically
from frontier_llm.planner.search import Plan
from frontier_llm.schedule import Kind
from frontier_llm.units import strict_json

COLOURS = {Kind.FORWARD: "good", Kind.BACKWARD: "bad", Kind.BACKWARD_INPUT: "terrible", Kind.BACKWARD_WEIGHT: "yellow"}


def chrome_trace(plan: Plan) -> dict[str, Any]:
    """Trace events of the part of the step that was played; microseconds."""
    timeline = plan.played.timeline
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": stage, "name": "thread_name", "args": {"name": f"pipeline rank {stage}"}}
        for stage in range(timeline.schedule.stages)
    ]
    for stage in range(timeline.schedule.stages):
        for action, start_s, end_s in timeline.spans(stage):
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": stage,
                    "name": str(action),
                    "cat": action.kind.name.lower(),
                    "cname": COLOURS[action.kind],
                    "ts": start_s * 1e6,
                    "dur": (end_s - start_s) * 1e6,
                    "args": {"microbatch": action.microbatch, "position": action.position},
                }
            )
    played = timeline.schedule.microbatches
    m = plan.layout.microbatches
    note = "the whole step" if played == m else f"{played} of {m} microbatches; the rest repeats the pattern"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin": "simulated", "shown": note}}


def write_chrome_trace(path: Path, plan: Plan) -> None:
    """Write the events as JSON."""
    write_atomically(path, strict_json(chrome_trace(plan), indent=None))
