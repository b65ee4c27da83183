"""A pipeline schedule as data: builders, checker, simulator, renderer."""

from frontier_llm.schedule.actions import FORWARD_ONLY, Action, Kind, Schedule, next_stage, previous_stage, virtual_stage
from frontier_llm.schedule.build import ORDERS, build, forward_only, with_communication
from frontier_llm.schedule.channels import Channel, channel_of, chunk_at_peer, peer_of, received_by, sent_by
from frontier_llm.schedule.check import ScheduleError, check, in_flight, pending_receives
from frontier_llm.schedule.queues import check_queues, communication_streams
from frontier_llm.schedule.render import render_figure, render_text
from frontier_llm.schedule.simulate import Timeline, simulate

__all__ = [
    "FORWARD_ONLY",
    "ORDERS",
    "Action",
    "Channel",
    "Kind",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "build",
    "channel_of",
    "check",
    "check_queues",
    "chunk_at_peer",
    "communication_streams",
    "forward_only",
    "in_flight",
    "next_stage",
    "peer_of",
    "pending_receives",
    "previous_stage",
    "received_by",
    "render_figure",
    "render_text",
    "sent_by",
    "simulate",
    "virtual_stage",
    "with_communication",
]
