"""Starts all ranks with one srun, finds the rank that failed first, and records the attempt in attempts.jsonl."""

from __future__ import annotations

import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import IO

from frontier_llm import log
from frontier_llm.cluster import slurm
from frontier_llm.cluster.batch import BatchRun
from frontier_llm.cluster.notices import WEBHOOK_VARIABLE
from frontier_llm.cluster.rank_logs import conclusion, failure_lines, first_traceback, prune, rank_log
from frontier_llm.cluster.site_variables import step_variables
from frontier_llm.cluster.sites import Site, root_dir
from frontier_llm.config import RunConfig
from frontier_llm.errors import CRASH, NOT_FINITE, REFUSED_CAUSE, FrontierError
from frontier_llm.run import hostlist, job_secret, run_dir
from frontier_llm.run.failure import (
    REFUSED,
    STUCK,
    Evidence,
    Failure,
    cause_of,
    forget_failure,
    read_failure,
    speaks_of_hardware,
)
from frontier_llm.run.holder import take
from frontier_llm.run.job import ROOMIER_PLAN_VARIABLE
from frontier_llm.run.rank_env import environment, rank_python
from frontier_llm.run.signals import EXIT_INTERRUPTED
from frontier_llm.units import printable

ENDING_S = 15.0  # time that ranks have to end after SIGTERM before the batch shell continues
_TASK_ERROR = re.compile(r"srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>[\d,\[\]-]+): (?P<how>.+)")
_KILLING = "Terminating StepId"  # srun prints it before it kills all tasks; a task killed later is not the cause.
# In srun's message about a rank that Slurm's warning (SIGUSR1) killed before the rank had a handler.
_TOLD_TO_SAVE = "User defined signal 1"
_SILENT_NODE = "Timed out waiting for job step"  # srun received no reply from at least one node.


@dataclass(frozen=True)
class JobStep:
    """One srun of a job."""

    directory: Path  # the ranks write failure records into it
    command: tuple[str, ...]  # arguments of the ranks' interpreter
    config: RunConfig  # determines the variables of the ranks
    site: Site
    allocation: slurm.Allocation
    nodes: tuple[str, ...]
    log_dir: Path
    variables: Mapping[str, str]
    deadline_s: float | None  # time limit of the step; None: no limit
    save_after_s: float = math.inf  # seconds after which the ranks get the signal to save and end

    def srun(self) -> list[str]:
        """Return the command line: one task per GCD. If one task fails, srun ends all tasks."""
        nodes = len(self.nodes)
        tasks_per_node = self.allocation.tasks_per_node
        return [
            "srun",
            f"--nodes={nodes}",
            f"--nodelist={hostlist.compress(self.nodes)}",
            f"--ntasks={nodes * tasks_per_node}",
            f"--ntasks-per-node={tasks_per_node}",
            f"--cpus-per-task={self.allocation.cpus_per_task}",
            f"--gpus-per-node={self.site.gpus_per_node}",
            "--distribution=block",  # consecutive ranks on one node, so that tensor parallelism stays inside a node
            "--kill-on-bad-exit=1",
            "--wait=60",
            "--unbuffered",
            *(f"--{name}={value}" if value else f"--{name}" for name, value in self.site.srun.items()),
            str(root_dir() / "launch" / "rank.sh"),
            rank_python(),
            *self.command,
        ]


@dataclass(frozen=True)
class Outcome:
    """The end of one srun of all ranks: exit code, and failure if there was one."""

    exit_code: int
    failure: Failure | None = None  # None: finished or stopped on request.
    # True: all reporting ranks only lost a peer. A node may be dead although Slurm has not noticed it yet.
    peers_only: bool = False

    @property
    def cause(self) -> str:
        """The cause of the failure, or 'interrupted' if there is none."""
        return self.failure.cause if self.failure else "interrupted"


