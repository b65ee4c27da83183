"""Decides what the supervisor does next. `decide` maps records to one decision, without I/O and without a clock.

`decide` is called before and after each start of the ranks. `cluster.supervisor` reads the records from Slurm, the
clock and the run directory, and executes the decision. A simulation makes its own records (`History.after`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from frontier_llm.errors import CRASH, NOT_FINITE, OUT_OF_MEMORY, REFUSED_CAUSE, Problem
from frontier_llm.run import hostlist
from frontier_llm.run.failure import FILE as FAILURE_FILE
from frontier_llm.run.holder import STALE_AFTER_S
from frontier_llm.run.job import Job
from frontier_llm.run.run_dir import STOP_FILE, Attempt, crashed_twice, is_finished

CRASH_LOOP = 3  # starts in a row without a new saved step, after which the supervisor gives up
LOCK_STALE_S = STALE_AFTER_S + 5.0
# Part of the walltime that is kept after the ranks must have ended: 15 s for ranks that do not end at once, then one
# decision and the requeue.
RESERVE_S = 60.0
LEAST_RESERVE_S = 20.0
SLURM_EARLY_S = 60.0  # Slurm may send the signal of --signal this number of seconds too early (sbatch manual)


# Overrides of a plan, and the number of nodes of the start. The same layout on more nodes needs less memory.
PlanOnNodes = tuple[tuple[str, ...], int]


def plans_out_of_memory(attempts: tuple[Attempt, ...]) -> frozenset[PlanOnNodes]:
    """Return the plans with which a start was out of memory."""
    return frozenset((attempt.plan, len(attempt.nodes)) for attempt in attempts if attempt.cause == OUT_OF_MEMORY)


@dataclass(frozen=True)
class History:
    """Progress and starts of the run, over all its jobs."""

    target_step: int  # train.steps.
    saves_final: bool = True  # train.save_final.
    saved_step: int = 0  # step of the newest complete checkpoint.
    node_hours: float = 0.0  # total of all jobs, as Slurm charges them: nodes of the allocation times its time.
    allocated_nodes: int = 0  # nodes of this allocation; 0: the nodes and spares of the job.
    last: Attempt | None = None  # the newest start.
    is_own: bool = False  # True if `last` belongs to this start of the supervisor.
    # The newest CRASH_LOOP starts with the plan of `last`, without node failures and failed starts.
    recent: tuple[Attempt, ...] = ()
    failed_starts: tuple[Attempt, ...] = ()  # the newest starts in a row that failed before they finished a step.
    full_plans: frozenset[PlanOnNodes] = frozenset()  # plans with which a start was out of memory.
    crashed_hosts: tuple[str, ...] = ()  # suspect host of each crash.
    bad_hosts: frozenset[str] = frozenset()  # hosts that are used only if no other host is left.
    untrusted_hosts: frozenset[str] = frozenset()  # hosts that computed wrong results; never used again.

    def after(self, attempt: Attempt, saved_step: int, *, is_own: bool = True) -> History:
        """Return the history with one more start, after which the newest checkpoint has the step `saved_step`.

        `node_hours` does not change, because Slurm charges allocations and not starts.
        """
        is_same_plan = self.last is None or attempt.plan == self.last.plan
        recent = self.recent if is_same_plan else ()
        failed_before = self.failed_starts if is_same_plan else ()
        failed_starts = (*failed_before, attempt) if attempt.is_failed_start else ()
        if attempt.cause != "node failure" and not attempt.is_failed_start:
            recent = (*recent, attempt)[-CRASH_LOOP:]
        crashed = self.crashed_hosts
        if attempt.cause == CRASH and attempt.failed_host:
            crashed = (*crashed, attempt.failed_host)
        return replace(
            self,
            saved_step=saved_step,
            last=attempt,
            is_own=is_own,
            recent=recent,
            failed_starts=failed_starts,
            full_plans=self.full_plans | plans_out_of_memory((attempt,)),
            crashed_hosts=crashed,
            bad_hosts=self.bad_hosts | crashed_twice(crashed),
        )

    @property
    def is_crash_loop(self) -> bool:
        """True if the newest starts made no progress. Node failures and failed starts are not counted."""
        is_full = len(self.recent) == CRASH_LOOP
        return is_full and all(attempt.end_step <= self.recent[0].start_step for attempt in self.recent)

    @property
    def failed_start_node_hours(self) -> float:
        """Node-hours of the failed starts in a row."""
        return sum(attempt.node_hours for attempt in self.failed_starts)

    @property
    def repeats_a_fault(self) -> bool:
        """True if the newest CRASH_LOOP failed starts ended with the same error of the program."""
        faults = [attempt.fault for attempt in self.failed_starts[-CRASH_LOOP:]]
        return len(faults) == CRASH_LOOP and bool(faults[0]) and len(set(faults)) == 1


@dataclass(frozen=True)
class Now:
    """The state of the allocation, the clock and the run directory at the time of a decision."""

    unix_s: float
    nodes: tuple[str, ...]  # nodes of the allocation, in its order.
    unhealthy: tuple[str, ...] = ()  # nodes that have failed (`slurm.NodeHealth`).
    draining: tuple[str, ...] = ()  # nodes that are not used for new starts. All nodes drain before a maintenance.
    failed_preflight: tuple[str, ...] = ()  # nodes in which the examination before the first start found a fault.
    slow_hosts: tuple[str, ...] = ()  # hosts that were reported as stragglers as often as the site allows.
    time_left_s: float | None = None  # time until the walltime; None: no limit.
    stop_requested: bool = False  # the file STOP exists.


@dataclass(frozen=True)
class Start:
    """Start the ranks on `nodes`."""

    nodes: tuple[str, ...]
    plan: int = 0  # index in the job's plans; 0 for a job without plans
    wait_s: float = 0.0  # time to wait before the start, until the lock of the last start is stale
    deadline_s: float | None = None  # time after which the ranks are ended; None: never
    save_after_s: float = math.inf  # time after which the ranks must save and end, because the budget is then used
    avoid: tuple[str, ...] = ()  # hosts to add to the run's bad hosts


@dataclass(frozen=True)
class Requeue:
    """Requeue this job."""

    reason: str
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True)
class Successor:
    """Ensure that exactly one new job is queued. The new job excludes the run's bad hosts."""

    reason: str
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True)
class Done:
    """End without an error: the run is finished, was stopped, or must not be continued."""

    reason: str
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True)
class GiveUp:
    """End with an error that another start would not repair."""

    problem: Problem
    exit_code: int
    avoid: tuple[str, ...] = ()


