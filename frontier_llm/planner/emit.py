"""A plan as a run file, and the command that queues it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from frontier_llm.blueprint.layout import SHARDING
from frontier_llm.config import available, load_model, load_run
from frontier_llm.machine import Machine, Rates
from frontier_llm.planner.algorithms import uses_hierarchical
from frontier_llm.planner.report import layout_words
from frontier_llm.planner.search import Search
from frontier_llm.topology import make_plan
from frontier_llm.topology.stages import balanced
from frontier_llm.units import GIB, plural

SITES = ("frontier", "lumi", "local")
SCRIPTS = {"gpt-1t": "slurm/train_1t.sbatch", "gpt-175b": "slurm/train_175b.sbatch", "gpt-22b": "slurm/train_22b.sbatch"}


def run_content(machine_name: str, machine: Machine, outcome: Search, rates: Rates, name: str) -> dict[str, Any]:
    """The run file's mapping for the search's choice; what it trains is the caller's to say."""
    plan = outcome.best
    layout = plan.layout
    parallel: dict[str, Any] = {
        "tensor": layout.tp,
        "pipeline": layout.pp,
        "schedule": layout.schedule,
        **({"data_mode": "fsdp"} if layout.sharding == "weights" else {"zero": SHARDING[layout.sharding]}),
        "axis_order": layout.axis_order,
    }
    if layout.cp > 1:
        parallel["context"] = layout.cp
    if layout.ep > 1:
        parallel["expert"] = layout.ep
    if layout.chunks > 1:
        parallel["chunks"] = layout.chunks
    if layout.sequence_parallel:
        parallel["sequence_parallel"] = True
    counts = tuple(stage.num_layers for stage in plan.stages)
    if counts != balanced(outcome.model, len(counts)):
        parallel["stage_layers"] = list(counts)
    return {
        "machine": machine_name,
        "parallel": parallel,
        "batch": {"global_batch": outcome.global_batch, "micro_batch": layout.micro_batch},
        **({"precision": {"gradient_wire": layout.gradient_wire}} if layout.gradient_wire != "full" else {}),
        "train": {"run_dir": f"runs/{name}", "recompute": layout.recompute},
        **({"comm": {"algorithms": machine.algorithms}} if machine.algorithms and uses_hierarchical(plan, rates) else {}),
    }


def emit(path: Path, model_name: str, machine_name: str, machine: Machine, outcome: Search, rates: Rates, run: str | None = None) -> str:
    """Write the run file, check that it loads and that its layout is legal, and return the command that starts or submits it.

    `model_name`, `machine_name` and `run` are what the user typed: names of shipped files, or paths. With a `run` the file starts
    from it and says every choice of the layout, so that none of the run's own is left.
    """
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", path.stem)
    best = outcome.best
    choice = run_content(machine_name, machine, outcome, rates, name)
    if run:
        layout = best.layout
        mode = "fsdp" if layout.sharding == "weights" else "zero"
        sequence = layout.sequence_parallel
        choice["parallel"] |= {
            "data": layout.dp,
            "context": layout.cp,
            "chunks": layout.chunks,
            "sequence_parallel": sequence,
            "data_mode": mode,
        }
        content = {"base": _reference(run, path.parent), **choice}
    elif outcome.model.sequence_length == load_model(model_name).sequence_length:
        content = {"model": model_name, **choice}
    else:
        content = {"model": {"base": model_name, "sequence_length": outcome.model.sequence_length}, **choice}
    head = (
        f"# {layout_words(best)}\n"
        f"# planned for {plural(outcome.nodes, 'node')} of {machine.name}: {best.step_s:.4g} s per step simulated, "
        f"{best.tokens_per_s_per_device:.1f} tokens/s per device, {best.peak_bytes / GIB:.1f} GiB on the fullest rank\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=140), encoding="utf-8")
    make_plan(load_run(str(path)), outcome.nodes * machine.devices_per_node)
    start = f"frontier-llm train {path}" if run and outcome.nodes == 1 else submit_command(path, machine, outcome.nodes, content)
    return f"wrote {path}\n{start}"


def _reference(run: str, folder: Path) -> str:
    """How a file in `folder` names the run it starts from: shipped ones by name, others by the way there."""
    return run if run in available("runs") else os.path.relpath(run, folder)


def submit_command(path: Path, machine: Machine, nodes: int, content: Mapping[str, Any]) -> str:
    """What to type to queue the run. `submit` renders the site's sbatch script around the file; where a ready-made script exists
    for the model, the same layout as overrides of it.
    """
    site = machine.name if machine.name in SITES else "generic"
    lines = [f"frontier-llm submit {path} --site {site} --nodes {nodes} --account PROJECT"]
    script = SCRIPTS.get(str(content.get("model")))  # a file on top of a run names no model
    if script and site == "frontier":
        words = [
            f"{section}.{key}={_word(value)}"
            for section in ("parallel", "batch", "precision", "comm")
            for key, value in content.get(section, {}).items()
        ]
        words.append(f"train.recompute={content['train']['recompute']}")
        lines.append(f"sbatch --account=PROJECT --nodes={nodes} {script} {' '.join(words)}")
    return "\n".join(lines)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
