"""Writes the status of runs as text for a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from textwrap import shorten

from frontier_llm.cluster.status import Status
from frontier_llm.run import hostlist
from frontier_llm.run.evaluations import Evaluated
from frontier_llm.run.job import Job
from frontier_llm.run.run_dir import Slow
from frontier_llm.run.stage_memory import StageMemory, format_error, fullest
from frontier_llm.run.uploads import UploadRecord
from frontier_llm.tables import aligned
from frontier_llm.units import GIB, format_count, format_seconds, plural

BAR = 24  # width in characters
NOTE = 48  # longest note in the table, in characters


def render(statuses: Sequence[Status]) -> str:
    """Return the statuses as text for a terminal."""
    return "\n\n".join(_render_one(status) for status in statuses)


def table(statuses: Sequence[Status]) -> str:
    """Return one line per run."""
    head = ("run", "state", "job", ">step", ">of", ">done", ">loss", ">tokens/s", ">time left", ">restarts", "note")
    return aligned(head, (_row(status) for status in statuses))


def _row(status: Status) -> tuple[str, ...]:
    has_end = status.eta_s is not None and status.state not in ("finished", "stopped")
    return (
        status.run_dir,
        status.state,
        status.job_id or "",
        f"{status.step:,}",
        f"{status.steps:,}" if status.steps else "",
        f"{min(1.0, status.step / status.steps):.0%}" if status.steps else "",
        f"{status.loss:.4f}" if status.loss is not None else "",
        f"{status.tokens_per_s:,.0f}" if status.tokens_per_s is not None else "",
        format_seconds(status.eta_s) if has_end and status.eta_s is not None else "",
        str(status.restarts) if status.restarts else "",
        _note(status),
    )


def _note(status: Status) -> str:
    """Return the most urgent fact that no other column shows, cut to one short line."""
    if status.damage:
        text = f"damaged: {status.damage[0]}"
    elif status.slow_hosts:
        text = f"slow host {status.slow_hosts[0].host}"
    else:
        text = status.last_failure or ""
    return shorten(text, NOTE, placeholder=" …")


def _render_one(status: Status) -> str:
    """Return a heading and one aligned line for each known fact."""
    job = f"job {status.job_id} " if status.job_id else ""
    where = f" on {status.nodes}" if status.nodes else ""
    reason = f" ({status.reason})" if status.reason and status.reason != "None" else ""
    facts = [("step", _progress(status)), ("speed", _speed(status)), ("time left", _time_left(status))]
    if status.memory:
        facts.append(("memory", _memory(fullest(status.memory))))
    age = f", {format_seconds(status.checkpoint_age_s)} ago" if status.checkpoint_age_s is not None else ""
    if status.job is not None:
        facts.append(("job", _wanted(status.job)))
        facts.append(("node-hours", _node_hours(status, status.job)))
    checkpoint = f"step {status.checkpoint_step:,}{age}" if status.checkpoint_step else "none yet"
    facts.append(("checkpoint", checkpoint))
    if status.uploads is not None:
        facts.append(("remote", _uploads(status.uploads)))
    if status.evaluated is not None:
        facts.append(("evaluated", _evaluated(status.evaluated)))
    if status.restarts:
        counts = {cause: status.causes.count(cause) for cause in dict.fromkeys(status.causes)}
        facts.append(
            ("restarts", f"{status.restarts} ({', '.join(f'{count} {cause}' for cause, count in counts.items())})")
        )
    facts += [("waits", _waits(axis, row)) for axis, row in status.blocked.items()]
    facts += [("slow", _slow(slow, slow.host in status.bad_hosts)) for slow in status.slow_hosts]
    if status.switch is not None:
        words = " ".join(status.switch.plan)
        since = f"the roomier one since step {status.switch.step:,} ({words})"
        facts.append(("plan", f"{since}, because {status.switch.reason}"))
    facts.append(("failure", status.last_failure or ""))
    if status.bad_hosts:
        facts.append(("excluded", hostlist.compress(status.bad_hosts)))
    facts.append(("data", ", ".join(f"{path} {epochs:.3g} epochs" for path, epochs in status.epochs.items())))
    facts += [("damaged", text) for text in status.damage]
    return "\n".join(
        [
            f"{status.run_dir}   {job}{status.state}{where}{reason}",
            *(f"  {name:<11}{text}" for name, text in facts if text),
        ]
    )


def _memory(stage: StageMemory) -> str:
    """Return the used memory of the fullest stage beside its prediction."""
    text = f"{stage.used_bytes / GIB:.1f} GiB on the fullest stage ({stage.stage})"
    if stage.predicted_bytes is not None:
        text += f", predicted {stage.predicted_bytes / GIB:.1f} ({format_error(stage)})"
    return text


def _uploads(record: UploadRecord) -> str:
    """Return the last uploaded step, the waiting steps and the last problem as text."""
    words = ["nothing uploaded yet"]
    if record.uploaded_step is not None:
        age = format_seconds(time.time() - record.uploaded_unix_s)
        words = [f"step {record.uploaded_step:,} uploaded {age} ago"]
    if record.pending:
        words.append(f"{', '.join(f'{step:,}' for step in record.pending)} to be uploaded")
    if record.problem:
        words.append(record.problem)
    return "; ".join(words)


def _evaluated(result: Evaluated) -> str:
    """Return the newest evaluated step with its losses and accuracies as text."""
    losses = [f"loss {loss:.4f} on {dataset}" for dataset, loss in result.losses.items()]
    accuracies = [f"{task} {accuracy:.4f}" for task, accuracy in result.accuracies.items()]
    return ", ".join([f"step {result.step:,}", *losses, *accuracies])


def _wanted(job: Job) -> str:
    """Return the resources and settings in the job's record as text."""
    spares = f" + {job.spares} spare" if job.spares else ""
    return f"{plural(job.nodes, 'node')}{spares} of {job.site}, then {job.continuation}"


