"""Report of a search, as text and as JSON: the chosen plan, the runner-up, and each plan's limits, time and memory."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from frontier_llm.blueprint.layout import SHARDING, Layout, run_keys
from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.machine.load import PLACES, own_stack, provenance, stack_name
from frontier_llm.machine.rates import Rates
from frontier_llm.machine.schema import Machine
from frontier_llm.planner.algorithms import gradient_choices, gradient_words
from frontier_llm.planner.alternatives import Alternative, alternatives
from frontier_llm.planner.breakdown import NEUTRAL, SOURCES, adding_prices, breakdown
from frontier_llm.planner.choice import RESOLUTION, TIE, not_by_time, why_not
from frontier_llm.planner.links import axis_links, cost_of_one, safety_words
from frontier_llm.planner.operations import Campaign
from frontier_llm.planner.search import Plan, Search, memory_summary, utilisations
from frontier_llm.planner.uncertainty import Uncertainty, uncertainty_of
from frontier_llm.tables import aligned
from frontier_llm.units import GIB, format_count, format_seconds, plural

WIDTH = 140  # characters per line of a report that is not shown on a terminal


def layout_words(plan: Plan) -> str:
    """Return the layout as text: 'TP8 PP32 DP12, microbatch 1 x 800, zb-h1, sequence parallel, recompute none, …'."""
    layout = plan.layout
    chunks = f" x {layout.chunks} chunks" if layout.chunks > 1 else ""
    context = f" CP{layout.cp}" if layout.cp > 1 else ""
    parts = [
        f"TP{layout.tp}{context} PP{layout.pp}{chunks} DP{layout.dp}",
        f"EP{layout.ep} EDP{layout.edp}" if layout.ep > 1 else "",
        "once to each node" if layout.expert_nodes > 1 else "",
        f"microbatch {layout.micro_batch} x {layout.microbatches}",
        f"attention by {layout.context_attention}" if layout.cp > 1 else "",
        layout.schedule if layout.pp > 1 else "",
        "sequence parallel" if layout.sequence_parallel else "",
        f"tensor chunks {layout.tensor_chunks}" if layout.tensor_chunks > 1 else "",
        f"recompute {layout.recompute}",
        _sharding_words(layout),
        f"{layout.gradient_wire} gradient sums" if layout.gradient_wire != "full" else "",
        layout.axis_order if layout.pp > 1 and layout.dp > 1 else "",
    ]
    return ", ".join(part for part in parts if part)


def _sharding_words(layout: Layout) -> str:
    if layout.sharding != "weights":
        return f"ZeRO-{SHARDING[layout.sharding]}"
    if layout.data_shard:
        return f"FSDP by {layout.data_shard}"
    return "FSDP"


def step_words(seconds: float) -> str:
    """Format the time of a step with three digits, always in seconds from 10 s on, so that steps can be compared."""
    if seconds < 10:
        return format_seconds(seconds)
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def explain(plan: Plan, machine: Machine, stack: str | None, rates: Rates, width: int = WIDTH) -> str:
    """Return the time of the step as a table with a line for each cause: its seconds and its share of the step.

    Below each cause are the numbers of the machine file on which its seconds depend. Each number has its tag (measured,
    published or estimated) and its source. A table of the memory of the fullest rank follows.
    """
    lines = [
        "time of the step on the busiest pipeline rank (simulated), with the machine file's numbers behind each line"
    ]
    seen: set[str] = set()
    for name, seconds in breakdown(plan, rates).items():
        if seconds < 1e-4 * plan.step_s:
            continue
        lines.append(f"  {name:28s} {format_seconds(seconds):>10s}  {100 * seconds / plan.step_s:5.1f} %")
        for field in SOURCES[name]:
            number = provenance(machine, stack, field, plan.layout.tp)
            if number.value == NEUTRAL.get(field):
                continue
            key = PLACES[field][1]
            source = "" if field in seen else f" {number.source}"
            lines.append(f"      {key} = {number.value:g} [{number.tag}]{source}")
            seen.add(field)
    if machine.allreduce:
        lines.append(f"  all-reduce times between nodes [{machine.allreduce.tag}] {machine.allreduce.source}")
    if stack_name(machine, stack) == own_stack(machine):
        lines += _adding_words(plan, rates)
    rank, memory = memory_summary(plan)
    lines.append(f"memory of the fullest rank (stage {rank})")
    for name, size in memory.items():
        tag = {"reserve": "estimated", "activations": "estimated x fragmentation"}.get(name, "exact count")
        if size > 0:
            lines.append(f"  {name:28s} {size / GIB:8.2f} GiB  [{tag}]")
    lines.append(f"  {'total':28s} {plan.peak_bytes / GIB:8.2f} GiB of {plan.limit_bytes / GIB:.0f}")
    lines += _safe_memory_words(machine)
    return wrapped("\n".join(lines), width)


def _safe_memory_words(machine: Machine) -> Iterator[str]:
    """Yield the memory up to which plans are expected to run, with its source, if the machine file states it."""
    if safe := machine.device.safe_gib:
        yield f"  safe up to {safe.value:g} GiB: {safe.source}"


def _adding_words(plan: Plan, rates: Rates) -> Iterator[str]:
    """Yield text lines: the method by which torch is assumed to add weight gradients, and the step time with each
    method.
    """
    if rates.weight_gradients:
        assumed = f"{rates.weight_gradients} (weight_gradients of the machine file)"
    else:
        assumed = f"not known for the installed torch, priced as a pass of {rates.accumulate_bytes:g} bytes/parameter"
    yield f"method of adding weight gradients to fp32: {assumed}"
    for method, seconds in adding_prices(plan, rates).items():
        change = 100 * (seconds / plan.step_s - 1)
        yield f"  {method:28s} {step_words(seconds):>10s}  {change:+5.1f} %"
    if not rates.weight_gradients:
        yield "  `frontier-llm doctor --emit-machine FILE` on a node with a GPU writes the method of its torch"


_COLUMNS = (
    ">#",
    ">TP",
    ">CP",
    ">PP",
    ">v",
    ">DP",
    ">mbs",
    ">m",
    "schedule",
    "SP",
    "recompute",
    ">Z",
    ">step",
    ">vs 1",
    ">tok/s/dev",
    ">bubble",
    ">GiB",
    "bound by",
)
# Number of columns in a plan's first line → format of its second line, which has the other columns. The first entry
# whose lines fit the terminal is used.
_SECOND_LINES = {
    18: "",
    17: "     bound by {17}",
    14: "     {14} tok/s/dev, bubble {15}, {16} GiB; bound by {17}",
}
_LEGEND = (
    "  TP, CP, PP, DP: ranks over which a layer, a sequence, the layers and the batch are split; v: virtual stages "
    "per rank; mbs: sequences of a microbatch; m: microbatches; SP: sequence parallel; Z: ZeRO stage, 3 is FSDP; "
    "vs 1: time of the step compared with the choice"
)


def table(plans: Sequence[Plan], width: int = WIDTH) -> str:
    """Return a table with one line per plan.

    If the lines exceed `width` characters, each plan has a second line for its last columns.
    """
    cells = [_cells(index, plan, plans[0]) for index, plan in enumerate(plans, 1)]
    for columns, second in _SECOND_LINES.items():
        head, *lines = aligned(_COLUMNS[:columns], (row[:columns] for row in cells), indent="  ").splitlines()
        rest = [second.format(*row) for row in cells]
        if max(map(len, (head, *lines))) <= width:
            break
    rows = [head, *(line for both in zip(lines, rest, strict=True) for line in both if line)]
    if any(later.step_s < plan.step_s for plan, later in pairwise(plans)):
        rows.append(
            f"  {not_by_time()}; the chosen plan is also good with the slow values of the constants, and is the "
            f"simplest within {100 * TIE:.0f} %"
        )
    return "\n".join(rows)


def _cells(index: int, plan: Plan, choice: Plan) -> tuple[object, ...]:
    layout = plan.layout
    sequence_parallel = "y" if layout.sequence_parallel else "n"
    return (
        index,
        layout.tp,
        layout.cp,
        layout.pp,
        layout.chunks,
        layout.dp,
        layout.micro_batch,
        layout.microbatches,
        layout.schedule,
        sequence_parallel,
        layout.recompute,
        SHARDING[layout.sharding],
        step_words(plan.step_s),
        _compared(plan, choice) if plan is not choice else "",
        f"{plan.tokens_per_s_per_device:.1f}",
        f"{100 * plan.simulated.bubble:.1f} %",
        f"{plan.peak_bytes / GIB:.1f}",
        plan.binding,
    )


def _compared(plan: Plan, choice: Plan) -> str:
    """Return the difference of two step times as text: '+1.3 %'."""
    return f"{100 * (plan.step_s / choice.step_s - 1):+.1f} %"


def wrapped(text: str, width: int) -> str:
    """Return the text with lines of at most `width` characters. Continuation lines are indented by four more."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if len(line) > width:
            lines += textwrap.wrap(line, width, subsequent_indent=indent + 4 * " ", drop_whitespace=True)
        else:
            lines += [line]
    return "\n".join(lines)


