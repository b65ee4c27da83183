"""A plan as a run file, and the command that queues it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from frontier_llm.config import load_model, load_run
from frontier_llm.machine import Machine
from frontier_llm.planner.candidates import AXIS_ORDERS
from frontier_llm.planner.report import RECOMPUTE_NAMES, layout_words
from frontier_llm.planner.search import Search
from frontier_llm.topology import make_plan
from frontier_llm.topology.stages import balanced

SITES = ("frontier", "lumi", "local")
SCRIPTS = {"gpt-1t": "slurm/train_1t.sbatch", "gpt-175b": "slurm/train_175b.sbatch", "gpt-22b": "slurm/train_22b.sbatch"}


def run_content(model_name: str, machine_name: str, found: Search, name: str) -> dict[str, Any]:
    """The run file's mapping for the search's choice."""
    plan = found.best
    w = plan.workload
    parallel: dict[str, Any] = {
        "tensor": int(w.tp),
        "pipeline": int(w.pp),
        "schedule": plan.schedule,
        "zero": int(w.zero),
        "axis_order": AXIS_ORDERS[int(w.dp_outer)],
    }
    if w.chunks > 1:
        parallel["chunks"] = int(w.chunks)
    if w.sp:
        parallel["sequence_parallel"] = True
    counts = tuple(stage.num_layers for stage in plan.stages)
    if counts != balanced(found.model, len(counts)):
        parallel["stage_layers"] = list(counts)
    return {
        "model": model_name,
        "machine": machine_name,
        "parallel": parallel,
        "batch": {"global_batch": found.global_batch, "micro_batch": int(w.B)},
        "train": {"run_dir": f"runs/{name}", "recompute": RECOMPUTE_NAMES[int(w.recompute)]},
    }


def emit(path: Path, model_name: str, machine_name: str, machine: Machine, found: Search) -> str:
    """Write the run file, check that it loads and that its layout is legal, and return the command that submits it.

    `model_name` and `machine_name` are what the user typed: names of shipped files, or paths.
    """
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", path.stem)
    content = run_content(model_name, machine_name, found, name)
    if found.model.sequence_length != load_model(model_name).sequence_length:
        content["model"] = {"base": model_name, "sequence_length": found.model.sequence_length}
    best = found.best
    head = (
        f"# {layout_words(best)}\n"
        f"# planned for {found.nodes} nodes of {machine.name}: {best.step_s:.4g} s per step simulated, "
        f"{best.tokens_per_s_per_device:.1f} tokens/s per device, {best.peak_bytes / 2**30:.1f} GiB on the fullest rank\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=140), encoding="utf-8")
    make_plan(load_run(str(path)), found.nodes * machine.devices_per_node)
    return f"wrote {path}\n{submit_command(path, machine, found.nodes, content)}"


def submit_command(path: Path, machine: Machine, nodes: int, content: Mapping[str, Any]) -> str:
    """What to type to queue the run. `submit` renders the site's sbatch script around the file; where a ready-made script exists
    for the model, the same layout as overrides of it.
    """
    site = machine.name if machine.name in SITES else "generic"
    lines = [f"frontier-llm submit {path} --site {site} --nodes {nodes} --account PROJECT"]
    script = SCRIPTS.get(str(content["model"]))
    if script and site == "frontier":
        words = [f"{section}.{key}={_word(value)}" for section in ("parallel", "batch") for key, value in content[section].items()]
        lines.append(
            f"sbatch --account=PROJECT --nodes={nodes} {script} " + " ".join([*words, f"train.recompute={content['train']['recompute']}"])
        )
    return "\n".join(lines)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
