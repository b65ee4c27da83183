"""rank ↔ (pp, dp, cp, tp), groups as tuples of ranks, layers → stages, and what each rank owns."""

from frontier_llm.topology.buckets import BucketPlan, plan_buckets
from frontier_llm.topology.engine_rules import in_flight
from frontier_llm.topology.grid import AXES, AXIS_ORDERS, Grid
from frontier_llm.topology.plan import ParallelPlan, make_plan, plan_as_given, plan_problems
from frontier_llm.topology.rectangles import Rectangle, contiguous_runs, rectangles_of_run, spans
from frontier_llm.topology.sequence import held_positions
from frontier_llm.topology.shards import BUCKET_ALIGNMENT, ShardSpec, shard
from frontier_llm.topology.stages import head_cost_in_layers, split_layers

__all__ = [
    "AXES",
    "AXIS_ORDERS",
    "BUCKET_ALIGNMENT",
    "BucketPlan",
    "Grid",
    "ParallelPlan",
    "Rectangle",
    "ShardSpec",
    "contiguous_runs",
    "head_cost_in_layers",
    "held_positions",
    "in_flight",
    "make_plan",
    "plan_as_given",
    "plan_buckets",
    "plan_problems",
    "rectangles_of_run",
    "shard",
    "spans",
    "split_layers",
]
