"""A plan as a run file that is complete but for the data, and the command that queues it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from pathlib import Path
from typing import Any

import yaml

from frontier_llm.blueprint.layout import run_keys
from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.config import (
    CommConfig,
    ParallelConfig,
    PrecisionConfig,
    available,
    load_model,
    load_run,
    phases_of,
    planned_tokens,
)
from frontier_llm.config.phases import PRODUCTION
from frontier_llm.files import write_atomically
from frontier_llm.machine.rates import Rates
from frontier_llm.machine.schema import Machine
from frontier_llm.planner.algorithms import uses_hierarchical
from frontier_llm.planner.operations import TOKENS_PER_PARAMETER, Campaign
from frontier_llm.planner.report import layout_words
from frontier_llm.planner.search import Plan, Search
from frontier_llm.topology.plan import balanced, make_plan
from frontier_llm.units import GIB, plural

SITES = ("frontier", "lumi", "local")

SAID = ("tensor", "pipeline", "schedule", "zero", "axis_order")  # whatever their values
FILL_IN = "FILL_IN"  # no dataset: training with it names it
# parameters → highest learning rate of GPT-3's sizes, each decaying to a tenth by cosine after 375 M tokens
# (arXiv:2005.14165, table 2.1)
RATES = {125e6: 6e-4, 350e6: 3e-4, 760e6: 2.5e-4, 1.3e9: 2e-4, 2.7e9: 1.6e-4, 6.7e9: 1.2e-4, 13e9: 1e-4, 175e9: 6e-5}
WARMUP_TOKENS = 375e6


@dataclass(frozen=True)
class Request:
    """What the user typed: names of shipped files, or paths; a token budget."""

    model: str
    machine: str
    run: str | None = None
    tokens: float | None = None


def recipe(plan: Plan, tokens: float, saves: Campaign | None) -> dict[str, Any]:
    """What a run from nothing still needs: learning rate and length; saves as the campaign has them."""
    parameters = total_parameters(plan.model)
    steps = ceil(tokens / plan.step_tokens)
    lr = RATES[min(RATES, key=lambda size: abs(log(parameters / size)))]
    warmup = min(ceil(WARMUP_TOKENS / plan.step_tokens), max(1, steps // 10))
    return {
        "optimizer": {"lr": lr, "min_lr": lr / 10, "warmup_steps": warmup},
        "data": {"train": FILL_IN},
        "train": {"steps": steps, **({"save_interval": saves.interval_steps} if saves else {})},
    }


def run_content(machine_name: str, machine: Machine, outcome: Search, rates: Rates, name: str) -> dict[str, Any]:
    """The run file's mapping for the search's choice, each key of the layout; what it trains is the caller's to say."""
    plan = outcome.best
    keys = run_keys(plan.layout)
    counts = tuple(stage.num_layers for stage in plan.stages)
    if counts != balanced(outcome.model, len(counts)):
        keys["parallel"]["stage_layers"] = list(counts)
    if machine.algorithms and uses_hierarchical(plan, rates):
        keys["comm"]["algorithms"] = machine.algorithms
    batch = {"global_batch": outcome.global_batch, **keys["batch"]}
    train = {"run_dir": f"runs/{name}", **keys["train"]}
    return {"machine": machine_name, **keys, "batch": batch, "train": train}


def _shortened(content: Mapping[str, Any]) -> dict[str, Any]:
    """Without what a run file that starts from nothing need not say: keys at their default, unless they are the
    layout's first five.
    """
    defaults = {"parallel": ParallelConfig(), "precision": PrecisionConfig(), "comm": CommConfig()}
    short = {
        section: {
            key: value
            for key, value in content[section].items()
            # replicas follow from the number of devices
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
    """Write the run file, check that it loads and that its layout is legal, and return what to fill in and the command
    that starts or submits it.

    On top of a run the file says every choice of the layout, so that none of the run's own is left, and as many steps
    as keep the run's tokens; else it is complete but for the data.
    """
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", path.stem)
    best = outcome.best
    choice = run_content(request.machine, machine, outcome, rates, name)
    todo = []
    if request.run:
        content = {"base": reference(request.run, path.parent), **_on_top(choice, request, outcome)}
    else:
        same_length = outcome.model.sequence_length == load_model(request.model).sequence_length
        model: str | dict[str, object] = request.model
        if not same_length:
            model = {"base": request.model, "sequence_length": outcome.model.sequence_length}
        tokens = request.tokens or (saves.tokens if saves else TOKENS_PER_PARAMETER * total_parameters(outcome.model))
        choice = _shortened(choice)
        needs = recipe(best, tokens, saves)
        content = {"model": model, **choice, **needs, "train": {**choice["train"], **needs["train"]}}
        todo = [
            "fill in data.train, prefixes that `frontier-llm data tokenize` has written; optimizer.lr, of GPT-3's "
            "nearest size, is a start"
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


def _on_top(choice: dict[str, Any], request: Request, outcome: Search) -> dict[str, Any]:
    """The choice, and the steps that its batch needs for the run's tokens or for those asked for."""
    base = load_run(str(request.run))
    tokens = request.tokens or planned_tokens(phases_of(base))
    # phases count their own steps
    steps = base.train.steps if base.train.phases else ceil(tokens / outcome.best.step_tokens)
    return {**choice, "train": {**choice["train"], **({"steps": steps} if steps != base.train.steps else {})}}


def write_run(path: Path, head: Sequence[str], content: Mapping[str, Any], devices: int) -> None:
    """Write a run file under these lines. Raises ConfigError where it does not load, or its layout is not legal on
    so many devices.
    """
    text = yaml.safe_dump(
        content,
        sort_keys=False,
        default_flow_style=None,
        width=140,
    )
    write_atomically(path, "".join(f"# {line}\n" for line in head) + text)
    make_plan(load_run(str(path)), devices)


def reference(run: str, folder: Path) -> str:
    """How a file in `folder` names the run it starts from: shipped ones by name, others by the way there."""
    return run if run in available("runs") else os.path.relpath(run, folder)


def submit_command(path: Path, machine: Machine, nodes: int, content: Mapping[str, Any]) -> str:
    """What to type to queue the run. `submit` renders the site's sbatch script around the file; where a ready-made
    script exists for the model, the same layout as overrides of it.
    """
    site = machine.name if machine.name in SITES else "generic"
    lines = [f"frontier-llm submit {path} --site {site} --nodes {nodes} --account PROJECT"]
    script = PRODUCTION.get(str(content.get("model")))  # a file on top of a run names no model
    if script and site == "frontier":
        words = [
            f"{section}.{key}={_word(value)}"
            for section in ("parallel", "batch", "precision", "comm", "optimizer", "data", "train")
            for key, value in content.get(section, {}).items()
            if key != "run_dir"
        ]
        lines.append(f"sbatch --account=PROJECT --nodes={nodes} slurm/{script}.sbatch {' '.join(words)}")
    return "\n".join(lines)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace(" ", "")
