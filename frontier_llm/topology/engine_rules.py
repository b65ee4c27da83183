"""What each engine of the data parallelism, native, FSDP or DeepSpeed, cannot do beside it, and why."""

from __future__ import annotations

from collections.abc import Iterator

from frontier_llm.blueprint import model_parameters
from frontier_llm.blueprint.optimizers import optimizer_rule
from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError, Problem, divisors, nearest
from frontier_llm.machine import load_machine


def in_flight(config: RunConfig) -> str:
    """'one' or 'many' communications of a rank at a time: the run's own word, else that of its machine."""
    chosen = config.comm.in_flight
    return load_machine(config.machine).in_flight.mode if chosen == "auto" else chosen


def engine_problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """What the engines that bring their own data parallelism cannot do, and why."""
    parallel, precision = config.parallel, config.precision
    deepspeed, fsdp = config.optimizer.engine == "deepspeed", parallel.data_mode == "fsdp"
    native = not deepspeed and not fsdp
    if not native and in_flight(config) == "one":
        who = "fsdp" if fsdp else "deepspeed"
        what = f"one communication at a time on {config.machine}, but {who} issues its own beside ours, in an order of its own"
        fix = "use the native engine with data_mode=zero, or set comm.in_flight=many where many at a time do not hang"
        yield Problem("comm.in_flight", what, fix)
    if deepspeed and parallel.context > 1:
        fix = "use the native engine, or set parallel.context=1"
        yield Problem("optimizer.engine", f"deepspeed with context {parallel.context} was never tried", fix)
    if fsdp and deepspeed:
        yield Problem("parallel.data_mode", "fsdp and the engine deepspeed would both cut the weights", "choose one of them")
    if parallel.zero > 1:
        fix = "set parallel.data_mode=fsdp, which splits gradients and weights too, or zero=1"
        yield Problem("parallel.zero", f"{parallel.zero} is not supported: zero splits the optimizer state, 0 = not, 1 = over dp", fix)
    if parallel.zero == 0 and deepspeed:
        fix = "set parallel.zero=1, or optimizer.engine=native"
        yield Problem("parallel.zero", "without ZeRO there is nothing for DeepSpeed to do", fix)
    if fsdp and parallel.pipeline > 1:
        what = f"{parallel.pipeline} stages with fsdp: weights would be gathered and gradients reduced once per microbatch, and a pipeline needs many"
        yield Problem("parallel.pipeline", what, "set parallel.pipeline=1, or data_mode=zero")
    if parallel.data_shard is not None:
        yield from _data_shard_problems(config, parallel.data_shard, world_size)
    try:
        rule = optimizer_rule(config.optimizer.name)
    except ConfigError as error:
        yield from error.problems
    else:
        if not native and any(rule.whole(one) or rule.statistics(one) for one in model_parameters(config.model).values()):
            what = f"{rule.name} needs whole matrices or sums over them, which {'fsdp' if fsdp else 'DeepSpeed'} cuts"
            yield Problem("optimizer.name", what, "use the native engine with data_mode=zero")
    if deepspeed and precision.dtype not in ("fp32", "bf16"):
        fix = "use bf16 or fp32, or optimizer.engine=native"
        yield Problem("precision.dtype", f"{precision.dtype} with the engine deepspeed is not supported", fix)
    for where, asked, what, fix in (
        ("guard.recompute_interval", config.guard.recompute_interval > 0, "can compute a step again", "set it to 0"),
        ("precision.gradient_wire", precision.gradient_wire != "full", "narrows gradients on their way", "set it to full"),
        ("optimizer.validated", config.optimizer.validated == "after", "can undo an update", "set it to before"),
    ):
        if asked and not native:
            yield Problem(where, f"only the native engine {what}", f"{fix}, or use the native engine with data_mode=zero")
    if config.optimizer.deepspeed_config is not None and not deepspeed:
        fix = "set optimizer.engine=deepspeed, or leave it out"
        yield Problem("optimizer.deepspeed_config", "is given, but the engine is native", fix)


def _data_shard_problems(config: RunConfig, shard: int, world_size: int) -> Iterator[Problem]:
    """Replicas that share out the weights, of those that there are."""
    parallel, where = config.parallel, "parallel.data_shard"
    replicas = max(1, world_size // (parallel.tensor * parallel.pipeline))  # of dp x cp
    if parallel.data_mode != "fsdp":
        yield Problem(where, "shares out the weights, which data_mode=zero keeps whole", "set parallel.data_mode=fsdp, or leave it out")
    elif replicas % shard:
        yield Problem(where, f"{shard} does not divide the {replicas} replicas", f"use one of {nearest(shard, divisors(replicas), 3)}")
