"""A search as text and as JSON: the choice, the runner-up, what binds each plan, where the time and the memory go."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from frontier_llm.config import ModelConfig
from frontier_llm.costs.layer import embedding_terms, head_terms, layer_terms
from frontier_llm.costs.parameters import total_parameters
from frontier_llm.costs.time import layer_s
from frontier_llm.costs.workload import DTYPE_BYTES, FSDP, RECOMPUTE
from frontier_llm.machine import Machine, Rates, provenance
from frontier_llm.machine.load import PLACES
from frontier_llm.planner.algorithms import gradient_choices, gradient_words
from frontier_llm.planner.links import axis_links
from frontier_llm.planner.operations import Campaign
from frontier_llm.planner.search import RESOLUTION, Plan, Search, memory_summary, utilisations
from frontier_llm.topology import AXIS_ORDERS
from frontier_llm.units import GIB, TERA, format_count, format_seconds, plural

WIDTH = 140  # columns of a report that is not shown on a terminal
RECOMPUTE_NAMES = {code: name for name, code in RECOMPUTE.items()}

# which numbers of the machine file each line of the breakdown rests on
SOURCES = {
    "matrix products": ("gemm_efficiency", "peak_flops"),
    "attention": ("flash_efficiency", "peak_flops"),
    "norms, activation, residual": ("hbm_efficiency", "hbm_bytes_s"),
    "tp communication": ("fabric_bytes_s", "fabric_latency_s"),
    "recompute": ("gemm_efficiency",),
    "launch-bound": ("launch_s",),
    "embedding": ("hbm_efficiency",),
    "head": ("gemm_efficiency",),
    "cross-entropy": ("hbm_efficiency",),
    "sharded weights and gradients": ("node_network_bytes_s", "network_efficiency", "network_hop_s"),
    "host per microbatch": ("microbatch_s",),
    "bubble and messages": ("node_network_bytes_s", "network_efficiency"),
    "gradient reduction": ("node_network_bytes_s", "network_efficiency", "dp_overlap"),
    "optimizer": ("hbm_efficiency", "step_s"),
    "weight all-gather": ("node_network_bytes_s", "network_hop_s"),
}


def layout_words(plan: Plan) -> str:
    """'TP8 PP32 DP12, microbatch 1 x 800, zb-h1, sequence parallel, no recompute, ZeRO-1, tp-dp-pp'."""
    w = plan.workload
    chunks = f" x {int(w.chunks)} chunks" if w.chunks > 1 else ""
    parts = [
        f"TP{int(w.tp)} PP{int(w.pp)}{chunks} DP{int(w.dp)}",
        f"microbatch {int(w.B)} x {int(w.m)}",
        plan.schedule if w.pp > 1 else "",
        "sequence parallel" if w.sp else "",
        f"recompute {RECOMPUTE_NAMES[int(w.recompute)]}",
        "FSDP" if w.zero == FSDP else f"ZeRO-{int(w.zero)}",
        "bf16 gradient sums" if w.gradient_bytes == DTYPE_BYTES["bf16"] else "",
        AXIS_ORDERS[int(w.dp_outer)] if w.pp > 1 and w.dp > 1 else "",
    ]
    return ", ".join(part for part in parts if part)


def step_words(seconds: float) -> str:
    """Three digits, in seconds however many: steps are compared with each other."""
    if seconds < 10:
        return format_seconds(seconds)
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def breakdown(plan: Plan, rates: Rates) -> dict[str, float]:
    """Seconds of the step by cause, on the busiest pipeline rank; they add up to the step.

    Compute terms are those of the rank with most work; what is left of the pipeline's time is bubble and messages.
    """
    w, played = plan.workload, plan.played
    pp, m = int(w.pp), float(w.m)
    busiest = max(range(pp), key=lambda rank: played.busy_s[rank])
    held = plan.stages[busiest::pp]
    layers = sum(stage.num_layers for stage in held)
    parts: dict[str, float] = {}
    for name, (forward, backward) in layer_terms(w, rates).items():
        parts[name] = m * layers * float(forward + backward)
    ends = embedding_terms(w, rates) if any(stage.embedding for stage in held) else {}
    ends |= head_terms(w, rates) if any(stage.head for stage in held) else {}
    for name, (forward, backward) in ends.items():
        parts[name] = m * float(forward + backward)
    beside = sum(layer_s(w, rates)) - sum(sum(term) for term in layer_terms(w, rates).values())
    parts["sharded weights and gradients"] = m * layers * float(beside)
    parts["host per microbatch"] = m * rates.microbatch_s
    parts["bubble and messages"] = played.pipeline_s - played.busy_s[busiest]
    parts["gradient reduction"] = played.reduce_s
    parts["optimizer"] = played.optimizer_s
    parts["weight all-gather"] = played.gather_s
    return parts


def explain(plan: Plan, machine: Machine, stack: str | None, rates: Rates, width: int = WIDTH) -> str:
    """The step as a table: seconds, share, and the numbers behind each line with tag and source; then the memory lines."""
    lines = ["where the step goes (busiest pipeline rank, simulated), and the numbers of the machine file behind each line"]
    seen: set[str] = set()
    for name, seconds in breakdown(plan, rates).items():
        if seconds < 1e-4 * plan.step_s:
            continue
        lines.append(f"  {name:28s} {format_seconds(seconds):>10s}  {100 * seconds / plan.step_s:5.1f} %")
        for field in SOURCES[name]:
            number, key = provenance(machine, stack, field, int(plan.workload.tp)), PLACES[field][1]
            said = "" if field in seen else f" {number.source}"
            lines.append(f"      {key} = {number.value:g} [{number.tag}]{said}")
            seen.add(field)
    if machine.allreduce:
        lines.append(f"  all-reduce times between nodes [{machine.allreduce.tag}] {machine.allreduce.source}")
    rank, memory = memory_summary(plan)
    lines.append(f"memory of the fullest rank (stage {rank})")
    for name, size in memory.items():
        tag = {"reserve": "estimated", "activations": "estimated x fragmentation"}.get(name, "exact count")
        if size > 0:
            lines.append(f"  {name:28s} {size / GIB:8.2f} GiB  [{tag}]")
    lines.append(f"  {'total':28s} {plan.peak_bytes / GIB:8.2f} GiB of {plan.limit_bytes / GIB:.0f}")
    return wrapped("\n".join(lines), width)


def table(plans: Sequence[Plan], width: int = WIDTH) -> str:
    """One line per plan; what binds it goes on a line of its own where `width` columns do not hold both."""
    head = (
        f"  {'#':>2} {'TP':>3} {'PP':>3} {'v':>2} {'DP':>5} {'mbs':>3} {'m':>5} {'schedule':11} "
        f"{'SP':2} {'recompute':9} {'Z':1} {'step':>9} {'tok/s/dev':>9} {'bubble':>7} {'GiB':>5}"
    )
    rows = [f"{head}  bound by" if len(head) + 45 <= width else head]
    for index, plan in enumerate(plans, 1):
        w = plan.workload
        row = (
            f"  {index:>2} {int(w.tp):>3} {int(w.pp):>3} {int(w.chunks):>2} {int(w.dp):>5} {int(w.B):>3} {int(w.m):>5} {plan.schedule:11} "
            f"{'y' if w.sp else 'n':2} {RECOMPUTE_NAMES[int(w.recompute)]:9} {int(w.zero):1} {step_words(plan.step_s):>9} "
            f"{plan.tokens_per_s_per_device:>9.1f} {100 * plan.played.bubble:>6.1f}% {plan.peak_bytes / GIB:>5.1f}"
        )
        rows += [f"{row}  {plan.binding}"] if len(rows[0]) > len(head) else [row, f"     bound by {plan.binding}"]
    return "\n".join(rows)


def wrapped(text: str, width: int) -> str:
    """Lines of at most `width` columns; what is carried over stands four columns further in."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, width, subsequent_indent=indent + 4 * " ", drop_whitespace=True) if len(line) > width else [line]
    return "\n".join(lines)


