"""FLOPs, bytes and seconds in closed form or by table: per rank, per stage, per action; for one layout or for thousands at once."""

from frontier_llm.costs.flops import hardware_flops_per_token, matrix_parameters, model_flops_per_token
from frontier_llm.costs.parameters import parameter_shapes, rank_parameters, total_parameters
from frontier_llm.costs.workload import Workload, from_config

__all__ = [
    "Workload",
    "from_config",
    "hardware_flops_per_token",
    "matrix_parameters",
    "model_flops_per_token",
    "parameter_shapes",
    "rank_parameters",
    "total_parameters",
]