def text(
    outcome: Search,
    machine: Machine,
    stack: str,
    rates: Rates,
    run: Campaign | None,
    width: int = WIDTH,
) -> str:
    """Return the report of a search as text with lines of at most `width` characters."""
    best = outcome.best
    model = outcome.model
    use = utilisations(best, rates)
    uncertainty = uncertainty_of(best, machine, stack, rates)
    lines = [
        f"{model.name} ({format_count(total_parameters(model))} parameters) on {plural(outcome.nodes, 'node')} of "
        f"{machine.name}: "
        f"{outcome.nodes * machine.devices_per_node} devices, {machine.device.name}",
        f"global batch {outcome.global_batch} sequences = {format_count(best.step_tokens)} tokens",
        f"{outcome.legal} legal layouts, {outcome.fitting} fit, {outcome.dominated} of these dominated; "
        f"{plural(outcome.finalists, 'finalist')} simulated",
        "",
        f"choice: {layout_words(best)}",
        *speed_lines(best, use, uncertainty),
        *uncertainty.words(),
        f"  memory {best.peak_bytes / GIB:.1f} of {best.limit_bytes / GIB:.0f} GiB on the fullest rank"
        + ("  WARNING: within 5 % of the limit" if best.tight else ""),
        *_safe_memory_words(machine),
        *(f"  {axis}: {link}" for axis, link in axis_links(best, machine, rates).items()),
        *gradient_words(best, rates),
        *safety_words(best, machine, rates),
        "",
        table(outcome.plans, width),
        _LEGEND,
    ]
    if len(outcome.plans) > 1:
        second = outcome.plans[1]
        slower = f"{100 * (second.step_s / best.step_s - 1):+.1f} % time"
        reason = why_not(best, second, outcome.plans) or _why(best, second, rates)
        lines += ["", f"runner-up: {layout_words(second)}: {slower}; {reason}"]
    if outcome.safe is not None:
        lines.append(
            f"within {rates.safe_bytes / GIB:.0f} GiB: {layout_words(outcome.safe)}: "
            f"{outcome.safe.peak_bytes / GIB:.1f} GiB, {step_words(outcome.safe.step_s)} per step "
            f"({100 * (outcome.safe.step_s / best.step_s - 1):+.1f} %)"
        )
    lines += [_why_not(best, other, rates) for other in alternatives(outcome, rates)]
    lines += [f"rejected: {line}" for line in outcome.rejected]
    if outcome.across is not None:
        other = outcome.across
        lines.append(
            f"across nodes: {layout_words(other)}: {other.tokens_per_s_per_device:.1f} tokens/s per device, "
            f"{100 * (other.step_s / best.step_s - 1):+.1f} % time compared with the choice"
        )
    if run is not None:
        lines += ["", *campaign_lines(run, uncertainty)]
    return wrapped("\n".join(lines), width)