Decision = Start | Requeue | Successor | Done | GiveUp


def decide(job: Job, history: History, now: Now) -> Decision:
    """Return the next action of the supervisor of `job`."""
    last = history.last if history.is_own else None
    if last is not None and last.cause in (REFUSED_CAUSE, NOT_FINITE):
        what = "the ranks refused to start this run, so it is not started again"
        if last.cause == NOT_FINITE:
            what = "too many steps in a row were skipped, so the run is not started again"
        return GiveUp(Problem("", what, f"see {job.directory / FAILURE_FILE}"), last.exit_code or 2)
    if reason := reason_to_end(job, history, now.stop_requested):
        return Done(reason)
    if last is None and now.time_left_s is not None and now.time_left_s < job.warning_s:
        return GiveUp(_short_walltime(job, now.time_left_s), 2)
    in_use = plan_in_use(job, history.full_plans)
    is_switch = last is not None and last.cause == OUT_OF_MEMORY and bool(job.plans) and job.plans[in_use] != last.plan
    if last is not None and not is_switch and history.is_crash_loop:
        return _give_up_crash_loop(job, history, last)
    if last is not None and not is_switch and (problem := _failed_start_problem(job, history)):
        return GiveUp(problem, last.exit_code or 1)
    if last is not None and _is_job_over(job, history, now):
        return _next_job(job, history, now, f"this job ends: {last.cause}")
    return _start(job, history, now)


