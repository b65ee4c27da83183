"""`ops tune`: times all available attention back-ends at a model's shapes and writes a table with their order.

With `ops.attention: auto`, the first back-end of the table that supports the run is used. Each round of the measurement
calls every back-end once.
"""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch

from frontier_llm.config.model import ModelConfig
from frontier_llm.experiments.measure.machine_file import write_yaml
from frontier_llm.experiments.measure.op_cases import CASES, Shapes
from frontier_llm.experiments.measure.timing import interleave
from frontier_llm.ops import working_dtype
from frontier_llm.ops.attention_table import AttentionRule, Backend
from frontier_llm.ops.driver import architecture_of_device
from frontier_llm.ops.providers import PROVIDERS


def tune(
    table: Path,
    model: ModelConfig,
    micro_batch: int,
    dtype_name: str,
    device: str,
    rounds: int = 5,
) -> dict[str, Any]:
    """Write the attention table to `table`: one rule without ALiBi and one with ALiBi.

    Returns the best time of each back-end in seconds, and the reason for each back-end that did not run.
    """
    architecture = architecture_of_device() if device == "cuda" else "cpu"
    shapes = Shapes(model, micro_batch, working_dtype(dtype_name), torch.device(device))
    rules = []
    report = {}
    for extras, name in ((False, "attention"), (True, "attention_alibi")):
        seconds, faults = _timed(name, shapes, device, rounds)
        order = tuple(sorted(seconds, key=lambda backend: seconds[backend]))
        report[name] = {"seconds": {backend: seconds[backend] for backend in order}, "not_run": faults}
        if order:
            what = (
                f"B {micro_batch}, S {model.sequence_length}, {model.heads}/{model.num_kv_heads} heads, "
                f"{dtype_name}, forward and backward"
            )
            times = ", ".join(f"{backend} {seconds[backend] * 1e3:.3g} ms" for backend in order)
            source = f"frontier-llm ops tune on {platform.node()}, torch {torch.__version__}: {what}: {times}"
            rule = {"architecture": architecture, "head_dim": model.dim_per_head, "extras": extras, "order": order}
            rules.append(AttentionRule.model_validate({**rule, "tag": "measured", "source": source}))
    write_yaml(table, {"title": "measured", "rules": [rule.model_dump(mode="json") for rule in rules]})
    return report


def _timed(case: str, shapes: Shapes, device: str, rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return the best seconds of each back-end, and the reason for each back-end that could not run."""
    refusals = {name: PROVIDERS[name].refusal("attention", device, shapes.dtype) for name in get_args(Backend)}
    faces: dict[str, Any] = {
        name: SimpleNamespace(attention=PROVIDERS[name].load()["attention"])
        for name, refusal in refusals.items()
        if not refusal
    }
    best, faults = interleave(
        {name: CASES[case](face, shapes).ways()["ours"] for name, face in faces.items()},
        rounds,
        device,
    )
    return best, {name: str(refusal) for name, refusal in refusals.items() if refusal} | faults
