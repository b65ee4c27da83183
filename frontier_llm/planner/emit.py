"""Writes a plan as a run file, in which only the data is missing, and the command that submits the run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd, log
from pathlib import Path
from typing import Any

import yaml

from frontier_llm.blueprint.layout import Layout, run_keys
from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.config import (
    CommConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    available,
    load_run,
    longest_phase,
    phases_of,
    planned_tokens,
)
from frontier_llm.config.fields import TokenSteps
from frontier_llm.config.load import compose, merge, parse_overrides
from frontier_llm.config.phases import PRODUCTION
from frontier_llm.config.schema import PhaseConfig
from frontier_llm.errors import ConfigError
from frontier_llm.files import write_atomically
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.machine.schema import Machine
from frontier_llm.planner.algorithms import uses_hierarchical
from frontier_llm.planner.operations import TOKENS_PER_PARAMETER, Campaign
from frontier_llm.planner.report import layout_words
from frontier_llm.planner.search import Plan, Search, search
from frontier_llm.topology.grid import tensor_groups_stay_in_nodes
from frontier_llm.topology.plan import balanced, make_plan
from frontier_llm.units import GIB, plural, strict_json

SITES = ("frontier", "lumi", "local")

SAID = ("tensor", "pipeline", "schedule", "zero", "axis_order")  # Always written, even if they have default values.
FILL_IN = "FILL_IN"  # Placeholder of the dataset. Training reports it as missing.
# Number of parameters → highest learning rate of the GPT-3 model of this size (arXiv:2005.14165, table 2.1). After a
# warm-up of 375 M tokens, the rate decays by cosine to a tenth.
RATES = {125e6: 6e-4, 350e6: 3e-4, 760e6: 2.5e-4, 1.3e9: 2e-4, 2.7e9: 1.6e-4, 6.7e9: 1.2e-4, 13e9: 1e-4, 175e9: 6e-5}
WARMUP_TOKENS = 375e6
FULL_SHARE = 54 / 64  # share of the device's memory above which a layout is called full
ROOM_SHARE = 0.9  # a roomier plan needs at most this share of the memory that the run's own plan needs


@dataclass(frozen=True)
class Request:
    """The user's arguments: model, machine or run as names of shipped files or paths, token budget, typed settings."""

    model: str
    machine: str
    run: str | None = None
    tokens: float | None = None
    words: Sequence[str] = ()  # settings as words `section.key=value`

    @property
    def settings(self) -> dict[str, Any]:
        """The typed settings by section, nested as in a run file."""
        return parse_overrides(self.words)