def start_ranks(
    run: BatchRun,
    nodes: tuple[str, ...],
    deadline_s: float | None,
    save_after_s: float = math.inf,
    progress: Callable[[Path], int] = run_dir.latest_step,
) -> tuple[Outcome, float]:
    """Run all ranks on these nodes with one srun and record the attempt. Return (outcome, duration in seconds).

    A crash with a dead node is recorded as a node failure. `progress` returns the number of steps that a run directory
    has completed.
    """
    forget_failure(run.directory)  # delete an earlier attempt's record; the ranks may write a new record
    started_s = time.time()
    start_step = progress(run.directory)
    number = take(run.directory, run.allocation.job_id, run.allocation.batch_host)
    log.info(f"attempt {number}: {len(nodes)} nodes ({hostlist.compress(nodes)}), from step {start_step}")
    prune(run.directory / "logs")
    log_dir = run.directory / "logs" / f"attempt_{number:04}"
    before = run_dir.place(run.directory)
    variables = {"FRONTIER_LLM_INCARNATION": str(number), **plan_variables(run)}
    outcome = run_step(job_step(run, nodes, log_dir, variables, deadline_s, save_after_s))
    run_dir.refuse_moved(run.directory, before)
    if outcome.cause == CRASH and (dead := dead_nodes(run, nodes, outcome)):
        gone = Failure(
            f"{hostlist.compress(dead)} failed", Evidence.ENDS, "node failure", host=dead[0], host_suspect=True
        )
        outcome = replace(outcome, failure=gone)
    failure = outcome.failure
    end_step = progress(run.directory)
    is_done = end_step >= run.config.train.steps or outcome.exit_code == 0
    failed_at = 0 if failure is None or failure.step is None else failure.step
    is_host_suspect = failure is not None and failure.host_suspect and failure.host in nodes
    ended = run_dir.Attempt(
        incarnation=number,
        job_id=run.allocation.job_id,
        nodes=nodes,
        start_step=start_step,
        end_step=end_step,
        exit_code=outcome.exit_code,
        cause="finished" if failure is None and is_done else outcome.cause,
        detail="" if failure is None else failure.describe(),
        failed_host=failure.host if failure is not None and is_host_suspect else "",
        started_unix_s=started_s,
        last_step=max(end_step, failed_at, run_dir.last_logged_step(run.directory, number)),
        fault="" if failure is None else failure.program_fault,
        plan=run.plan,
    )
    run_dir.record(run.directory, ended)
    log.info(f"attempt {number} ended at step {end_step}: {ended.cause}{', ' + ended.detail if ended.detail else ''}")
    return outcome, ended.ended_unix_s - started_s


def job_step(
    run: BatchRun,
    nodes: tuple[str, ...],
    log_dir: Path,
    variables: Mapping[str, str],
    deadline_s: float | None,
    save_after_s: float = math.inf,
) -> JobStep:
    """Return the srun of a job that trains."""
    return JobStep(
        directory=run.directory,
        command=run.command,
        config=run.config,
        site=run.site,
        allocation=run.allocation,
        nodes=nodes,
        log_dir=log_dir,
        variables=variables,
        deadline_s=deadline_s,
        save_after_s=save_after_s,
    )


def plan_variables(run: BatchRun) -> dict[str, str]:
    """Return the variable that tells the ranks whether the job has another plan, which needs less memory."""
    has_roomier = bool(run.job.plans) and run.plan == run.job.plans[0]
    return {ROOMIER_PLAN_VARIABLE: "1"} if has_roomier else {}


def dead_nodes(run: BatchRun, nodes: tuple[str, ...], outcome: Outcome) -> tuple[str, ...]:
    """Return the nodes that have failed according to Slurm after a crash. Draining nodes still work.

    If only ranks that lost a peer have reported, wait up to the site's `node_timeout_s` for Slurm to notice the node.
    """
    deadline_s = time.monotonic() + (run.site.node_timeout_s if outcome.peers_only else 0.0)
    while not (dead := slurm.node_health(nodes).failed) and time.monotonic() < deadline_s:
        time.sleep(5.0)
    return dead