def plan_in_use(job: Job, full_plans: frozenset[PlanOnNodes]) -> int:
    """Return the index of the plan for the next start.

    The result is 1 (the roomier plan, which needs less memory) if a start with plan 0 was out of memory, otherwise 0.

    The record of such a start is never deleted, so the run never goes back to plan 0.
    """
    return int(len(job.plans) > 1 and (job.plans[0], job.nodes) in full_plans)


def reason_to_end(job: Job, history: History, stop_requested: bool) -> str:
    """Return the reason for ending the run: finished, stopped by a user, or out of budget. '' otherwise."""
    step = history.saved_step
    if is_finished(step, history.target_step, history.saves_final, history.last):
        if step >= history.target_step:
            return f"finished: step {step} of {history.target_step}"
        return "finished, without a final checkpoint (train.save_final=false)"
    if stop_requested:
        return f"stopped at step {step} by {job.directory / STOP_FILE}; delete the file to continue"
    if job.max_node_hours is not None and budget_left_s(job, history) <= job.warning_s:
        used = f"{history.node_hours:,.1f} of {job.max_node_hours:,.1f} node-hours are used"
        return (
            f"stopped at step {step}: {used}, and a further start would not save in time; raise "
            f"job.max_node_hours to continue"
        )
    return ""


def budget_left_s(job: Job, history: History) -> float:
    """Return the time for which the allocation can still run within the budget. Infinite without a budget."""
    if job.max_node_hours is None:
        return math.inf
    nodes = history.allocated_nodes or job.all_nodes
    return (job.max_node_hours - history.node_hours) * 3600 / nodes


def reserve_s(job: Job) -> float:
    """Return the part of the walltime that is kept for the requeue. The ranks get at least half of the warning time."""
    return max(LEAST_RESERVE_S, min(RESERVE_S, job.warning_s / 2))


def has_ended_job(history: History) -> bool:
    """Return True if the newest start ends this job, whatever the state of its nodes."""
    last = history.last if history.is_own else None
    return last is not None and last.cause in ("interrupted", "finished", "walltime")


def _is_job_over(job: Job, history: History, now: Now) -> bool:
    """Return True if this job must not start the ranks again: the last start was interrupted, finished or reached the
    walltime, or Slurm's warning is due.
    """
    if has_ended_job(history):
        return True
    latest_s = max(job.warning_s + SLURM_EARLY_S, 2 * reserve_s(job))
    return now.time_left_s is not None and now.time_left_s < latest_s