def _why_not(best: Plan, other: Alternative, rates: Rates) -> str:
    """Return one line about a kind of layout that was not chosen."""
    if other.plan is None:
        return f"why not {other.name}: {other.reason}"
    is_slower = other.plan.step_s >= best.step_s
    reason = _why(best, other.plan, rates) if is_slower else "within the error of the cost model"
    if other.plan.layout.sharding == "weights" and other.plan.step_s < best.step_s:
        reason = f"its overlap is an estimate, so it must be faster by {100 * RESOLUTION:.0f} %"
    return f"why not {other.name}: {layout_words(other.plan)}: {_compared(other.plan, best)} time; {reason}"


def speed_lines(plan: Plan, use: Mapping[str, float], uncertainty: Uncertainty) -> list[str]:
    """Return lines with a plan's step time, throughput and shares of the peak FLOP/s, each with its uncertainty band.

    If the software stack has never run on this machine, the band is printed first.
    """
    speed = plan.tokens_per_s_per_device
    devices = plan.layout.devices
    rates_and_words: dict[str, tuple[float, Callable[[float], str]]] = {
        "tokens/s per device": (speed, "{:.1f}".format),
        "tokens/s in total": (speed * devices, "{:,.0f}".format),
        "TFLOP/s per device": (uncertainty.tflops, _tflops),
        "% MFU (full attention counted)": (100 * use["mfu"], "{:.1f}".format),
        "% causal": (100 * use["mfu_causal"], "{:.1f}".format),
        "% HFU (recomputation counted)": (100 * use["hfu"], "{:.1f}".format),
    }
    rates = [f"{uncertainty.about(value, words, slow=0)} {unit}" for unit, (value, words) in rates_and_words.items()]
    return [
        f"  {uncertainty.about(plan.step_s, step_words, slow=1)} per step, {rates[0]}",
        *(f"  {', '.join(pair)}" for pair in (rates[1:3], rates[3:])),
    ]


