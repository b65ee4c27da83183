"""The supervisor in the batch shell of a job: start the ranks, see how they end, and decide what comes next.

    python -m frontier_llm.cluster.job CONFIG [key=value …] [--strict] [--allow-change KEY]          (launch/job.sh runs this)

One attempt is one srun of every rank. After it the run is finished, or stopped by a person, or it goes on: inside this
allocation when enough healthy nodes and time are left (a spare replaces a dead node), else as the same job requeued, or as
one successor job. Three attempts without progress end the chain.

Environment: FRONTIER_LLM_SPARE_NODES (nodes of the allocation to keep in hand), FRONTIER_LLM_CONTINUE (requeue | successor |
never), FRONTIER_LLM_SIGNAL_LEAD_S (as --signal), FRONTIER_LLM_PREFLIGHT (1 = doctor first), FRONTIER_LLM_SITE, FRONTIER_LLM_PYTHON and
FRONTIER_LLM_RANK_PYTHON (set by launch/job.sh).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from frontier_llm import log
from frontier_llm.cluster import hostlist, run_dir, slurm
from frontier_llm.cluster.attempt import Outcome, Step, run_step
from frontier_llm.cluster.doctor import examine, settings_for
from frontier_llm.cluster.lead import measured_lead_s
from frontier_llm.cluster.rank_env import environ, environment, rank_python
from frontier_llm.cluster.sites import Site, load_site, root_dir
from frontier_llm.config import RunConfig, load_run
from frontier_llm.errors import FrontierError, LayoutError, Problem, suggest
from frontier_llm.topology import plan_problems

TRAIN_FLAGS = {"--strict": 0, "--allow-change": 1}  # of `frontier-llm train`, and how many words follow
TRAIN = ("-P", "-m", "frontier_llm.cli.main", "train")  # -P: never the code that happens to lie in the working directory
SLURM_EARLY_S = 60.0  # --signal may come this much before its time (sbatch manual)
LOCK_STALE_S = 65.0  # checkpoint/lock.py takes a silent holder on another host for dead after 60 s
RESERVE_S = 20.0  # before the walltime: what requeueing itself may take


@dataclass(frozen=True)
class Job:
    """What this batch shell has to bring about, and with what."""

    config: RunConfig
    words: tuple[str, ...]  # run file and overrides, as the ranks get them
    directory: Path  # of the run, absolute
    site: Site
    allocation: slurm.Allocation
    spares: int = 0
    continue_with: str = "requeue"
    program: tuple[str, ...] = TRAIN
    flags: tuple[str, ...] = ()  # of the program, passed on

    @property
    def nodes_needed(self) -> int:
        """Nodes that one attempt uses."""
        return len(self.allocation.nodes) - self.spares

    @property
    def world_size(self) -> int:
        """Ranks of one attempt."""
        return self.nodes_needed * self.allocation.tasks_per_node


def make_job(words: Sequence[str], program: tuple[str, ...] = TRAIN, continue_with: str | None = None) -> Job:
    """The job of this batch shell. Raises FrontierError for a bad config, layout or environment, before any rank starts."""
    allocation = slurm.Allocation.from_environment()
    site = load_site(environ("FRONTIER_LLM_SITE", "generic") or "generic")
    words, flags = split_flags(words)
    words = (words[0], f"machine={site.machine}", *words[1:])  # a run file may have been written for another site
    config = load_run(words[0], words[1:])
    continue_with = continue_with or environ("FRONTIER_LLM_CONTINUE") or "requeue"
    if continue_with not in ("requeue", "successor", "never"):
        raise FrontierError(f"{continue_with!r} is not requeue, successor or never", where="FRONTIER_LLM_CONTINUE")
    job = Job(
        config=config,
        words=words,
        directory=Path(config.train.run_dir).resolve(),
        site=site,
        allocation=allocation,
        spares=int(environ("FRONTIER_LLM_SPARE_NODES", "0") or 0),
        continue_with=continue_with,
        program=program,
        flags=flags,
    )
    if not 0 <= job.spares < len(allocation.nodes):
        raise FrontierError(f"{job.spares} of {len(allocation.nodes)} nodes", "keep at least one to work", "FRONTIER_LLM_SPARE_NODES")
    if problems := plan_problems(config, job.world_size):
        raise LayoutError([*problems, Problem("nodes", f"{job.nodes_needed} x {allocation.tasks_per_node} ranks", "sbatch --nodes=N")])
    return job


def split_flags(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(run file and overrides, flags of train) of what stood after the script's name. Raises FrontierError for a flag that train has not."""
    kept, flags, rest = list[str](), list[str](), list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            kept.append(word)
            continue
        name = word.partition("=")[0]
        if name not in TRAIN_FLAGS:
            raise FrontierError(f"{word} cannot stand after the script's name", suggest(name, TRAIN_FLAGS), "job")
        values = 0 if "=" in word else TRAIN_FLAGS[name]
        if len(rest) < values:
            raise FrontierError("needs the name of a key", f"write {name} train.steps", name)
        flags += [word, *(rest.pop(0) for _ in range(values))]
    if not kept:
        raise FrontierError("no run file is named", "sbatch slurm/train_small.sbatch does", "job")
    return tuple(kept), tuple(flags)