def text(found: Search, machine: Machine, rates: Rates, run: Campaign | None, width: int = WIDTH) -> str:
    """The report that people read, in `width` columns."""
    best, model = found.best, found.model
    use = utilisations(best, model, rates)
    w = best.workload
    lines = [
        f"{model.name} ({format_count(total_parameters(model))} parameters) on {plural(found.nodes, 'node')} of {machine.name}: "
        f"{found.nodes * machine.devices_per_node} devices, {machine.device.name}",
        f"global batch {found.global_batch} sequences = {format_count(float(w.step_tokens))} tokens",
        f"{found.legal} legal layouts, {found.fitting} fit, {found.dominated} of these dominated; {len(found.plans)} finalists simulated",
        "",
        f"choice: {layout_words(best)}",
        f"  {step_words(best.step_s)} per step (simulated), {best.tokens_per_s_per_device:.1f} tokens/s per device, "
        f"{best.tokens_per_s_per_device * float(w.devices):,.0f} in all",
        f"  MFU {100 * use['mfu']:.1f} % ({_tflops(use['mfu'] * rates.peak_flops / TERA)} TFLOP/s, full attention counted; "
        f"causal {100 * use['mfu_causal']:.1f} %), HFU {100 * use['hfu']:.1f} % (recomputation counted)",
        f"  memory {best.peak_bytes / GIB:.1f} of {best.limit_bytes / GIB:.0f} GiB on the fullest rank"
        + ("  WARNING: within 5 % of the limit" if best.tight else ""),
        *(f"  {axis}: {link}" for axis, link in axis_links(best, machine, rates).items()),
        *gradient_words(best, rates),
        "",
        table(found.plans, width),
    ]
    if len(found.plans) > 1:
        second = found.plans[1]
        slower = f"{100 * (second.step_s / best.step_s - 1):+.1f} % time"
        lines += ["", f"runner-up: {layout_words(second)}: {slower}; {_why(best, second)}"]
    lines += [f"rejected: {line}" for line in found.rejected]
    if found.across is not None:
        other = found.across
        lines.append(
            f"across nodes: {layout_words(other)}: {other.tokens_per_s_per_device:.1f} tokens/s per device, "
            f"{100 * (other.step_s / best.step_s - 1):+.1f} % time against the choice"
        )
    if run is not None:
        lines += ["", *campaign_lines(run)]
    return wrapped("\n".join(lines), width)


