"""Experts over ranks: tokens travel to the ranks that hold their experts, and back."""

from frontier_llm.expert_parallel.dispatch import Dispatch, beyond_capacity, combine, dispatch, plan_dispatch
from frontier_llm.expert_parallel.grouped import GroupedLinear, router_product, weighted_activation
from frontier_llm.expert_parallel.sequence import gather_sequence, take_part

__all__ = [
    "Dispatch",
    "GroupedLinear",
    "beyond_capacity",
    "combine",
    "dispatch",
    "gather_sequence",
    "plan_dispatch",
    "router_product",
    "take_part",
    "weighted_activation",
]