def _short_walltime(job: Job, left_s: float) -> Problem:
    """Return the problem of a job that starts after its warning time began. Its ranks would only load and save
    again."""
    what = f"only {left_s:.0f} s are left, but ranks are warned to save {job.warning_s:.0f} s before its end"
    minutes = -(-2 * int(job.warning_s) // 60)
    fix = f"sbatch --time={minutes} or more; or, if a step and a save take less, lower both --signal and job.warning_s"
    return Problem("walltime", what, fix)


def _give_up_crash_loop(job: Job, history: History, last: Attempt) -> GiveUp:
    step = history.saved_step
    if last.cause in ("interrupted", "finished"):
        what = (
            f"three starts in a row had to stop before they saved a further step, the last at step {step}: the run is "
            f"not started again"
        )
        fix = (
            f"request more walltime (sbatch --time) than the warning time: --signal=USR1@N of the script, and "
            f"job.warning_s, here {job.warning_s:.0f} s"
        )
        return GiveUp(Problem("requeue", what, fix), 2)
    see = job.directory / FAILURE_FILE
    what = f"three attempts in a row ended at step {step}, so the run is not started again; see {see}"
    return GiveUp(Problem("", what), last.exit_code or 1)


def _failed_start_problem(job: Job, history: History) -> Problem | None:
    """Return the problem of starts that never reach a step. None if another start may still succeed.

    A start on many nodes often fails although nothing is wrong with the run. The number of failed starts is therefore
    not limited, but their node-hours are. If the program repeats the same error, another start cannot succeed.
    """
    see = job.directory / FAILURE_FILE
    count = len(history.failed_starts)
    if history.repeats_a_fault:
        what = (
            f"{CRASH_LOOP} starts in a row failed before their first step with the same error, so the run is not "
            f"started again"
        )
        return Problem("", what, f"see {see}")
    used = history.failed_start_node_hours
    if count == 0 or used < job.failed_start_limit:
        return None
    what = (
        f"{count} starts in a row failed before their first step and used {used:,.1f} node-hours, and the "
        f"limit is {job.failed_start_limit:,.1f}, so the run is not started again"
    )
    return Problem("", what, f"see {see}; job.failed_start_node_hours=H sets another limit")


def _next_job(job: Job, history: History, now: Now, reason: str) -> Decision:
    """Return the decision that continues the run after this job, or ends it."""
    avoid = now.slow_hosts
    last = history.last if history.is_own else None
    if job.continuation == "never":
        if last is not None and not last.failed:
            return Done("not continued: job.continuation is never", avoid)
        what = f"the run is not finished, and not continued because job.continuation is never ({reason})"
        exit_code = 1 if last is None else last.exit_code or 1
        return GiveUp(Problem("", what, "start it again; it continues from its newest checkpoint"), exit_code, avoid)
    # a requeued job can get the same nodes again, but a new job can exclude them
    excluded = history.untrusted_hosts | {*now.failed_preflight}
    if job.continuation == "requeue" and excluded.isdisjoint(now.nodes):
        return Requeue(reason, avoid)
    return Successor(reason, avoid)


def _start(job: Job, history: History, now: Now) -> Decision:
    """Return a start on the best nodes, in the allocation's order.

    If too few nodes are left, return the decision that continues the run in the next job.
    """
    avoid = (*now.unhealthy, *now.failed_preflight, *now.slow_hosts)
    unusable = {*now.unhealthy, *now.draining, *now.failed_preflight, *history.untrusted_hosts} & {*now.nodes}
    usable = [node for node in now.nodes if node not in unusable]
    if len(usable) < job.nodes:
        how = "failed or are draining" if now.draining else "failed"
        reason = (
            f"{hostlist.compress(sorted(unusable))} {how}; only {len(usable)} of the {job.nodes} needed nodes are left"
        )
        decision = _next_job(job, history, now, reason)
        return replace(decision, avoid=avoid)
    bad = {*history.bad_hosts, *avoid}
    best = sorted(usable, key=bad.__contains__)[: job.nodes]
    nodes = tuple(node for node in usable if node in best)
    wait_s = _lock_wait_s(history.last, nodes[0], now.unix_s)
    deadline_s = None if now.time_left_s is None else max(1.0, now.time_left_s - wait_s - reserve_s(job))
    return Start(
        nodes=nodes,
        plan=plan_in_use(job, history.full_plans),
        wait_s=wait_s,
        deadline_s=deadline_s,
        save_after_s=budget_left_s(job, history) - job.warning_s - wait_s,
        avoid=avoid,
    )


def _lock_wait_s(last: Attempt | None, first_node: str, unix_s: float) -> float:
    """Return the time until the checkpoint lock of the last start is stale.

    Rank 0 holds this lock. After a crash, another node recognises a dead holder only by missing heartbeats.
    """
    if last is None or not last.failed or last.nodes[0] == first_node:
        return 0.0
    left_s = last.ended_unix_s + LOCK_STALE_S - unix_s
    return min(max(0.0, left_s), LOCK_STALE_S)  # never longer, even if the clock was set back after the last start
