"""Checks of the settings that a run's data-parallel engine (native, FSDP or DeepSpeed) does not support."""

from __future__ import annotations

from collections.abc import Iterator

from frontier_llm.blueprint.optimizers import optimizer_rule
from frontier_llm.blueprint.parameters import model_parameters
from frontier_llm.config import RunConfig
from frontier_llm.errors import ConfigError, Problem, divisors, nearest
from frontier_llm.machine.load import load_machine


def in_flight(config: RunConfig, architecture: str | None = None) -> str:
    """Return 'one' or 'many': how many communications a rank may have in flight at a time.

    With `comm.in_flight=auto` the machine file and the device decide (`Machine.in_flight_on`). `architecture` is the
    architecture of this rank's GPU. None means the architecture in the machine file.
    """
    chosen = config.comm.in_flight
    if chosen != "auto":
        return chosen
    machine = load_machine(config.machine)
    return machine.in_flight_on(architecture or machine.device.architecture).mode


def in_flight_problem(config: RunConfig, architecture: str | None = None) -> Problem | None:
    """Return a Problem if only one communication may be in flight, but the run's engine would have several.

    FSDP communicates during forward and backward. Over one axis it has one communicator, whose collectives run one
    after the other in an order that is equal on all ranks. FSDP is therefore allowed if there is no other communicator.
    The collectives of a second communicator (tensor, context or expert parallelism, or the copies of HSDP) would
    overlap with it.

    DeepSpeed's ZeRO-1 communicates only after the last backward. Its communication and this package's never overlap
    (`comm.end_communication`), so every layout is allowed.
    """
    parallel = config.parallel
    if parallel.data_mode != "fsdp" or in_flight(config, architecture) == "many":
        return None
    second = [f"parallel.{key}" for key in ("tensor", "context", "expert") if getattr(parallel, key) > 1]
    if parallel.data_shard is not None:
        second.append("parallel.data_shard (sums over the copies)")
    if not second:
        return None
    device = f"{architecture} devices" if architecture else config.machine
    return Problem(
        where="comm.in_flight",
        what=(
            f"fsdp's collectives would overlap with those of {', '.join(second)}, and only one communication may be "
            f"in flight on {device}"
        ),
        fix="remove these keys (fsdp over all replicas alone is allowed), use data_mode=zero, or set "
        "comm.in_flight=many if a hang test has passed here (frontier-llm bench comm RUN --hang-test)",
    )


def engine_problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Yield a Problem for each setting that the engine of this run does not support."""
    parallel = config.parallel
    precision = config.precision
    deepspeed = config.optimizer.engine == "deepspeed"
    fsdp = parallel.data_mode == "fsdp"
    native = not deepspeed and not fsdp
    who = "fsdp" if fsdp else "deepspeed"
    instead = "use the native engine with data_mode=zero"
    if problem := in_flight_problem(config):
        yield problem
    if deepspeed and parallel.context > 1:
        yield Problem(
            where="optimizer.engine",
            what=f"deepspeed with context {parallel.context} has never been tested",
            fix="use the native engine, or set parallel.context=1",
        )
    if fsdp and deepspeed:
        yield Problem(
            where="parallel.data_mode",
            what="is fsdp, which cannot be combined with the engine deepspeed: both split the optimizer state",
            fix="set parallel.data_mode=zero, or optimizer.engine=native",
        )
    if parallel.zero > 1:
        yield Problem(
            where="parallel.zero",
            what=(
                f"{parallel.zero} is not supported: 0 keeps a complete optimizer state on each replica, 1 splits it "
                f"over dp"
            ),
            fix="set parallel.zero=1, or set parallel.data_mode=fsdp, which also splits gradients and weights",
        )
    if parallel.zero == 0 and deepspeed:
        yield Problem(
            where="parallel.zero",
            what="is 0, but the engine deepspeed needs ZeRO-1",
            fix="set parallel.zero=1, or optimizer.engine=native",
        )
    if fsdp and parallel.pipeline > 1:
        yield Problem(
            where="parallel.pipeline",
            what=f"{parallel.pipeline} stages cannot be combined with fsdp, which would gather weights and reduce "
            "gradients for each of a pipeline's many microbatches",
            fix="set parallel.pipeline=1, or data_mode=zero",
        )
    if deepspeed and precision.dtype not in ("auto", "fp32", "bf16"):
        yield Problem(
            where="precision.dtype",
            what=f"{precision.dtype} with the engine deepspeed is not supported",
            fix="use bf16 or fp32, or optimizer.engine=native",
        )
    if not native and config.guard.recompute_interval > 0:
        yield Problem(
            where="guard.recompute_interval",
            what=f"is {config.guard.recompute_interval}, but only the native engine can compute a step twice",
            fix=f"set it to 0, or {instead}",
        )
    if not native and precision.gradient_wire != "full":
        yield Problem(
            where="precision.gradient_wire",
            what=f"is {precision.gradient_wire}, which only the native engine supports",
            fix=f"set it to full, or {instead}",
        )
    if config.optimizer.deepspeed_config is not None and not deepspeed:
        yield Problem(
            where="optimizer.deepspeed_config",
            what="is given, but the engine is native",
            fix="set optimizer.engine=deepspeed, or remove it",
        )
    if parallel.data_shard is not None:
        yield from _data_shard_problems(config, parallel.data_shard, world_size)
    yield from _optimizer_problems(config, native, who)


def _optimizer_problems(config: RunConfig, native: bool, who: str) -> Iterator[Problem]:
    """Yield a Problem if the optimizer is unknown, or if it needs complete matrices and the engine cuts them."""
    try:
        rule = optimizer_rule(config.optimizer.name)
    except ConfigError as error:
        yield from error.problems
        return
    if not native and any(rule.whole(one) or rule.statistics(one) for one in model_parameters(config.model).values()):
        what = f"{rule.name} needs complete matrices or sums over them, but {who} splits the matrices"
        yield Problem(where="optimizer.name", what=what, fix="use the native engine with data_mode=zero")


def _data_shard_problems(config: RunConfig, shard: int, world_size: int) -> Iterator[Problem]:
    """Yield a Problem if `parallel.data_shard` has no effect, or if it does not divide the number of replicas."""
    parallel = config.parallel
    where = "parallel.data_shard"
    replicas = max(1, world_size // (parallel.tensor * parallel.pipeline))  # ranks of dp x cp
    if parallel.data_mode != "fsdp":
        yield Problem(
            where=where,
            what="is given, but only data_mode=fsdp shards the weights",
            fix="set parallel.data_mode=fsdp, or remove it",
        )
    elif replicas % shard:
        yield Problem(
            where=where,
            what=f"{shard} does not divide the {replicas} replicas",
            fix=f"use one of {nearest(shard, divisors(replicas), 3)}",
        )
