"""Comparison of a plan's prediction with the best published run of a similar model, as a series of single changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from frontier_llm.blueprint.layout import Layout, run_keys
from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.blueprint.work import model_flops_per_token
from frontier_llm.config import ModelConfig, available
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.machine.schema import Machine
from frontier_llm.planner.costs.memory import memory_by_rank, total
from frontier_llm.planner.report import layout_words, step_words
from frontier_llm.planner.search import Plan, Search, search, simulate_layout
from frontier_llm.planner.uncertainty import BestRun, best_published, family, size_class
from frontier_llm.topology.plan import split_layers
from frontier_llm.units import GIB, TERA, strict_json

SMALL = 0.01  # share of the prediction below which changed constants are combined into one step
LAYERS = 8  # most layers in the commands that test a change on one node, so that they take minutes
MICROBATCHES = 8  # microbatches per replica in the commands that test a change on one node

# for each change: its name, the fields of Rates that it replaces, and the command that measures them on one node
OPS = "frontier-llm bench ops --device cuda --model {model}"
COMM = "frontier-llm bench comm {run} --max 256MiB"
STEP = "frontier-llm bench step {run} {overrides}"
PRODUCT_RATES = ("gemm_efficiency", "gemm_k_half", "grouped_share", "unaligned_penalty", "linear_speedup")
GROUPS = (
    ("rate of matrix products", PRODUCT_RATES, OPS),
    ("rate inside the node", ("fabric_share", "fabric_bytes_s", "fabric_latency_s", "fabric_hop_s"), COMM),
    ("rate of attention", ("flash_efficiency", "flash_backward", "attention"), OPS),
    (
        "overlap of communication",
        ("dp_overlap", "gather_overlap", "tp_overlap", "blocking_messages", "p2p_split"),
        STEP,
    ),
)


@dataclass(frozen=True)
class Step:
    """One change between the measured run and the prediction, with its effect on the step time."""

    name: str
    seconds: float  # step time after the change
    change_s: float  # difference that this change makes to the step time
    command: str = ""  # command that tests the change on one node


@dataclass(frozen=True)
class Steps:
    """The measured run, and all changes that lead from its step time to the prediction."""

    run: BestRun
    measured_s: float  # step time if this model and batch ran on these devices with the run's TFLOP/s
    steps: tuple[Step, ...]

    @property
    def predicted_s(self) -> float:
        """Step time after the last change, which is the plan's prediction."""
        return self.steps[-1].seconds

    def words(self) -> str:
        """Return a line for each change, and below each line the command that tests it."""
        lines = [
            "steps from the best measured run of this size to the prediction (rates are converted to this model and "
            "batch)",
            f"  {step_words(self.measured_s):>8s}             measured: {self.run.run}, {self.run.stack}",
        ]
        for step in self.steps:
            lines.append(f"  {step_words(step.seconds):>8s} {step.change_s:+9.1f} s  {step.name}")
            if step.command:
                lines.append(f"{'':24s}test: {step.command}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the content for `--json`."""
        return {
            "measured_s": self.measured_s,
            "run": self.run.run,
            "stack": self.run.stack,
            "steps": [vars(step) for step in self.steps],
        }


def steps_of(outcome: Search, machine: Machine, numbers: Rates) -> Steps | None:
    """Return the changes that lead from a published run to the chosen plan.

    None if no published run has this size and these devices.

    Also returns None if the machine file of the published run is not part of the package.
    """
    best = outcome.best
    size = size_class(total_parameters(best.model))
    run = best_published("equivalent").get(family(machine.device.name), {}).get(size)
    if run is None or run.machine not in available("machines"):
        return None
    theirs = rates(load_machine(run.machine), run.stack)
    flops = model_flops_per_token(best.model) * best.step_tokens
    measured_s = flops / best.layout.devices / (run.tflops * TERA)
    layout = adapted(run.layout, best)
    if layout is None:
        layout = _best_step(outcome, theirs, {"recompute": "full"})
    if layout is None:
        return None
    walk = _Walk(best, layout, measured_s)
    walk.add(f"that run as priced: {layout_words(walk.plan(theirs))}", theirs, command="plan --validate --rows")
    for name, fields, command in GROUPS:
        theirs = replace(theirs, **{field: getattr(numbers, field) for field in fields})
        walk.add(name, theirs, command=command)
    walk.add("other constants and software", numbers)
    recomputed = _best_step(outcome, numbers, {"recompute": layout.recompute})
    if recomputed is not None and best.layout.recompute != layout.recompute:
        walk.layout = recomputed
        walk.add("better layout with the same recomputation", numbers, command=STEP)
    walk.layout = best.layout
    memory = f"{best.peak_bytes / GIB:.1f} of {best.limit_bytes / GIB:.0f} GiB"
    walk.finish(f"recompute {best.layout.recompute} ({memory})", numbers)
    return Steps(run, measured_s, tuple(walk.combined()))


def adapted(fields: Mapping[str, Any], plan: Plan) -> Layout | None:
    """Return a published layout with replicas and microbatches for the plan's devices and batch.

    Returns None if devices or batch are not divisible.
    """
    given = Layout(**fields)
    replicas, uneven = divmod(plan.layout.devices, given.tp * given.pp * given.cp)
    if replicas == 0 or uneven or plan.model.heads % given.tp or given.pp * given.chunks > plan.model.layers:
        return None
    microbatches, uneven = divmod(plan.layout.global_batch, replicas * given.micro_batch)
    if microbatches == 0 or uneven:
        return None
    return replace(given, dp=replicas, microbatches=microbatches)


def _best_step(outcome: Search, numbers: Rates, changes: Mapping[str, Any]) -> Layout | None:
    """Return the best layout that has the values `changes`, or None if none fits."""
    found = search(
        outcome.model,
        numbers,
        outcome.nodes,
        outcome.global_batch,
        {**outcome.fixed, **changes},
        **outcome.shared,
    )
    return found.best.layout if found.plans else None


def _fits(model: ModelConfig, layout: Layout, numbers: Rates) -> bool:
    """Return whether a layout without a pipeline fits into the memory of its devices."""
    (rank,) = memory_by_rank(model, layout, numbers, split_layers(model, 1))
    return total(rank) <= numbers.memory_bytes


class _Walk:
    """Applies one change after another, and records the predicted step time with each."""

    def __init__(self, best: Plan, layout: Layout, measured_s: float) -> None:
        self.best = best
        self.layout = layout
        self.seconds = measured_s
        self.steps: list[Step] = []

    def plan(self, numbers: Rates) -> Plan:
        """Return the simulated plan of the current layout."""
        return simulate_layout(self.best.model, self.layout, numbers)

    def add(self, name: str, numbers: Rates, command: str = "") -> None:
        """Record the step time with these constants."""
        self._record(name, self.plan(numbers).step_s, command, numbers)

    def finish(self, name: str, numbers: Rates) -> None:
        """Record the plan's own prediction."""
        self._record(name, self.best.step_s, STEP, numbers)

    def _record(self, name: str, seconds: float, command: str, numbers: Rates) -> None:
        overrides = self._overrides(numbers) if "{overrides}" in command else ""
        words = command.format(model=self.best.model.name, run="RUN.yaml", overrides=overrides)
        self.steps.append(Step(name, seconds, seconds - self.seconds, words))
        self.seconds = seconds

    def _overrides(self, numbers: Rates) -> str:
        """Return overrides of the plan's run file with which one node measures layers of the current layout.

        The number of layers is that of one pipeline stage, at most LAYERS. It is reduced until the layers fit into
        memory, because fewer ranks of one node share weights and optimizer states.
        """
        replicas = max(1, numbers.node_devices // (self.layout.tp * self.layout.cp))
        one_node = replace(
            self.layout, pp=1, chunks=1, schedule="1f1b", dp=replicas, microbatches=MICROBATCHES, data_shard=0
        )
        model = self.best.model
        layers = min(max(1, model.layers // self.layout.pp), LAYERS)
        while layers > 1 and not _fits(model.model_copy(update={"layers": layers}), one_node, numbers):
            layers -= 1
        values = {"model.layers": layers, "batch.global_batch": one_node.global_batch}
        planned = run_keys(self.best.layout)
        for section, keys in run_keys(one_node).items():
            changed = {key: value for key, value in keys.items() if planned[section].get(key) != value}
            values |= {f"{section}.{key}": value for key, value in changed.items()}
        return " ".join(
            f"{key}={value if isinstance(value, str) else strict_json(value, indent=None)}"
            for key, value in values.items()
        )

    def combined(self) -> list[Step]:
        """Return the changes with small changes of constants combined into one. The first and the last change are not
        combined.
        """
        first, *middle, last = self.steps
        kept = [first]
        small_s = 0.0
        names = []
        for step in middle:
            if abs(step.change_s) < SMALL * last.seconds:
                small_s += step.change_s
                names.append(step.name)
            else:
                kept.append(step)
        seconds = first.seconds
        shown = [first]
        for step in kept[1:]:
            seconds += step.change_s
            shown.append(replace(step, seconds=seconds))
        if names:
            shown.append(Step(f"the rest ({', '.join(names)})", seconds + small_s, small_s))
        return [*shown, last]
