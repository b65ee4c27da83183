"""Expert parallelism: tokens are sent to the ranks that hold their experts, and the results are sent back."""

from frontier_llm.parallel.expert.dispatch import Departure, ToNodes, combine, dispatch
from frontier_llm.parallel.expert.grouped import GroupedLinear, router_product
from frontier_llm.parallel.expert.numbers import beyond_capacity, count_numbers
from frontier_llm.parallel.expert.plan import Choices, Dispatch, plan_dispatch
from frontier_llm.parallel.expert.sequence import gather_sequence, take_part

__all__ = [
    "Choices",
    "Departure",
    "Dispatch",
    "GroupedLinear",
    "ToNodes",
    "beyond_capacity",
    "combine",
    "count_numbers",
    "dispatch",
    "gather_sequence",
    "plan_dispatch",
    "router_product",
    "take_part",
]
