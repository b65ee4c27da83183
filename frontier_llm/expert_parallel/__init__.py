"""Experts over ranks: tokens travel to the ranks that hold their experts, and back."""

from frontier_llm.expert_parallel.dispatch import Departure, Dispatch, RouterChoice, beyond_capacity, combine, dispatch, plan_dispatch
from frontier_llm.expert_parallel.grouped import GroupedLinear, router_product
from frontier_llm.expert_parallel.nodes import ToNodes
from frontier_llm.expert_parallel.sequence import gather_sequence, take_part

__all__ = [
    "Departure",
    "Dispatch",
    "GroupedLinear",
    "RouterChoice",
    "ToNodes",
    "beyond_capacity",
    "combine",
    "dispatch",
    "gather_sequence",
    "plan_dispatch",
    "router_product",
    "take_part",
]
