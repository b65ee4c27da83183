"""Planning from Python: the same search as `frontier-llm plan`, as an object that a notebook shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frontier_llm.api.run import Run, load_run
from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.cli.plan_subject import machine_of_run
from frontier_llm.config import load_model, longest_phase, phases_of, planned_tokens
from frontier_llm.machine.load import load_machine, own_stack, rates
from frontier_llm.machine.precision import resolve_precision
from frontier_llm.machine.rates import Rates
from frontier_llm.machine.schema import Machine
from frontier_llm.pages import table, text
from frontier_llm.planner import report
from frontier_llm.planner.candidates import parse_fixed
from frontier_llm.planner.emit import base_batch, recipe, run_content, train_changes
from frontier_llm.planner.figures import pipeline_chart, write_figures
from frontier_llm.planner.operations import TOKENS_PER_PARAMETER, campaign
from frontier_llm.planner.refusal import check_found, default_nodes
from frontier_llm.planner.search import Search, default_global_batch, search
from frontier_llm.schedule import timeline_svg
from frontier_llm.units import GIB


@dataclass(frozen=True, repr=False)
class Plan:
    """Result of a search: the chosen layout and the next best layouts. All times are simulated."""

    outcome: Search
    machine: Machine
    machine_name: str  # name or path that `plan` was called with
    stack: str
    rates: Rates
    run: Run | None  # the run that was planned; None: only a model was planned
    tokens: float  # tokens of the training, from which steps and costs follow

    @property
    def step_s(self) -> float:
        """Simulated seconds per step of the chosen layout."""
        return self.outcome.best.step_s

    @property
    def layout(self) -> dict[str, Any]:
        """Keys of a run file that describe the chosen layout, by section."""
        content = run_content(self.machine_name, self.machine, self.outcome, self.rates, self.outcome.model.name)
        return {name: content[name] for name in ("parallel", "batch", "precision", "comm") if name in content}

    def table(self) -> str:
        """Return the best layouts as a text table: the chosen layout first, then the others by preference."""
        return report.table(self.outcome.plans)

    def explain(self) -> str:
        """Return the reasons for the choice: where the step's time and the memory go, and what limits them."""
        return report.explain(self.outcome.best, self.machine, self.stack, self.rates)

    def as_dict(self) -> dict[str, Any]:
        """Return what `frontier-llm plan --json` prints."""
        cost = campaign(self.machine, self.outcome.best, self.tokens)
        return report.search_as_dict(self.outcome, self.machine, self.stack, self.rates, cost)

    def figure(self, path: str | Path) -> Path:
        """Write a self-contained HTML page with the figures of the plan, and return its path.

        Raises FrontierError if Plotly is not installed.
        """
        return write_figures(Path(path), self.outcome, self.machine, self.stack, self.rates)

    def to_run(self, overrides: Mapping[str, Any] | None = None, /) -> Run:
        """Return a run with this layout. `overrides` has keys as in `load_run`.

        A planned run keeps its directory and its number of tokens. If a model was planned, the run trains on synthetic
        tokens unless `overrides` names `data.train`. Its learning rate and number of steps are those of `frontier-llm
        plan --emit`.
        """
        choice = run_content(self.machine_name, self.machine, self.outcome, self.rates, self.outcome.model.name)
        best = self.outcome.best
        if self.run is not None:
            content = self.run.to_dict()
            config = self.run.config
            choice["batch"]["global_batch"] = base_batch(config, self.outcome.global_batch)
            keeps_tokens = self.tokens == planned_tokens(phases_of(config))
            content["train"] = {
                **content["train"],
                **choice["train"],
                "run_dir": content["train"]["run_dir"],
                **train_changes(config, config, best, None if keeps_tokens else self.tokens),
            }
        else:
            needs = recipe(best, self.tokens, None)
            model = self.outcome.model.model_dump(mode="json")
            content = {"model": model, **needs, "data": {"train": "synthetic"}}
            content["train"] = {**choice["train"], **needs["train"]}
        for section in ("machine", "parallel", "precision", "comm", "batch"):
            if section in choice:
                value = choice[section]
                content[section] = {**content.get(section, {}), **value} if isinstance(value, Mapping) else value
        return load_run(content, overrides)

    def __str__(self) -> str:
        cost = campaign(self.machine, self.outcome.best, self.tokens)
        return report.text(self.outcome, self.machine, self.stack, self.rates, cost)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the report, the pipeline's timeline, and the memory per rank. A notebook runs no script to show it."""
        best = self.outcome.best
        timeline = timeline_svg(best.simulated.timeline, pipeline_chart(best).title, "seconds (simulated)")
        ranks = [f"pipeline rank {rank}" for rank in range(len(best.memory))]
        purposes = [name for name in best.memory[0] if any(lines[name] for lines in best.memory)]
        rows = [[name, *(f"{lines[name] / GIB:.1f}" for lines in best.memory)] for name in purposes]
        rows.append(["sum", *(f"{sum(lines.values()) / GIB:.1f}" for lines in best.memory)])
        limit = f"{best.limit_bytes / GIB:.1f}"
        memory = table([f"GiB of {limit}", *ranks], rows)
        report_text = f'<pre style="white-space: pre; overflow-x: auto">{text(str(self))}</pre>'
        return f"{report_text}{timeline}{memory}"


def plan(
    model_or_run: str | Path | Mapping[str, Any] | Run,
    *,
    machine: str | None = None,
    nodes: int | None = None,
    global_batch: int | None = None,
    fixed: Mapping[str, Any] | None = None,
    tokens: float | None = None,
) -> Plan:
    """Search the fastest layout of a model or run on a machine, as `frontier-llm plan` does. Imports no torch.

    `model_or_run` is the name of a shipped model, the path of a model file, a `Run`, or a dictionary with the keys of a
    run file. `machine` is by default the run's, or "frontier" if the run names none. `nodes` is by default the smallest
    power of two on which the model fits. `global_batch` counts sequences per step. `fixed` holds layout keys that the
    search keeps, for example `{"tensor": 8}`. `tokens` is the length of the training (default: the run's own, or 20 per
    parameter).

    Raises FrontierError if nothing fits, and for unknown names.
    """
    if isinstance(model_or_run, str | Path):
        run = None
        model = load_model(str(model_or_run))
        batch = None
        shared: dict[str, Any] = {}
    else:
        run = Run(resolve_precision(load_run(model_or_run).config))
        longest = longest_phase(run.config).config
        model, batch = longest.model, longest.batch.global_batch
        shared = {"dtype": longest.precision.dtype, "optimizer": longest.optimizer.name}
    machine = machine or machine_of_run(None if run is None else run.config)
    described = load_machine(machine)
    stack = own_stack(described)
    numbers = rates(described, stack)
    values = parse_fixed([f"{key}={value}" for key, value in (fixed or {}).items()])
    if nodes is None:
        nodes = default_nodes(model, described, numbers, values, **shared)
    outcome = search(
        model,
        numbers,
        nodes,
        global_batch or batch or default_global_batch(model, nodes, numbers.node_devices),
        values,
        **shared,
    )
    check_found(outcome, described, numbers)
    if tokens is None:
        tokens = _tokens(run, outcome)
    return Plan(outcome, described, machine, stack, numbers, run, tokens)


def _tokens(run: Run | None, outcome: Search) -> float:
    """Return the tokens of the training: the run's own, or 20 per parameter."""
    if run is not None:
        return float(planned_tokens(phases_of(run.config)))
    return float(TOKENS_PER_PARAMETER * total_parameters(outcome.model))