def supervise(job: Job) -> int:
    """Attempts until the run is finished, stopped, or handed on; the exit code of the batch script."""
    refuse_second_holder(job)
    if (needed_s := measured_lead_s(job.directory)) is not None and needed_s > given_lead_s(job):
        log.warn(
            f"a step and a save have taken so long that {given_lead_s(job):.0f} s before the walltime is late: --signal=USR1@{needed_s}"
        )
    if not nothing_to_do(job):
        refuse_short_walltime(job)
        if environ("FRONTIER_LLM_PREFLIGHT") == "1":
            preflight(job)
    while True:
        if reason := nothing_to_do(job):
            log.info(reason)
            return 0
        bad = slurm.unhealthy(job.allocation.nodes)
        run_dir.add_bad_hosts(job.directory, bad)
        unusable = {*bad, *untrusted_here(job)}
        avoid = {*bad, *run_dir.bad_hosts(job.directory)}
        # a host that has failed before is used again only when no other is left, one that computed wrongly never
        order = [
            *(node for node in job.allocation.nodes if node not in avoid),
            *(n for n in job.allocation.nodes if n in avoid and n not in unusable),
        ]
        if len(order) < job.nodes_needed:
            log.warn(f"{hostlist.compress(sorted(unusable))} failed; {len(order)} nodes are left of the {job.nodes_needed} needed")
            return continue_later(job)
        chosen = set(order[: job.nodes_needed])
        outcome = attempt(job, tuple(node for node in job.allocation.nodes if node in chosen))
        if outcome.cause == "refused":
            return outcome.exit_code
        if nothing_to_do(job):
            continue  # says why, and ends
        if run_dir.crash_loop(job.directory):
            if outcome.cause == "interrupted":
                raise FrontierError(
                    f"three starts in a row were told to stop before they had saved a further step, the last at step {run_dir.latest_step(job.directory)}",
                    f"give more walltime (sbatch --time) than its warning leads by: --signal=USR1@N of the script, and "
                    f"FRONTIER_LLM_SIGNAL_LEAD_S, here {given_lead_s(job):.0f} s",
                    "requeue",
                )
            log.warn(f"three attempts ended at step {run_dir.latest_step(job.directory)}: giving up; see {job.directory / 'failure.json'}")
            return outcome.exit_code or 1
        if outcome.cause in ("interrupted", "walltime") or warned(job):
            return continue_later(job)


def preflight(job: Job) -> None:
    """`doctor` on every node; bad ones are left out. Raises FrontierError when too few are left or all share a fatal fault."""
    report = examine(job.site, settings_for(job.site, job.directory), job.allocation.nodes)
    log.info(report.render())
    left = len(job.allocation.nodes) - len(report.bad_hosts)
    if left < job.nodes_needed or not (report.healthy or report.bad_hosts):
        fix = f"resubmit with --exclude={hostlist.compress(report.bad_hosts)}" if report.bad_hosts else "see the findings above"
        raise FrontierError(f"{left} of {len(job.allocation.nodes)} nodes passed, {job.nodes_needed} are needed", fix, "preflight")
    run_dir.add_bad_hosts(job.directory, list(report.bad_hosts))


