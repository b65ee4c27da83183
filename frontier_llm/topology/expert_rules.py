"""Rules for the layout of experts: which degrees a model with experts allows, and with which settings."""

from __future__ import annotations

from collections.abc import Iterator

from frontier_llm.config import ModelConfig, RunConfig
from frontier_llm.errors import Problem, divisors, nearest


def routes_equal_parts(model: ModelConfig, tp: int, cp: int) -> bool:
    """Return False if tp does not divide the positions of a cp rank in a model with experts.

    Each tp rank would then route all of these positions, and the experts' gradients would be tp times too large.
    """
    return model.moe is None or model.sequence_length // cp % tp == 0


def expert_problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Yield a Problem for invalid expert-parallel degrees and for settings that models with experts do not support."""
    model = config.model
    parallel = config.parallel
    moe = model.moe
    if moe is None:
        for key, degree in (("parallel.expert", parallel.expert), ("parallel.expert_tensor", parallel.expert_tensor)):
            if degree > 1:
                yield Problem(
                    where=key,
                    what=f"{degree}, but {model.name} has no experts",
                    fix=f"set {key}=1, or add a section `moe` to the model",
                )
        return
    plane = max(1, world_size // parallel.pipeline)
    for key, what, size, degree in (
        ("parallel.expert", "experts", moe.experts, parallel.expert),
        ("parallel.expert_tensor", "an expert's width", model.expert_hidden, parallel.expert_tensor),
    ):
        if size % degree:
            yield Problem(
                where=key,
                what=f"{degree} does not divide {what}, {size}",
                fix=f"use one of {nearest(degree, divisors(size), 3)}",
            )
    ranks = parallel.expert * parallel.expert_tensor
    if plane % ranks:
        degrees = [degree for degree in divisors(plane) if moe.experts % degree == 0]
        yield Problem(
            where="parallel.expert",
            what=f"expert {parallel.expert} x expert_tensor {parallel.expert_tensor} = {ranks} does not divide the "
            f"{plane} ranks of a stage (tensor x data)",
            fix=f"use one of {nearest(parallel.expert, degrees, 3)} for expert, with expert_tensor=1",
        )
    if not routes_equal_parts(model, parallel.tensor, parallel.context):
        rank_length = model.sequence_length // parallel.context
        context = f" / context {parallel.context} = {rank_length}" if parallel.context > 1 else ""
        yield Problem(
            where="model.sequence_length",
            what=f"{model.sequence_length}{context} is not divisible by tensor {parallel.tensor}: each tensor rank "
            "routes a part of the sequence",
            fix=f"set parallel.tensor to one of {nearest(parallel.tensor, divisors(rank_length), 3)}",
        )
    is_fsdp = parallel.data_mode == "fsdp"
    if is_fsdp or config.optimizer.engine == "deepspeed":
        engine = "fsdp" if is_fsdp else "deepspeed"
        yield Problem(
            where="parallel.data_mode" if is_fsdp else "optimizer.engine",
            what=f"{engine} splits all weights over the same ranks, but experts are replicated over other ranks",
            fix="use the native engine with data_mode=zero",
        )
    if ranks > 1 and config.guard.recompute_interval > 0:
        yield Problem(
            where="guard.recompute_interval",
            what="replicas have different experts if experts are split over them, so their gradients cannot be "
            "compared",
            fix="set it to 0, or parallel.expert=1 and expert_tensor=1",
        )