def _node_hours(status: Status, job: Job) -> str:
    """Return the used node-hours, the remaining budget, and the node-hours until the last step, as text."""
    words = [f"{status.node_hours:,.1f} used"]
    if job.max_node_hours is not None and status.node_hours_left is not None:
        words = [f"{status.node_hours:,.1f} of {job.max_node_hours:,.1f} used, {status.node_hours_left:,.1f} left"]
    if status.node_hours_needed is not None and status.state not in ("finished", "stopped"):
        words.append(f"about {status.node_hours_needed:,.1f} more needed")
    return ", ".join(words)


def _progress(status: Status) -> str:
    if not status.steps:
        return f"{status.step:,}"
    done = min(1.0, status.step / status.steps)
    filled = round(BAR * done)
    return f"{status.step:,} of {status.steps:,}  {'█' * filled}{'░' * (BAR - filled)} {done:.1%}"


def _speed(status: Status) -> str:
    parts = []
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.tokens_per_s is not None:
        parts.append(f"{status.tokens_per_s:,.0f} tokens/s")
    if status.step_time_s is not None:
        parts.append(f"{format_seconds(status.step_time_s)} per step")
    if status.tokens:
        parts.append(f"{format_count(status.tokens)} tokens seen")
    return ", ".join(parts)


def _waits(axis: str, row: dict[str, int]) -> str:
    median, most = (format_seconds(row[key] * 1e-6) for key in ("p50_us", "p99_us"))
    return f"{axis} median {median}, 99th percentile {most}, {row['calls']:,} calls"


def _slow(slow: Slow, excluded: bool) -> str:
    times = "once" if slow.times == 1 else f"{slow.times} times"
    proposal = "" if excluded else f"; exclude it with --exclude={slow.host}"
    return f"{slow.host} {times}, last at step {slow.last_step:,} by a factor of {slow.slowdown:.1f}{proposal}"


def _time_left(status: Status) -> str:
    if status.eta_s is None or status.state in ("finished", "stopped"):
        return ""
    text = f"{format_seconds(status.eta_s)} of training"
    if status.walltime_left_s is not None:
        more = plural(status.slices_left, "more job") if status.slices_left else "ends in this job"
        text += f", {format_seconds(status.walltime_left_s)} of walltime, {more}"
    if status.expected_end_unix_s is not None:
        end = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.expected_end_unix_s))
        text += f", until {end}"
        if status.slices_left:
            text += " without the waits in the queue"
    return text