def refuse_second_holder(job: Job) -> None:
    """Raise FrontierError when another live job owns the run directory."""
    other = run_dir.holder(job.directory)
    if other and other["job_id"] != job.allocation.job_id and slurm.is_active(other["job_id"]):
        fields = slurm.job_fields(other["job_id"])
        if fields.get("JobState") != "PENDING":
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(other["since_unix_s"]))
            raise FrontierError(
                f"job {other['job_id']} on {other['host']} has been running it since {since}",
                f"scancel {other['job_id']}, or choose another train.run_dir",
                str(job.directory),
            )


def refuse_short_walltime(job: Job) -> None:
    """Raise FrontierError when the warning before the walltime is due already: ranks would save what they have just loaded, again and again."""
    left_s, lead_s = slurm.time_left_s(job.allocation.job_id), given_lead_s(job)
    if left_s is not None and left_s < lead_s:
        raise FrontierError(
            f"{left_s:.0f} s of walltime, but ranks are told to save {lead_s:.0f} s before its end",
            f"sbatch --time={-(-2 * int(lead_s) // 60)} or more; or lower --signal and FRONTIER_LLM_SIGNAL_LEAD_S, both, if a step and a save need less",
            "walltime",
        )


def untrusted_here(job: Job) -> list[str]:
    """Nodes of the allocation that computed wrongly."""
    return [node for node in run_dir.untrusted_hosts(job.directory) if node in job.allocation.nodes]


def nothing_to_do(job: Job) -> str:
    """Why no further attempt is wanted: finished, or stopped by a person; '' when there is work."""
    step = run_dir.latest_step(job.directory)
    if step >= job.config.train.steps:
        return f"finished: step {step} of {job.config.train.steps}"
    if (job.directory / run_dir.STOP_FILE).exists():
        return f"stopped at step {step} by {job.directory / run_dir.STOP_FILE}; delete it to go on"
    return ""


def attempt(job: Job, nodes: tuple[str, ...]) -> Outcome:
    """One srun of all ranks, recorded in attempts.jsonl."""
    let_the_lock_go_stale(job, nodes[0])
    (job.directory / "failure.json").unlink(missing_ok=True)  # of an earlier attempt; the ranks may write a new one
    started_s, start_step = time.time(), run_dir.latest_step(job.directory)
    incarnation = run_dir.take(job.directory, job.allocation.job_id, job.allocation.batch_host)
    left_s = slurm.time_left_s(job.allocation.job_id)
    step = Step(
        nodes=nodes,
        batch_host=job.allocation.batch_host,
        tasks_per_node=job.allocation.tasks_per_node,
        cpus_per_task=job.allocation.cpus_per_task,
        gpus_per_node=job.site.gpus_per_node,
        options=tuple(job.site.srun.items()),
        interface=job.site.interface,
        launch_dir=root_dir() / "launch",
        command=(rank_python(), *job.program, *job.words, *job.flags),
        log_dir=job.directory / "logs" / f"attempt_{incarnation:04}",
        variables={"FRONTIER_LLM_INCARNATION": str(incarnation)},
        deadline_s=None if left_s is None else max(1.0, left_s - RESERVE_S),
    )
    log.info(f"attempt {incarnation}: {len(nodes)} nodes ({hostlist.compress(nodes)}), from step {start_step}")
    outcome = run_step(step)
    if outcome.cause == "crash" and (dead := dead_nodes(job, nodes, outcome)):
        outcome = replace(outcome, cause="node failure", detail=f"{hostlist.compress(dead)} failed", host=dead[0])
    accused = run_dir.wrong_results(job.directory)
    if outcome.cause == "crash" and accused:
        outcome = replace(outcome, cause="wrong results", detail=str(accused["what"]), host=str(accused["host"]), rank=int(accused["rank"]))
    end_step = run_dir.latest_step(job.directory)
    if outcome.cause == "interrupted" and end_step >= job.config.train.steps:
        outcome = replace(outcome, cause="finished")
    run_dir.record(
        job.directory,
        run_dir.Attempt(
            incarnation,
            job.allocation.job_id,
            nodes,
            start_step,
            end_step,
            outcome.exit_code,
            outcome.cause,
            outcome.detail,
            outcome.host,
            started_s,
        ),
    )
    log.info(f"attempt {incarnation} ended at step {end_step}: {outcome.cause}{', ' + outcome.detail if outcome.detail else ''}")
    if outcome.cause not in ("finished", "interrupted", "wrong results"):
        outcome.write(job.directory / "failure.json")
    return outcome


