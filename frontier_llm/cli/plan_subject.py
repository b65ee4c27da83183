"""What `frontier-llm plan` is asked to plan: the model, the machine, the number of nodes, and the batch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frontier_llm.cli.settings import refuse_settings
from frontier_llm.errors import ConfigError

if TYPE_CHECKING:
    from frontier_llm.config import ModelConfig, RunConfig
    from frontier_llm.machine.rates import Rates
    from frontier_llm.machine.schema import Machine

_DEFAULT_MACHINE = "frontier"
# key=value settings that affect a plan of a model, without a run
_USED = ("batch.global_batch", "precision.dtype", "optimizer.name")


@dataclass(frozen=True)
class PlanSubject:
    """What is planned: a model, alone or of a run, on nodes of a machine."""

    model: ModelConfig
    machine: Machine
    stack: str
    rates: Rates
    nodes: int
    global_batch: int
    fixed: dict[str, Any]  # fields of the layout that the user has fixed
    shared: dict[str, str]  # precision and optimizer of all layouts


def read_subject(args: argparse.Namespace) -> PlanSubject:
    """Return what the arguments ask to plan. Values that are not given get their defaults, with a note on stderr."""
    from frontier_llm.config.load import parse_overrides
    from frontier_llm.config.validate import fp16_note, model_problems
    from frontier_llm.machine.load import load_machine, own_stack, rates
    from frontier_llm.machine.precision import load_resolved
    from frontier_llm.planner.candidates import parse_fixed
    from frontier_llm.planner.search import default_global_batch

    run = load_resolved(args.run, args.overrides) if args.run else None
    base = _planned_phase(run) if run else None
    settings = parse_overrides(args.overrides)
    model = base.model if base else _model(args, settings)
    if problems := list(model_problems(model)):
        raise ConfigError(problems)
    args.machine = args.machine or machine_of_run(run)
    machine = load_machine(args.machine)
    stack = args.stack or own_stack(machine)
    numbers = rates(machine, stack)
    if note := base and fp16_note(base.precision, machine.device.flushes_fp16):
        print(f"note: {note}", file=sys.stderr)
    fixed = parse_fixed(args.fix)
    shared = {"dtype": base.precision.dtype, "optimizer": base.optimizer.name} if base else _state_choices(settings)
    nodes = args.nodes or _smallest(model, machine, numbers, fixed, shared)
    if nodes > numbers.nodes:
        print(f"note: {machine.name} has {numbers.nodes} nodes; the plan assumes {nodes}", file=sys.stderr)
    if base:
        batch = base.batch.global_batch
    else:
        batch = _global_batch(settings) or default_global_batch(model, nodes, numbers.node_devices)
    return PlanSubject(
        model=model,
        machine=machine,
        stack=stack,
        rates=numbers,
        nodes=nodes,
        global_batch=batch,
        fixed=fixed,
        shared=shared,
    )


def _planned_phase(run: RunConfig) -> RunConfig:
    """Return the configuration of the phase for which the layout is planned, and name this phase on stderr."""
    from frontier_llm.config import longest_phase

    longest = longest_phase(run)
    if run.train.phases:
        print(
            f"note: the layout is planned for {longest.describe()}, which has the longest sequences; submit and train "
            "check all phases",
            file=sys.stderr,
        )
    return longest.config


def machine_of_run(run: RunConfig | None) -> str:
    """Return the machine that the run file names. frontier without a run, or if the file names none."""
    if run is not None and "machine" in run.model_fields_set:
        return run.machine
    return _DEFAULT_MACHINE


def _smallest(
    model: ModelConfig, machine: Machine, numbers: Rates, fixed: Mapping[str, Any], shared: Mapping[str, str]
) -> int:
    from frontier_llm.planner.refusal import default_nodes

    nodes = default_nodes(model, machine, numbers, fixed, **shared)
    print(f"note: --nodes not given; {nodes} is the smallest power of two on which {model.name} fits", file=sys.stderr)
    return nodes


def _global_batch(settings: Mapping[str, Any]) -> int:
    """Return the typed global batch. 0 if there is none."""
    from frontier_llm.config import BatchConfig, build

    if "batch" not in settings:
        return 0
    return build(BatchConfig, {"micro_batch": 1, **settings["batch"]}, where="command line: batch").global_batch


def _state_choices(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the typed precision and optimizer as arguments of the search."""
    from frontier_llm.config import OptimizerConfig, PrecisionConfig, build

    precision = build(PrecisionConfig, settings.get("precision", {}), where="command line: precision")
    if precision.dtype == "auto":
        raise ConfigError("auto is chosen for a run on its machine", "name a type, or --run RUN", "precision.dtype")
    optimizer = build(OptimizerConfig, {"lr": 1e-4, **settings.get("optimizer", {})}, where="command line: optimizer")
    return {"dtype": precision.dtype, "optimizer": optimizer.name}


def _model(args: argparse.Namespace, settings: Mapping[str, Any]) -> ModelConfig:
    """Return the named model with the typed changes. Raises ConfigError with the closest valid name."""
    from frontier_llm.config import available, load_model
    from frontier_llm.errors import suggest

    refuse_settings(
        args.overrides,
        lambda key: not key.startswith("model.") and key not in _USED,
        f"without --run, plan uses model.* and {', '.join(_USED)}",
    )
    if not args.model:
        raise ConfigError("no model is named", "valid: " + ", ".join(available("models")), "plan MODEL")
    if args.model not in available("models") and _is_run(args.model):
        raise ConfigError(f"{args.model} is a run, not a model", f"frontier-llm plan --run {args.model}", "plan MODEL")
    try:
        return load_model(args.model, settings.get("model"))
    except ConfigError as error:
        if "no model file" in str(error) and not args.model.endswith((".yaml", ".yml")):
            raise ConfigError(f"no model {args.model!r}", suggest(args.model, available("models"))) from None
        raise


def _is_run(name: str) -> bool:
    from frontier_llm.config import available
    from frontier_llm.config.load import read_yaml

    path = Path(name)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return not {"model", "batch", "train"}.isdisjoint(read_yaml(path))
    return name in available("runs")