def recipe(plan: Plan, tokens: float, saves: Campaign | None) -> dict[str, Any]:
    """Return the keys that a new run file needs in addition to its layout: learning rate, steps and save interval."""
    parameters = total_parameters(plan.model)
    steps = ceil(tokens / plan.step_tokens)
    lr = RATES[min(RATES, key=lambda size: abs(log(parameters / size)))]
    warmup = min(ceil(WARMUP_TOKENS / plan.step_tokens), max(1, steps // 10))
    return {
        "optimizer": {"lr": lr, "min_lr": lr / 10, "warmup_steps": warmup},
        "data": {"train": FILL_IN},
        "train": {"steps": steps, **({"save_interval": saves.interval_steps} if saves else {})},
    }


def layout_keys(plan: Plan, machine: Machine, rates: Rates) -> dict[str, dict[str, Any]]:
    """Return the sections and keys of a run file that select the plan's layout."""
    keys = run_keys(plan.layout)
    counts = tuple(stage.num_layers for stage in plan.stages)
    if counts != balanced(plan.model, len(counts)):
        keys["parallel"]["stage_layers"] = list(counts)
    if not tensor_groups_stay_in_nodes(plan.layout.tp, machine.devices_per_node, plan.layout.devices):
        keys["parallel"]["cross_node_tensor"] = True
    if machine.algorithms and uses_hierarchical(plan, rates):
        keys["comm"]["algorithms"] = machine.algorithms
    return keys


def as_overrides(content: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return sections and keys of a run file as words `section.key=value`."""
    return tuple(
        f"{section}.{key}={_word(value)}" for section, values in content.items() for key, value in values.items()
    )


def run_content(machine_name: str, machine: Machine, outcome: Search, rates: Rates, name: str) -> dict[str, Any]:
    """Return the content of a run file for the search's choice, with all keys of the layout.

    The caller adds the model and the data.
    """
    keys = layout_keys(outcome.best, machine, rates)
    batch = {"global_batch": outcome.global_batch, **keys["batch"]}
    train = {"run_dir": f"runs/{name}", **keys["train"]}
    return {"machine": machine_name, **keys, "batch": batch, "train": train}


def _shortened(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content without keys that have their default values, except the keys in SAID."""
    defaults = {"parallel": ParallelConfig(), "precision": PrecisionConfig(), "comm": CommConfig()}
    short = {
        section: {
            key: value
            for key, value in content[section].items()
            # `data` follows from the number of devices
            if key in SAID or (key != "data" and value != getattr(default, key))
        }
        for section, default in defaults.items()
    }
    return {section: values for section, values in {**content, **short}.items() if values}


def emit(
    path: Path,
    request: Request,
    machine: Machine,
    outcome: Search,
    rates: Rates,
    saves: Campaign | None,
) -> str:
    """Write the run file and check that it loads and that its layout is legal.

    If the request names a run, the written file has this run as its `base:`. The file then overrides all keys of the
    layout, and its number of steps keeps the run's number of tokens. Otherwise the file has all keys of a run but the
    data.

    Returns the text for the user: the file, the keys to fill in, and the command that starts or submits the run.
    Raises ConfigError if the file does not load or the layout is not legal.
    """
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", path.stem)
    best = outcome.best
    choice = run_content(_machine_reference(request.machine, path.parent), machine, outcome, rates, name)
    todo = []
    if request.run:
        base = load_run(str(request.run))
        planned = load_run(str(request.run), request.words)
        choice["batch"]["global_batch"] = base_batch(planned, outcome.global_batch)
        train = {**choice["train"], **train_changes(base, planned, best, request.tokens)}
        if "steps" in request.settings.get("train", {}):
            train.pop("steps", None)
        content = merge(request.settings, {**choice, "train": train})
        content = {"base": reference(request.run, path.parent), **content}
    else:
        changes = request.settings.get("model")
        model: str | dict[str, object] = {"base": request.model, **changes} if changes else request.model
        tokens = request.tokens or (saves.tokens if saves else TOKENS_PER_PARAMETER * total_parameters(outcome.model))
        choice = _shortened(choice)
        needs = recipe(best, tokens, saves)
        content = {"model": model, **choice, **needs, "train": {**choice["train"], **needs["train"]}}
        content = merge({key: value for key, value in request.settings.items() if key != "model"}, content)
        todo = [
            "set data.train to prefixes that `frontier-llm data tokenize` has written; optimizer.lr is only a "
            "starting value, taken from the GPT-3 model of the nearest size"
        ]
    head = [
        layout_words(best),
        f"planned for {plural(outcome.nodes, 'node')} of {machine.name}: {best.step_s:.4g} s per step simulated, "
        f"{best.tokens_per_s_per_device:.1f} tokens/s per device, {best.peak_bytes / GIB:.1f} GiB on the fullest rank",
        *todo,
    ]
    write_run(path, head, content, outcome.nodes * machine.devices_per_node)
    local = request.run and outcome.nodes == 1
    start = f"frontier-llm train {path}" if local else submit_command(path, machine, outcome.nodes, content)
    return "\n".join([f"wrote {path}", *todo, start])


def base_batch(run: RunConfig, planned_batch: int) -> int:
    """Return `batch.global_batch` of a run that was planned with `planned_batch` sequences per step.

    The longest phase is planned. If `planned_batch` is the batch of this phase, the run's own value stays, because
    phases without a batch use it.
    """
    return run.batch.global_batch if planned_batch == longest_phase(run).config.batch.global_batch else planned_batch


def train_changes(base: RunConfig, planned: RunConfig, plan: Plan, tokens: float | None) -> dict[str, Any]:
    """Return the keys of `train` that a run needs for this plan: its number of steps, and its phases.

    `planned` is `base` with the settings that the user has typed. The steps are those of `tokens`. If `tokens` is None,
    the run keeps the number of tokens of `base`, so a number of steps that is given in tokens stays unchanged. The
    phases are only changed if one sets a microbatch.
    """
    changes: dict[str, Any] = {}
    is_duration = isinstance(base.train.steps, TokenSteps)
    # each phase of a run states its own number of steps
    if not planned.train.phases and not (is_duration and tokens is None):
        steps = ceil((tokens or planned_tokens(phases_of(base))) / plan.step_tokens)
        if is_duration or steps != base.train.steps:
            changes["steps"] = steps
    if _sets_microbatch(planned):
        changes["phases"] = _phases_with(plan.layout, planned)
    return changes


def write_run(path: Path, head: Sequence[str], content: Mapping[str, Any], devices: int) -> None:
    """Write a run file with the lines `head` as comments.

    Raises ConfigError if it does not load, if its layout is not legal on `devices` devices, or if `path` is a file that
    the run is read from. An existing file at `path` is then unchanged.
    """
    text = yaml.safe_dump(
        content,
        sort_keys=False,
        default_flow_style=None,
        width=140,
    )
    building = path.with_name(f".{path.stem}.{os.urandom(8).hex()}.yaml")
    write_atomically(building, "".join(f"# {line}\n" for line in head) + text)
    try:
        if path.resolve() in _inputs(building, content):
            raise ConfigError(f"{path} is read by the run that would replace it", "choose another name for --emit")
        make_plan(load_run(str(building)), devices)
        building.replace(path)
    except ConfigError as error:
        raise ConfigError(
            [replace(one, where=one.where.replace(str(building), str(path))) for one in error.problems]
        ) from None
    finally:
        building.unlink(missing_ok=True)


def _inputs(run: Path, content: Mapping[str, Any]) -> set[Path]:
    """Return the files that a written run is read from: its bases, its model file and its machine file."""
    model = content.get("model")
    names = [content.get("machine"), model.get("base") if isinstance(model, Mapping) else model]
    folders = (run.parent, Path())
    named = {(folder / name).resolve() for name in names if isinstance(name, str) for folder in folders}
    return named.union(compose(run, "runs")[1])


def reference(run: str, folder: Path) -> str:
    """Return the reference from a file in `folder` to its base run: a shipped run's name, or a relative path."""
    return run if run in available("runs") else os.path.relpath(run, folder)


def _machine_reference(machine: str, folder: Path) -> str:
    """Return the reference from a file in `folder` to a machine: a shipped name, or a path relative to `folder`."""
    return os.path.relpath(machine, folder) if machine.endswith((".yaml", ".yml")) else machine


def submit_command(path: Path, machine: Machine, nodes: int, content: Mapping[str, Any]) -> str:
    """Return the commands that submit the run.

    `frontier-llm submit` renders the site's sbatch script for the file. If the package has a ready-made script for the
    model on Frontier, a second command passes the same layout to the script as overrides.
    """
    site = machine.name if machine.name in SITES else "generic"
    lines = [f"frontier-llm submit {path} --site {site} --nodes {nodes} --account PROJECT"]
    script = PRODUCTION.get(str(content.get("model")))  # a file with `base: RUN` names no model
    if script and site == "frontier":
        sections = ("parallel", "batch", "precision", "comm", "optimizer", "data", "train")
        words = as_overrides(
            {
                section: {key: value for key, value in content.get(section, {}).items() if key != "run_dir"}
                for section in sections
            }
        )
        lines.append(f"sbatch --account=PROJECT --nodes={nodes} slurm/{script}.sbatch {' '.join(words)}")
    return "\n".join(lines)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        return strict_json(value, indent=None)
    return str(value).replace(" ", "")


def roomier_plan(config: RunConfig, nodes: int, devices: int, own: Plan) -> Plan | None:
    """Return the fastest layout on `devices` devices of `nodes` nodes that needs less memory than the run's own plan.

    Such a layout is called the roomier plan. Returns None if there is none.

    The global batch, the model, the precision and the engine (native or FSDP) are those of the run. The layout needs
    at most FULL_SHARE of the device's memory, and at most ROOM_SHARE of the memory of `own`.
    """
    numbers = rates(load_machine(config.machine))
    limit_bytes = min(FULL_SHARE * numbers.memory_bytes, ROOM_SHARE * own.peak_bytes)
    longest = longest_phase(config).config
    outcome = search(
        longest.model,
        replace(numbers, memory_bytes=limit_bytes, node_devices=devices // nodes),
        nodes,
        longest.batch.global_batch,
        {
            "sharding": "weights" if own.layout.sharding == "weights" else "optimizer",
            "gradient_wire": longest.precision.gradient_wire,
        },
        dtype=longest.precision.dtype,
        optimizer=longest.optimizer.name,
    )
    if not outcome.plans:
        return None
    fastest = min(outcome.plans, key=lambda plan: plan.step_s)
    return replace(fastest, limit_bytes=numbers.memory_bytes)


def plan_overrides(config: RunConfig, roomier: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the overrides of both plans: the values of the layout's keys in the run file, and in the roomier plan.

    Both plans state the same keys, so that two jobs have equal plans only if their layouts are equal.
    """
    machine = load_machine(config.machine)
    keys = layout_keys(roomier, machine, rates(machine))
    keys["comm"].setdefault("algorithms", CommConfig().algorithms)
    keys["parallel"].setdefault("cross_node_tensor", False)
    if _sets_microbatch(config):
        keys["train"]["phases"] = _phases_with(roomier.layout, config)
    own: Mapping[str, Mapping[str, Any]] = config.model_dump(mode="json", exclude={"train": {"phases"}})
    own_keys = {section: {key: own[section].get(key) for key in values} for section, values in keys.items()}
    if "phases" in keys["train"]:
        own_keys["train"]["phases"] = [_as_written(phase) for phase in config.train.phases]
    return as_overrides(own_keys), as_overrides(keys)


def _sets_microbatch(config: RunConfig) -> bool:
    """Return True if a phase of the run sets its own microbatch."""
    return any(phase.batch.micro_batch is not None for phase in config.train.phases)


def _phases_with(layout: Layout, config: RunConfig) -> list[dict[str, Any]]:
    """Return the phases of a run. If a phase sets a microbatch, the microbatch is replaced by one for `layout`.

    It is the largest divisor of the layout's microbatch that also divides the number of samples of a replica.
    """
    phases = []
    for phase in config.train.phases:
        written = _as_written(phase)
        if phase.batch.micro_batch is not None:
            samples = (phase.batch.global_batch or config.batch.global_batch) // layout.dp
            written["batch"]["micro_batch"] = gcd(layout.micro_batch, samples)
        phases.append(written)
    return phases


def _as_written(phase: PhaseConfig) -> dict[str, Any]:
    """Return the keys that a phase sets."""
    return phase.model_dump(mode="json", exclude_unset=True)