def let_the_lock_go_stale(job: Job, first: str) -> None:
    """Rank 0 holds the checkpoints' lock. After a crash its next host can only tell by the silence that the old one is dead."""
    made = run_dir.attempts(job.directory)
    if made and made[-1].cause not in ("finished", "interrupted") and made[-1].nodes[0] != first:
        left_s = made[-1].ended_unix_s + LOCK_STALE_S - time.time()
        if left_s > 0:
            left_s = min(left_s, LOCK_STALE_S)  # the clock may have been set back since
            log.info(f"rank 0 moves from {made[-1].nodes[0]} to {first}: waiting {left_s:.0f} s until the old lock is stale")
            time.sleep(left_s)


def given_lead_s(job: Job) -> float:
    """How long before the walltime Slurm warns this job."""
    return float(environ("FRONTIER_LLM_SIGNAL_LEAD_S") or job.site.signal_lead_s)


def warned(job: Job) -> bool:
    """True when Slurm's warning before the walltime is past: nobody would tell a new attempt to save."""
    left_s = slurm.time_left_s(job.allocation.job_id)
    return left_s is not None and left_s < max(given_lead_s(job) + SLURM_EARLY_S, 2 * RESERVE_S)


def dead_nodes(job: Job, nodes: tuple[str, ...], outcome: Outcome) -> list[str]:
    """Nodes that Slurm calls unhealthy after a crash; when only survivors have spoken, wait until Slurm must have noticed."""
    deadline_s = time.monotonic() + (job.site.node_timeout_s if outcome.peers_only else 0.0)
    while not (dead := slurm.unhealthy(nodes)) and time.monotonic() < deadline_s:
        time.sleep(5.0)
    return dead


def continue_later(job: Job) -> int:
    """Hand the rest of the run on: this job requeued, or exactly one successor."""
    bad = run_dir.bad_hosts(job.directory)
    if job.continue_with == "never":
        log.info("not continued: FRONTIER_LLM_CONTINUE=never")
        return 0
    if job.continue_with == "requeue" and not untrusted_here(job):  # a requeued job may get the same nodes again, a new one excludes them
        log.info(f"requeueing job {job.allocation.job_id}")
        sys.stderr.flush()
        slurm.requeue(job.allocation.job_id)
        time.sleep(120)  # Slurm ends this shell
        raise FrontierError(f"job {job.allocation.job_id} was requeued but is still here", "scancel it", "scontrol requeue")
    queued = successor(job.directory)
    if queued is not None:
        log.info(f"successor {queued} is already queued")
        return 0
    script = job.directory / "job.sbatch"
    if not script.is_file():
        fix = "start the run with frontier-llm submit, or use FRONTIER_LLM_CONTINUE=requeue"
        if bad:
            fix = f"submit again, with sbatch --exclude={hostlist.compress(bad)} or with frontier-llm submit, which excludes them itself"
        raise FrontierError(f"there is no {script}", fix, "successor")
    options = [f"--dependency=afterany:{job.allocation.job_id}", f"--chdir={os.getcwd()}", "--parsable"]
    options += [f"--exclude={hostlist.compress(bad)}"] if bad else []
    options += [f"--account={account}"] if (account := environ("SLURM_JOB_ACCOUNT")) else []
    lead_s = measured_lead_s(job.directory) or round(given_lead_s(job))
    options.append(f"--signal=USR1@{lead_s}")
    variables = {**environment(), "FRONTIER_LLM_SIGNAL_LEAD_S": str(lead_s)}
    job_id = slurm.call(["sbatch", *options, str(script)], env=variables).strip().split(";")[0]
    run_dir.write_atomically(job.directory / "successor", job_id + "\n")
    log.info(f"successor {job_id} is queued")
    return 0


def successor(directory: Path) -> str | None:
    """The id of the queued or running successor, if there is one besides the asking job."""
    path = directory / "successor"
    if not path.is_file():
        return None
    job_id = path.read_text(encoding="utf-8").strip()
    return job_id if job_id != environ("SLURM_JOB_ID") and slurm.is_active(job_id) else None


def main(words: Sequence[str], program: tuple[str, ...] = TRAIN, continue_with: str | None = None) -> int:
    """Command line of the batch shell."""
    if not words:
        print("usage: python -m frontier_llm.cluster.job CONFIG [key=value ...]", file=sys.stderr)
        return 2
    try:
        return supervise(make_job(words, program, continue_with))
    except FrontierError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
