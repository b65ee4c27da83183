"""Pipeline schedules as lists of actions: their registry, order of communication, checks, simulation and drawings."""

from frontier_llm.schedule import dual_pipe as dual_pipe  # registers dualpipe-v
from frontier_llm.schedule import standard as standard  # registers gpipe, 1f1b, interleaved, zb-h1 and zb-h2
from frontier_llm.schedule.actions import (
    FORWARD_ONLY,
    Action,
    Channel,
    Kind,
    Placement,
    Schedule,
    beside,
    round_robin,
    units,
)
from frontier_llm.schedule.check import check
from frontier_llm.schedule.order import posted_ahead, with_messages
from frontier_llm.schedule.peaks import peak_bytes, peak_in_flight, peak_waiting, peak_waiting_in_backward
from frontier_llm.schedule.registry import (
    ScheduleRule,
    build,
    forward_only,
    idle_share,
    names,
    one_end,
    problems,
    register,
    register_family,
    rule,
    split_share,
)
from frontier_llm.schedule.render import render_text, timeline_chart, timeline_svg
from frontier_llm.schedule.simulate import ScheduleError, Timeline, simulate, simulate_one_in_flight
from frontier_llm.schedule.zero_bubble import v_names

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
    "beside",
    "build",
    "check",
    "forward_only",
    "idle_share",
    "names",
    "one_end",
    "peak_bytes",
    "peak_in_flight",
    "peak_waiting",
    "peak_waiting_in_backward",
    "posted_ahead",
    "problems",
    "register",
    "register_family",
    "render_text",
    "round_robin",
    "rule",
    "simulate",
    "simulate_one_in_flight",
    "split_share",
    "timeline_chart",
    "timeline_svg",
    "units",
    "v_names",
    "with_messages",
]