def _tflops(value: float) -> str:
    """A CPU's rate has its figures behind the point."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _why(best: Plan, other: Plan) -> str:
    """The largest difference between two plans, in a few words."""
    a, b = best.played, other.played
    if other.step_s < best.step_s:
        return f"its overlap is an estimate, so it would have to win by {100 * RESOLUTION:.0f} %"
    if abs(best.step_s - other.step_s) < 1e-3 * best.step_s:
        return "a tie within what the model resolves"
    gaps = {
        "busiest stage's compute": max(b.busy_s) - max(a.busy_s),
        "bubble and messages": (b.pipeline_s - max(b.busy_s)) - (a.pipeline_s - max(a.busy_s)),
        "gradient reduction and gather": (b.reduce_s + b.gather_s) - (a.reduce_s + a.gather_s),
        "optimizer": b.optimizer_s - a.optimizer_s,
    }
    name = max(gaps, key=lambda key: gaps[key])
    return f"it loses {format_seconds(gaps[name])} in {name}"


def campaign_lines(run: Campaign) -> list[str]:
    """Days, node-hours, checkpoints, walltime."""
    lines = [
        f"{format_count(run.tokens)} tokens: {run.days:.1f} days of computing, {run.node_hours:,.0f} node-hours",
        f"  checkpoint every {format_seconds(run.interval_s)} ({run.interval_steps} steps; Young/Daly with "
        f"{format_seconds(run.save_s)} per save and {run.mtbf_hours:.1f} h between failures of the job)",
        f"  expected share of useful time {100 * run.effective:.1f} %: {run.calendar_days:.1f} calendar days without queueing",
    ]
    if run.queue:
        lines.append(f"  queue: {run.queue.name}, at most {run.queue.max_hours:g} h per job, {run.jobs} jobs one after the other")
    return lines


def as_dict(plan: Plan, model: ModelConfig, rates: Rates) -> dict[str, Any]:
    """One plan for programs."""
    w = plan.workload
    return {
        "tensor": int(w.tp),
        "pipeline": int(w.pp),
        "data": int(w.dp),
        "chunks": int(w.chunks),
        "schedule": plan.schedule,
        "micro_batch": int(w.B),
        "microbatches": int(w.m),
        "global_batch": int(w.B * w.m * w.dp),
        "sequence_parallel": bool(w.sp),
        "recompute": RECOMPUTE_NAMES[int(w.recompute)],
        "zero": int(w.zero),
        "data_mode": "fsdp" if w.zero == FSDP else "zero",
        "axis_order": AXIS_ORDERS[int(w.dp_outer)],
        "stage_layers": [stage.num_layers for stage in plan.stages],
        "step_s": plan.step_s,
        "closed_form_step_s": plan.closed_form_s,
        "tokens_per_s": plan.tokens_per_s_per_device * float(w.devices),
        "tokens_per_s_per_device": plan.tokens_per_s_per_device,
        **utilisations(plan, model, rates),
        "bubble": plan.played.bubble,
        "memory_bytes": plan.peak_bytes,
        "memory_limit_bytes": plan.limit_bytes,
        "memory_by_stage_bytes": [sum(lines.values()) for lines in plan.memory],
        "memory_lines_bytes": memory_summary(plan)[1],
        "breakdown_s": breakdown(plan, rates),
        "binding": plan.binding,
        "tight": plan.tight,
    }


def search_as_dict(found: Search, machine: Machine, stack: str, rates: Rates, run: Campaign | None) -> dict[str, Any]:
    """The whole report for programs."""
    return {
        "model": found.model.name,
        "parameters": total_parameters(found.model),
        "machine": machine.name,
        "stack": stack,
        "nodes": found.nodes,
        "devices": found.nodes * machine.devices_per_node,
        "global_batch": found.global_batch,
        "legal": found.legal,
        "fitting": found.fitting,
        "dominated": found.dominated,
        "simulated": True,
        "plans": [
            {
                **as_dict(plan, found.model, rates),
                "links": axis_links(plan, machine, rates),
                "collectives": [vars(one) for one in gradient_choices(plan, rates)],
            }
            for plan in found.plans
        ],
        "rejected": list(found.rejected),
        "across_nodes": None if found.across is None else as_dict(found.across, found.model, rates),
        "campaign": None if run is None else {**vars(run), "queue": run.queue.name if run.queue else None},
    }
