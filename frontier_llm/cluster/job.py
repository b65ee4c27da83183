"""The supervisor in the batch shell of a job: start the ranks, see how they end, and decide what comes next.

    python -m frontier_llm.cli.job CONFIG [key=value …] [--strict] [--allow-change KEY]          (launch/job.sh runs
    this)

One attempt is one srun of every rank. After it the run is finished, or stopped by a person, or it goes on: inside this
allocation when enough healthy nodes and time are left (a spare replaces a dead node), else as the same job requeued, or
as one successor job. Three attempts without progress end the chain.

Environment: FRONTIER_LLM_SPARE_NODES (nodes of the allocation to keep in hand), FRONTIER_LLM_CONTINUE (requeue |
successor | never), FRONTIER_LLM_MAX_NODE_HOURS (of all attempts together; then the run saves and ends),
FRONTIER_LLM_SIGNAL_LEAD_S (as --signal), FRONTIER_LLM_PREFLIGHT (1 = doctor first); FRONTIER_LLM_SITE,
FRONTIER_LLM_PYTHON and FRONTIER_LLM_RANK_PYTHON are set by launch/job.sh.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from frontier_llm import log
from frontier_llm.cluster import slurm
from frontier_llm.cluster.attempt import Outcome, start_ranks
from frontier_llm.cluster.doctor import preflight
from frontier_llm.cluster.hand_on import hand_on
from frontier_llm.cluster.job_spec import TRAIN, BatchJob, make_job
from frontier_llm.cluster.lead import SLURM_EARLY_S, measured_lead_s
from frontier_llm.errors import FrontierError
from frontier_llm.run import hostlist, run_dir
from frontier_llm.run.failure import FILE, write_failure
from frontier_llm.run.holder import STALE_AFTER_S, last_start, living_holder, refuse_second_start
from frontier_llm.run.rank_env import environ
from frontier_llm.run.records import damaged_lines

LOCK_STALE_S = STALE_AFTER_S + 5.0
RESERVE_S = 20.0  # before the walltime: what requeueing itself may take


def supervise(job: BatchJob, admit: Callable[[BatchJob], None] = lambda job: None) -> int:
    """Attempts until the run is finished, stopped, or handed on; the exit code of the batch script. `admit` may
    refuse what is left of the run.
    """
    refuse_second_holder(job)
    if what := damaged_lines(job.directory / "attempts.jsonl", run_dir.is_attempt):
        log.warn(f"attempts.jsonl: {what}; the node-hours of these starts are not counted")
    if (needed_s := measured_lead_s(job.directory)) is not None and needed_s > job.lead_s:
        log.warn(
            f"a step and a save have taken so long that {job.lead_s:.0f} s before the walltime is late: "
            f"--signal=USR1@{needed_s}"
        )
    if not nothing_to_do(job):
        admit(job)
        refuse_short_walltime(job)
        if environ("FRONTIER_LLM_PREFLIGHT") == "1":
            run_dir.add_bad_hosts(
                job.directory, preflight(job.site, job.directory, job.allocation.nodes, job.nodes_needed)
            )
    while not (reason := nothing_to_do(job)):
        nodes = choose_nodes(job)
        if len(nodes) < job.nodes_needed:
            return hand_on(job)
        outcome = attempt(job, nodes)
        if outcome.cause == "refused":
            return outcome.exit_code
        if nothing_to_do(job):
            continue  # and end
        if run_dir.crash_loop(job.directory):
            return give_up(job, outcome)
        if outcome.cause in ("interrupted", "walltime") or warned(job):
            return hand_on(job)
    log.info(reason)
    return 0


def give_up(job: BatchJob, outcome: Outcome) -> int:
    """The exit code after three attempts without progress. Raises FrontierError where the walltime was too short for
    any.
    """
    step = run_dir.latest_step(job.directory)
    if outcome.cause == "interrupted":
        raise FrontierError(
            f"three starts in a row were told to stop before they had saved a further step, the last at step {step}",
            f"give more walltime (sbatch --time) than its warning leads by: --signal=USR1@N of the script, and "
            f"FRONTIER_LLM_SIGNAL_LEAD_S, here {job.lead_s:.0f} s",
            "requeue",
        )
    log.warn(f"three attempts ended at step {step}: giving up; see {job.directory / FILE}")
    return outcome.exit_code or 1


def choose_nodes(job: BatchJob) -> tuple[str, ...]:
    """Those of the next attempt, in the allocation's order; too few when too many have failed."""
    bad = slurm.unhealthy(job.allocation.nodes)
    run_dir.add_bad_hosts(job.directory, [*bad, *job.too_slow])
    unusable = {*bad, *job.untrusted}
    usable = [node for node in job.allocation.nodes if node not in unusable]
    if len(usable) < job.nodes_needed:
        log.warn(
            f"{hostlist.compress(sorted(unusable))} failed; {len(usable)} nodes are left of the {job.nodes_needed} "
            f"needed"
        )
    # a host that has failed before is used again only when no other is left, an untrusted one never
    best = sorted(usable, key=set(run_dir.bad_hosts(job.directory)).__contains__)[: job.nodes_needed]
    return tuple(node for node in usable if node in best)


