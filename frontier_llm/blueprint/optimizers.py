"""What each optimizer keeps of each parameter: ZeRO's slices, memory, checkpoints and the comparison of replicas read this alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from frontier_llm.blueprint.parameters import Parameter

MASTER = "master"  # the wide copy of the weights, which every optimizer keeps first


@dataclass(frozen=True)
class OptimizerRule:
    """The states of one optimizer, in fp32 (fp64 under fp64), each of the shape of its parameter, by name."""

    name: str  # optimizer.name in a run file
    states: Callable[[Parameter], tuple[str, ...]]  # beside the master copy, in the order in which a shard file holds them
    whole: Callable[[Parameter], bool] = lambda parameter: False  # its update needs the whole tensor: ZeRO must not cut it