def master_address(step: JobStep) -> str:
    """Return the IPv4 address of rank 0's node, so that the ranks need no DNS request. Raises FrontierError."""
    command = [str(root_dir() / "launch" / "address.sh"), step.site.interface or ""]
    first = step.nodes[0]
    if first != step.allocation.batch_host:
        command = ["srun", "--nodes=1", "--ntasks=1", "--gpus-per-node=0", "--overlap", f"--nodelist={first}", *command]
    text = slurm.call(command).strip()
    try:
        socket.inet_aton(text)
    except OSError as error:
        raise FrontierError(f"{text!r} is not an IPv4 address", f"check launch/address.sh on {first}", first) from error
    return text


def run_step(step: JobStep) -> Outcome:
    """Start the ranks and wait for their end. Return the outcome. The traceback of the first failed rank is printed
    last.
    """
    run_dir.make_log_dir(step.log_dir, step.directory)
    try:
        address = master_address(step)
    except FrontierError as error:
        return _without_address(step, error)
    variables = {
        # without SLURM_NO_KILL, srun ends the step if a node dies; otherwise the other ranks would wait for it
        **{name: value for name, value in environment().items() if name not in ("SLURM_NO_KILL", WEBHOOK_VARIABLE)},
        **step_variables(step.config, len(step.nodes), step.site, step.allocation.cpus_per_task),
        **step.variables,
        "MASTER_ADDR": address,
        "FRONTIER_LLM_LOG_DIR": str(step.log_dir),
        job_secret.VARIABLE: job_secret.new_secret(),
    }
    process = subprocess.Popen(  # noqa: S603 a list
        step.srun(), env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace"
    )
    assert process.stderr is not None
    messages: list[str] = []
    reader = threading.Thread(target=_copy, args=(process.stderr, messages), daemon=True)
    reader.start()
    reminder = threading.Timer(min(step.save_after_s, threading.TIMEOUT_MAX), process.send_signal, (signal.SIGUSR1,))
    reminder.start()
    try:
        code = process.wait(step.deadline_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
        what = (
            f"the ranks did not end in the {step.deadline_s:.0f} s that the walltime left; let Slurm warn them earlier "
            f"(sbatch --signal=USR1@N and job.warning_s=N)"
        )
        return Outcome(1, Failure(what, Evidence.ENDS, "walltime"))
    finally:
        reminder.cancel()
    reader.join(5.0)
    if code == 0:
        return Outcome(0)
    outcome = diagnose(code, messages, step.log_dir, read_failure(step.directory))
    if outcome.failure is not None:
        with suppress(OSError):  # the disk of the job's output can be full
            print(
                printable("\n".join([*outcome.failure.message, "", outcome.failure.describe()])),
                file=sys.stderr,
                flush=True,
            )
    return outcome


def _without_address(step: JobStep, error: FrontierError) -> Outcome:
    """Return the outcome of a start whose rank 0 has no address.

    If srun did not reach its node, Slurm may notice a dead node later. On the batch host the program itself has failed.
    """
    used_srun = step.nodes[0] != step.allocation.batch_host
    failure = Failure(f"no address of rank 0: {error}", Evidence.ENDS if used_srun else Evidence.LOGS)
    return Outcome(1, failure, peers_only=used_srun)


@dataclass(frozen=True)
class Fate:
    """The end of one task, according to srun."""

    host: str
    how: str

    @property
    def exit_code(self) -> int | None:
        """None if a signal ended the task or srun reports no exit code."""
        code = re.search(r"exit code (\d+)", self.how)
        return int(code[1]) if code else None


def diagnose(code: int, messages: Sequence[str], log_dir: Path, record: Failure | None) -> Outcome:
    """Find the rank that failed first, its host, and the reason.

    Uses srun's exit code and messages and the record of the ranks. The ranks' logs are searched if there is no record.
    They are also searched if the record names a silent rank and srun reports that another rank was killed. A rank with
    the exit code of a refusal takes precedence over ranks that only lost a peer.
    """
    fates = _fates(messages)
    first = next(iter(fates.values()), None)
    if first and (first.exit_code == EXIT_INTERRUPTED or _TOLD_TO_SAVE in first.how):
        return Outcome(EXIT_INTERRUPTED)  # srun's own code can come from a slower rank that srun then ended
    before = _fates(takewhile(lambda line: _KILLING not in line, messages))
    killed = [task for task, fate in before.items() if fate.exit_code is None]
    exit_code = code if 0 < code < 256 else 1
    refusing = [task for task, fate in fates.items() if fate.exit_code == REFUSED]
    if refusing and (record is None or record.evidence in (Evidence.NOTICES, Evidence.SYMPTOM)):
        return _refusal(fates[refusing[0]], refusing[0], log_dir)
    if record is None or (record.evidence is Evidence.NOTICES and killed and record.rank not in killed):
        return _from_logs(exit_code, messages, killed, log_dir)
    if record.rank is not None and (fate := fates.get(record.rank)):
        what = f"{fate.how}; {record.what}" if record.rank in killed else record.what
        record = replace(
            record, what=what, host=record.host or fate.host, host_suspect=record.host_suspect or record.rank in killed
        )
    return Outcome(REFUSED if record.cause in (REFUSED_CAUSE, NOT_FINITE) else exit_code, record)


def _refusal(fate: Fate, rank: int, log_dir: Path) -> Outcome:
    """Return the outcome for a rank that refused to start. Such a rank writes no record, because training had not
    begun.
    """
    message: tuple[str, ...] = ()
    with suppress(OSError):
        message = tuple(failure_lines(rank_log(log_dir, rank)))
    reasons = [line.strip() for line in conclusion(message)[:1]]
    what = "; ".join([fate.how, *reasons])
    failure = Failure(what, Evidence.LOGS, cause=REFUSED_CAUSE, rank=rank, host=fate.host, message=message)
    return Outcome(REFUSED, failure)


def _from_logs(exit_code: int, messages: Sequence[str], killed: Sequence[int], log_dir: Path) -> Outcome:
    """Return the outcome if no usable record exists, from the ranks' logs and srun's messages."""
    fates = _fates(messages)
    rank, secondary, message = first_traceback(log_dir)
    evidence = Evidence.LOGS
    if rank is None or secondary:  # the cause, a killed rank or a dead node, left no traceback
        speakers = [] if secondary else [task for task, fate in fates.items() if fate.exit_code != STUCK]
        if named := [*killed, *speakers]:
            rank = named[0]
            evidence = Evidence.ENDS
    if rank is None:
        what = next((line for line in messages if "error" in line), f"srun ended with exit code {exit_code}")
        return Outcome(exit_code, Failure(what, Evidence.ENDS, message=tuple(messages[-10:])), peers_only=True)
    fate = fates.get(rank, Fate("", f"srun ended with exit code {exit_code}"))
    if secondary and rank not in killed:
        silent = not fate.host or any(_SILENT_NODE in line for line in messages)
        lost = f"rank {rank} on {fate.host or 'an unknown host'} lost the connection to another rank"
        what = f"{lost}, and no rank recorded the cause"
        return Outcome(exit_code, Failure(what, Evidence.LOGS, message=message), peers_only=silent)
    last_words = () if secondary else conclusion(message)
    failure = Failure(
        "; ".join([fate.how, *(line.strip() for line in last_words[:1])]),
        evidence,
        cause=cause_of("\n".join(last_words)),
        rank=rank,
        host=fate.host,
        message=message,
        host_suspect=rank in killed if secondary or not message else speaks_of_hardware("\n".join(last_words)),
    )
    return Outcome(exit_code, failure)


def _fates(lines: Iterable[str]) -> dict[int, Fate]:
    """Return the end of each task, in the order in which srun reported it."""
    fates: dict[int, Fate] = {}
    for match in filter(None, map(_TASK_ERROR.match, lines)):
        for task in hostlist.expand(f"[{match['tasks'].strip('[]')}]"):
            fates.setdefault(int(task), Fate(match["host"], match["how"]))
    return fates


def _copy(source: IO[str], lines: list[str]) -> None:
    """Copy srun's messages to stderr and keep them in `lines`.

    An error of stderr is ignored: if nothing read the pipe, it would fill up and block srun.
    """
    for line in source:
        lines.append(line.rstrip("\n"))
        with suppress(OSError):
            print(line, end="", file=sys.stderr, flush=True)