def refuse_second_holder(job: BatchJob) -> None:
    """Raise FrontierError when another live job owns the run directory."""
    living = living_holder(job.directory)
    if living is not None and not living.job:  # one of a job may have died just now: Slurm knows
        refuse_second_start(job.directory)
    other = last_start(job.directory)
    if not other or other["job_id"] == job.allocation.job_id:
        return
    if slurm.job_fields(other["job_id"]).get("JobState") in slurm.ACTIVE - {"PENDING"}:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(other["since_unix_s"]))
        raise FrontierError(
            f"job {other['job_id']} on {other['host']} has been running it since {since}",
            f"scancel {other['job_id']}, or choose another train.run_dir",
            str(job.directory),
        )


def refuse_short_walltime(job: BatchJob) -> None:
    """Raise FrontierError when the warning before the walltime is due already: ranks would save what they have just
    loaded, for ever.
    """
    left_s = slurm.time_left_s(job.allocation.job_id)
    lead_s = job.lead_s
    if left_s is not None and left_s < lead_s:
        raise FrontierError(
            f"{left_s:.0f} s of walltime, but ranks are told to save {lead_s:.0f} s before its end",
            f"sbatch --time={-(-2 * int(lead_s) // 60)} or more; or lower --signal and FRONTIER_LLM_SIGNAL_LEAD_S, "
            f"both, "
            "if a step and a save need less",
            "walltime",
        )


def nothing_to_do(job: BatchJob) -> str:
    """Why no further attempt is wanted: finished, or stopped by a person or its budget; '' when there is work."""
    train = job.config.train
    step = run_dir.latest_step(job.directory)
    end = run_dir.end(job.directory, train.steps, train.save_final)
    if end == "finished":
        return (
            f"finished: step {step} of {train.steps}"
            if step >= train.steps
            else "finished, without a final checkpoint (train.save_final=false)"
        )
    if end == "stopped":
        return f"stopped at step {step} by {job.directory / run_dir.STOP_FILE}; delete it to go on"
    if job.budget_left_s <= job.lead_s:
        used = f"{run_dir.node_hours(job.directory):,.1f} of {job.max_node_hours:,.1f} node-hours are used"
        return (
            f"stopped at step {step}: {used}, and a further start would not save in time; a higher "
            f"FRONTIER_LLM_MAX_NODE_HOURS goes on"
        )
    return ""


def attempt(job: BatchJob, nodes: tuple[str, ...]) -> Outcome:
    """One srun of all ranks, once the last one's lock is stale, and what ended it in failure.json."""
    let_the_lock_go_stale(job, nodes[0])
    left_s = slurm.time_left_s(job.allocation.job_id)
    outcome, _ = start_ranks(
        job, nodes, None if left_s is None else max(1.0, left_s - RESERVE_S), job.budget_left_s - job.lead_s
    )
    if outcome.failure is not None:
        write_failure(job.directory, outcome.failure, complete=True)
    return outcome


def let_the_lock_go_stale(job: BatchJob, first: str) -> None:
    """Rank 0 holds the checkpoints' lock. After a crash its next host can only tell by the silence that the old one
    is dead.
    """
    last = run_dir.last_attempt(job.directory)
    if last and last.failed and last.nodes[0] != first:
        # the clock may have been set back since
        left_s = min(last.ended_unix_s + LOCK_STALE_S - time.time(), LOCK_STALE_S)
        if left_s > 0:
            log.info(
                f"rank 0 moves from {last.nodes[0]} to {first}: waiting {left_s:.0f} s until the old lock is stale"
            )
            time.sleep(left_s)


def warned(job: BatchJob) -> bool:
    """True when Slurm's warning before the walltime is past: nobody would tell a new attempt to save."""
    left_s = slurm.time_left_s(job.allocation.job_id)
    return left_s is not None and left_s < max(job.lead_s + SLURM_EARLY_S, 2 * RESERVE_S)


def main(
    words: Sequence[str],
    program: tuple[str, ...] = TRAIN,
    continue_with: str | None = None,
    admit: Callable[[BatchJob], None] = lambda job: None,
) -> int:
    """Command line of the batch shell; `admit` may refuse what is left of the run."""
    if not words:
        print("usage: python -m frontier_llm.cli.job CONFIG [key=value ...]", file=sys.stderr)
        return 2
    try:
        return supervise(make_job(words, program, continue_with), admit)
    except FrontierError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