def _tflops(value: float) -> str:
    """Format TFLOP/s. Rates below 1, for example those of a CPU, have two significant digits."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _duration(days: float, uncertainty: Uncertainty) -> str:
    """Format a duration with its interval: '50.1 … 70.3 (simulated 64.5) days', or in hours and minutes."""
    if days < 1:
        return uncertainty.about(days * 86_400, format_seconds, slow=1)
    return f"{uncertainty.about(days, _days, slow=1)} days"


def _days(value: float) -> str:
    """Format days, with tenths below 100 days: '64.5', '10,177'."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _node_hours(value: float) -> str:
    """Format node-hours. Numbers below 10 have two significant digits."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _why(best: Plan, other: Plan, rates: Rates) -> str:
    """Return the cause that loses most time in the plan `other`. The figure of a step's parts has the same causes."""
    if abs(best.step_s - other.step_s) < 1e-3 * best.step_s:
        return "a tie within the resolution of the cost model"
    before = breakdown(best, rates)
    gaps = {cause: seconds - before.get(cause, 0.0) for cause, seconds in breakdown(other, rates).items()}
    name = max(gaps, key=lambda cause: gaps[cause])
    return f"it loses {format_seconds(gaps[name])} in {name}"


def campaign_lines(run: Campaign, uncertainty: Uncertainty) -> list[str]:
    """Return lines with the days, node-hours, checkpoint interval and queue limit of a training run."""
    lines = [
        f"{format_count(run.tokens)} tokens: {_duration(run.days, uncertainty)} of computing, "
        f"{uncertainty.about(run.node_hours, _node_hours, slow=1)} node-hours",
        f"  checkpoint every {format_seconds(run.interval_s)} ({run.interval_steps} steps; Young/Daly with "
        f"{format_seconds(run.save_s)} per save and {run.mtbf_hours:.1f} h between failures of the job)",
        f"  expected share of useful time {100 * run.effective:.1f} %: "
        f"{_duration(run.calendar_days, uncertainty)} by the calendar, without queueing",
    ]
    if run.queue:
        lines.append(
            f"  queue: {run.queue.name}, at most {run.queue.max_hours:g} h per job, {plural(run.jobs, 'job')} one "
            f"after the other"
        )
    return lines


def as_dict(plan: Plan, rates: Rates) -> dict[str, Any]:
    """Return one plan as a dictionary for `--json`."""
    layout = plan.layout
    return {
        **{key: value for section in run_keys(layout).values() for key, value in section.items()},
        "zero": SHARDING[layout.sharding],
        "microbatches": layout.microbatches,
        "global_batch": layout.global_batch,
        "stage_layers": [stage.num_layers for stage in plan.stages],
        "step_s": plan.step_s,
        "slow_step_s": plan.slow_s,
        "closed_form_step_s": plan.closed_form_s,
        "tokens_per_s": plan.tokens_per_s_per_device * layout.devices,
        "tokens_per_s_per_device": plan.tokens_per_s_per_device,
        **utilisations(plan, rates),
        "bubble": plan.simulated.bubble,
        "memory_bytes": plan.peak_bytes,
        "memory_limit_bytes": plan.limit_bytes,
        "memory_by_stage_bytes": [sum(lines.values()) for lines in plan.memory],
        "memory_lines_bytes": memory_summary(plan)[1],
        "breakdown_s": breakdown(plan, rates),
        "binding": plan.binding,
        "tight": plan.tight,
    }


def search_as_dict(outcome: Search, machine: Machine, stack: str, rates: Rates, run: Campaign | None) -> dict[str, Any]:
    """Return the complete report of a search as a dictionary for `--json`."""
    return {
        "model": outcome.model.name,
        "parameters": total_parameters(outcome.model),
        "machine": machine.name,
        "stack": stack,
        "nodes": outcome.nodes,
        "devices": outcome.nodes * machine.devices_per_node,
        "global_batch": outcome.global_batch,
        "legal": outcome.legal,
        "fitting": outcome.fitting,
        "dominated": outcome.dominated,
        "simulated": True,
        "cost_of_one_in_flight": cost_of_one(outcome.best, rates),
        "promise": uncertainty_of(outcome.best, machine, stack, rates).as_dict(outcome.best),
        "plans": [
            {
                **as_dict(plan, rates),
                "links": axis_links(plan, machine, rates),
                "collectives": [vars(one) for one in gradient_choices(plan, rates)],
            }
            for plan in outcome.plans
        ],
        "rejected": list(outcome.rejected),
        "safe_memory": None if outcome.safe is None else as_dict(outcome.safe, rates),
        "across_nodes": None if outcome.across is None else as_dict(outcome.across, rates),
        "campaign": None if run is None else {**vars(run), "queue": run.queue.name if run.queue else None},
    }
