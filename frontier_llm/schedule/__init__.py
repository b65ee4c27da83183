"""A pipeline schedule as data: registry, order of communication, checker, simulator, renderer."""

from frontier_llm.schedule import standard as standard  # registers the package's own schedules
from frontier_llm.schedule.actions import FORWARD_ONLY, Action, Channel, Kind, Placement, Schedule, round_robin
from frontier_llm.schedule.check import check
from frontier_llm.schedule.order import ScheduleError, posted_ahead, with_messages
from frontier_llm.schedule.registry import (
    ScheduleRule,
    build,
    forward_only,
    names,
    peak_in_flight,
    peak_waiting,
    problems,
    register,
    rule,
)
from frontier_llm.schedule.render import render_text, timeline_chart
from frontier_llm.schedule.simulate import Timeline, simulate, simulate_in_turn

__all__ = [
    "FORWARD_ONLY",
    "Action",
    "Channel",
    "Kind",
    "Placement",
    "Schedule",
    "ScheduleError",
    "ScheduleRule",
    "Timeline",
    "build",
    "check",
    "forward_only",
    "names",
    "peak_in_flight",
    "peak_waiting",
    "posted_ahead",
    "problems",
    "register",
    "render_text",
    "round_robin",
    "rule",
    "simulate",
    "simulate_in_turn",
    "timeline_chart",
    "with_messages",
]
