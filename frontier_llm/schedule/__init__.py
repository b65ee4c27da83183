"""A pipeline schedule as data: builders, checker, renderer."""

from frontier_llm.schedule.actions import Action, Kind, Schedule, next_stage, previous_stage, virtual_stage

__all__ = ["Action", "Kind", "Schedule", "next_stage", "previous_stage", "virtual_stage"]
