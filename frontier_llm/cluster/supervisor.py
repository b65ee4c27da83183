"""The supervisor: the program in the batch shell of a job. launch/job.sh starts it.

The supervisor starts all ranks with one srun. Such a start is called an attempt. After each attempt `cluster.decide`
decides whether to start again, to continue in another job, or to end. This module reads the records from Slurm, the
clock and the run directory, starts the ranks, and executes the final decision.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from frontier_llm import log
from frontier_llm.cluster import slurm
from frontier_llm.cluster.attempt import start_ranks
from frontier_llm.cluster.batch import TRAIN, BatchRun, open_batch
from frontier_llm.cluster.decide import (
    Decision,
    Done,
    GiveUp,
    History,
    Now,
    Requeue,
    Start,
    Successor,
    decide,
    has_ended_job,
    reason_to_end,
)
from frontier_llm.cluster.doctor import preflight
from frontier_llm.cluster.notices import Notifier, Watch
from frontier_llm.cluster.sbatch_options import as_options
from frontier_llm.cluster.sites import walltime_s
from frontier_llm.cluster.submit import SCRIPT, queue, sbatch_command
from frontier_llm.cluster.warning_time import measured_warning_s
from frontier_llm.errors import OUT_OF_MEMORY, FrontierError
from frontier_llm.run import allocations, hostlist, run_dir
from frontier_llm.run.failure import write_failure
from frontier_llm.run.holder import last_start, living_holder, refuse_second_start, reserved
from frontier_llm.run.job import read_job, write_job
from frontier_llm.run.rank_env import environ
from frontier_llm.run.records import damaged_lines

OLD_WARNING_VARIABLE = "FRONTIER_LLM_SIGNAL_LEAD_S"


def supervise(run: BatchRun, admit: Callable[[BatchRun], None] = lambda run: None) -> int:
    """Start the ranks until the run is finished, stopped, or continued by another job.

    `admit` raises an error if the run must not continue. Return the exit code of the batch script.
    """
    run_dir.share_with_group(run.directory)  # srun passes this process's umask to the ranks
    refuse_second_holder(run)
    if read_job(run.directory) != run.job:
        with reserved(run.directory):
            write_job(run.job)
    notifier = Notifier(run.job, run.allocation.job_id)
    try:
        decision = start_until_decided(run, admit, notifier)
        notify_of_end(run, decision, notifier)
        return carry_out(run, decision)
    except Exception as error:
        notifier.send("given up", f"{type(error).__name__}: {error}", run_dir.latest_step(run.directory))
        raise
    finally:
        notifier.close()


def start_until_decided(
    run: BatchRun, admit: Callable[[BatchRun], None], notifier: Notifier
) -> Requeue | Successor | Done | GiveUp:
    """Start the ranks until this job must end. Return the decision that ends it."""
    _warn_of_records(run)
    allocations.extend_last(run.directory)
    earlier = len(run_dir.attempts(run.directory))
    failed_preflight: tuple[str, ...] = ()
    billed: dict[str, float] = {}
    decision = look_and_decide(run, earlier, billed)
    if not isinstance(decision, Done):
        admit(run)
        if run.job.preflight and not isinstance(decision, GiveUp):
            failed_preflight = preflight(run.site, run.directory, run.allocation.nodes)
    while isinstance(decision := look_and_decide(run, earlier, billed, failed_preflight), Start):
        run_dir.add_bad_hosts(run.directory, decision.avoid)
        with Watch(notifier, run.directory):
            attempt(run, decision)
        notify_of_attempt(run, notifier)
    run_dir.add_bad_hosts(run.directory, decision.avoid)
    return decision


def notify_of_attempt(run: BatchRun, notifier: Notifier) -> None:
    """Send a notice if a node failure ended the newest start."""
    last = run_dir.last_attempt(run.directory)
    if last is not None and last.cause == "node failure":
        notifier.send("node lost", last.detail, last.end_step)


def notify_of_end(run: BatchRun, decision: Requeue | Successor | Done | GiveUp, notifier: Notifier) -> None:
    """Send a notice if the run ends with this job."""
    step = run_dir.latest_step(run.directory)
    match decision:
        case Done():
            notifier.send("end", decision.reason, step)
        case GiveUp():
            notifier.send("given up", str(decision.problem), step)


def look_and_decide(
    run: BatchRun, earlier: int, billed: dict[str, float], failed_preflight: tuple[str, ...] = ()
) -> Decision:
    """Return the decision for the current state. `earlier` and `billed` are those of `read_history`."""
    record_allocation(run)
    history = read_history(run, earlier, billed)
    stop_requested = (run.directory / run_dir.STOP_FILE).exists()
    now = Now(unix_s=time.time(), nodes=run.allocation.nodes, stop_requested=stop_requested)
    if not reason_to_end(run.job, history, stop_requested):
        now = replace(now, slow_hosts=too_slow(run), failed_preflight=failed_preflight)
        if not has_ended_job(history):  # near the walltime there is no time for commands whose answers are not needed
            health = slurm.node_health(run.allocation.nodes)
            now = replace(
                now,
                unhealthy=health.failed,
                draining=health.draining,
                time_left_s=slurm.time_left_s(run.allocation.job_id),
            )
    return decide(run.job, history, now)


def record_allocation(run: BatchRun) -> None:
    """Record that this allocation still exists, and when it began."""
    job_id = run.allocation.job_id
    restarts = int(environ("SLURM_RESTART_COUNT") or 0)
    now = time.time()
    recorded = [
        one for one in allocations.allocations(run.directory) if (one.job_id, one.restarts) == (job_id, restarts)
    ]
    started_unix_s = recorded[0].started_unix_s if recorded else _started_unix_s(job_id, now)
    allocated = allocations.Allocated(
        job_id=job_id,
        restarts=restarts,
        nodes=len(run.allocation.nodes),
        started_unix_s=started_unix_s,
        seen_unix_s=now,
    )
    allocations.record(run.directory, allocated)


def _started_unix_s(job_id: str, now: float) -> float:
    """Return the time at which this start of the job began. `now` if Slurm does not report the time."""
    text = environ("SLURM_JOB_START_TIME") or ""
    if text.isdecimal():
        return float(text)
    with suppress(FrontierError):
        return now - (walltime_s(slurm.job_fields(job_id).get("RunTime", "")) or 0)
    return now


def read_history(run: BatchRun, earlier: int, billed: dict[str, float]) -> History:
    """Return the history that the run directory records. `earlier` is the number of starts before this supervisor.

    `billed` holds the node-hours of each job in Slurm's accounting when this job last asked, and is updated if there is
    time: sacct can take 20 s, which are missing at the walltime.
    """
    history = History(
        target_step=run.config.train.steps,
        saves_final=run.config.train.save_final,
        bad_hosts=frozenset(run_dir.listed_bad_hosts(run.directory)),
        untrusted_hosts=frozenset(run_dir.untrusted_hosts(run.directory)),
    )
    saved_step = run_dir.latest_step(run.directory)
    for number, made in enumerate(run_dir.attempts(run.directory)):
        history = history.after(made, saved_step, is_own=number >= earlier)
    if run.job.max_node_hours is not None and not has_ended_job(history):
        billed.update(slurm.billed_to_run(run.directory))
    return replace(
        history,
        saved_step=saved_step,
        node_hours=allocations.node_hours(run.directory, billed),
        allocated_nodes=len(run.allocation.nodes),
    )


def too_slow(run: BatchRun) -> tuple[str, ...]:
    """Return hosts that were reported as stragglers at least `site.exclude_slow_after` times."""
    limit = run.site.exclude_slow_after
    if limit is None:
        return ()
    return tuple(slow.host for slow in run_dir.slow_hosts(run.directory) if slow.times >= limit)


def attempt(run: BatchRun, start: Start) -> None:
    """Start all ranks once, wait for their end, and record a failure."""
    if start.wait_s > 0:
        log.info(f"rank 0 moves to {start.nodes[0]}: waiting {start.wait_s:.0f} s until the old lock is stale")
        time.sleep(start.wait_s)
    run = run.with_plan(start.plan)
    if start.plan:
        record_switch(run)
    outcome, _ = start_ranks(run, start.nodes, start.deadline_s, start.save_after_s)
    if outcome.failure is not None:
        write_failure(run.directory, outcome.failure, complete=True)


def record_switch(run: BatchRun) -> None:
    """Record in decisions.jsonl that the run now uses its roomier plan (the layout that needs less memory).

    Does nothing if the last start already used this plan.
    """
    attempts = run_dir.attempts(run.directory)
    if attempts and attempts[-1].plan == run.plan and len(attempts[-1].nodes) == run.job.nodes:
        return
    full = [made for made in attempts if made.cause == OUT_OF_MEMORY]
    switch = run_dir.PlanSwitch(step=run_dir.latest_step(run.directory), plan=run.plan, reason=full[-1].detail)
    if switch in run_dir.plan_switches(run.directory)[-1:]:  # an earlier supervisor recorded it and started no ranks
        return
    run_dir.record_switch(run.directory, switch)
    log.warn(f"from step {switch.step} on, the run uses its roomier plan: {' '.join(switch.plan)}")


def carry_out(run: BatchRun, decision: Requeue | Successor | Done | GiveUp) -> int:
    """Execute the decision that ends this job. Return the exit code of the batch script."""
    match decision:
        case Done():
            log.info(decision.reason)
            return 0
        case GiveUp():
            print(f"error: {decision.problem}", file=sys.stderr)
            return decision.exit_code
        case Requeue():
            log.info(decision.reason)
            requeue(run.allocation.job_id)
            return 0
        case Successor():
            log.info(decision.reason)
            queue_successor(run)
            return 0


def requeue(job_id: str) -> None:
    """Requeue this job. Slurm then ends this shell. Raises FrontierError if this shell is still alive after 120 s."""
    log.info(f"requeueing job {job_id}")
    sys.stderr.flush()
    slurm.requeue(job_id)
    time.sleep(120)
    raise FrontierError(f"job {job_id} was requeued, but Slurm did not end it", f"scancel {job_id}", "scontrol requeue")


def queue_successor(run: BatchRun) -> None:
    """Queue one new job with the run's own script, unless one is queued already. It excludes the run's bad hosts.

    The new job starts when this job has ended.
    """
    queued = run_dir.queued_job(run.directory)
    if queued not in ("", run.allocation.job_id) and slurm.is_active(queued, slurm.PATIENCE_S):
        log.info(f"successor {queued} is already queued")
        return
    script = run.directory / SCRIPT
    bad = run_dir.bad_hosts(run.directory)
    if not script.is_file():
        fix = "start the run with frontier-llm submit, or use job.continuation=requeue"
        if bad:
            excluded = hostlist.compress(bad)
            fix = (
                f"submit again, with sbatch --exclude={excluded} or with frontier-llm submit, which "
                f"excludes them itself"
            )
        raise FrontierError(f"cannot queue the next job: there is no {script}", fix, "successor")
    warning_s = measured_warning_s(run.directory) or round(run.job.warning_s)
    options = {
        **as_options(run.job.sbatch),
        # partition and account of this job, which `submit` passed on the command line and not in the script
        **{name: environ(f"SLURM_JOB_{name.upper()}") for name in ("account", "partition", "qos")},
        "dependency": f"afterany:{run.allocation.job_id}",
        "signal": f"USR1@{warning_s}",
        "exclude": hostlist.compress(bad),
    }
    # a script from before job.json existed reads its warning time from this variable
    variables = {OLD_WARNING_VARIABLE: str(warning_s)} if environ(OLD_WARNING_VARIABLE) else {}
    job_id = queue(run.directory, sbatch_command(run.directory, options), variables, slurm.PATIENCE_S)
    write_job(replace(run.job, warning_s=float(warning_s)))
    log.info(f"successor {job_id} is queued")


def refuse_second_holder(run: BatchRun) -> None:
    """Raise FrontierError if another live job holds the run directory."""
    living = living_holder(run.directory)
    if living is not None and not living.job:  # if the holder has a job, Slurm is queried below
        refuse_second_start(run.directory)
    other = last_start(run.directory)
    if not other or other["job_id"] == run.allocation.job_id:
        return
    if slurm.job_fields(other["job_id"], slurm.PATIENCE_S).get("JobState") in slurm.ACTIVE - {"PENDING"}:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(other["since_unix_s"]))
        raise FrontierError(
            f"job {other['job_id']} on {other['host']} has been training there since {since}",
            f"scancel {other['job_id']}, or choose another train.run_dir",
            str(run.directory),
        )


def _warn_of_records(run: BatchRun) -> None:
    """Warn of unreadable starts, and of a warning time that has been too short so far."""
    if what := damaged_lines(run.directory / "attempts.jsonl", run_dir.is_attempt):
        log.warn(f"attempts.jsonl: {what}; the node-hours of the starts in these lines are not counted")
    needed_s = measured_warning_s(run.directory)
    if needed_s is not None and needed_s > run.job.warning_s:
        log.warn(
            f"a warning {run.job.warning_s:.0f} s before the end of the walltime is too late, because a step and a "
            f"save have taken longer: use --signal=USR1@{needed_s}"
        )


def main(
    words: Sequence[str],
    program: tuple[str, ...] = TRAIN,
    continuation: str | None = None,
    admit: Callable[[BatchRun], None] = lambda run: None,
) -> int:
    """Run the command line of the batch shell. `admit` raises an error if the run must not continue."""
    if not words:
        print("usage: python -m frontier_llm.cli.job RUN [key=value ...], or --run-dir=DIR", file=sys.stderr)
        return 2
    try:
        return supervise(open_batch(words, program, continuation), admit)
    except FrontierError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
