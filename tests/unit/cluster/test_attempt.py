from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.cluster.attempt import JobStep, Outcome, job_step, plan_variables, run_step
from frontier_llm.cluster.attempt import diagnose as diagnose_record
from frontier_llm.cluster.batch import BatchRun
from frontier_llm.cluster.rank_logs import prune
from frontier_llm.cluster.sites import load_site, root_dir
from frontier_llm.cluster.slurm import Allocation
from frontier_llm.config import load_run
from frontier_llm.errors import OUT_OF_MEMORY, PEER_HEADING, FrontierError
from frontier_llm.run.failure import Evidence, Failure
from frontier_llm.run.job import ROOMIER_PLAN_VARIABLE, Job
from frontier_llm.run.rank_env import rank_python
from frontier_llm.training.guard.retries import Tight
from tests.harness.system import FullDisk


def diagnose(code: int, said: list[str], log_dir: Path, record: Failure | None = None) -> Outcome:
    return diagnose_record(code, said, log_dir, record)


def named(outcome: Outcome) -> tuple[str, int | None, str, bool]:
    """Return (cause, rank, host, whether the host is suspect)."""
    assert outcome.failure is not None
    return outcome.cause, outcome.failure.rank, outcome.failure.host, outcome.failure.host_suspect


TRACE = "noise\nTraceback (most recent call last):\n  File x\n{}\n"


def batch_run() -> BatchRun:
    site = load_site("generic").model_copy(
        update={"gpus_per_node": 8, "srun": {"network": "disable_rdzv_get", "flag": ""}}
    )
    return BatchRun(
        job=Job(run_dir="/run", words=("x y",), site="generic", nodes=2, warning_s=60.0),
        config=load_run("train_small"),
        site=site,
        allocation=Allocation("7", ("n0", "n2"), "n0", 8, 7),
        program=("-m", "p"),
    )


def step(log_dir: Path = Path("/logs"), deadline_s: float | None = None) -> JobStep:
    run = batch_run()
    return job_step(run, run.allocation.nodes, log_dir, {}, deadline_s)


def test_ranks_of_the_own_plan_know_that_there_is_a_roomier_one() -> None:
    run = batch_run()
    plans = (("parallel.tensor=2",), ("parallel.tensor=8",))
    both = replace(run, job=replace(run.job, plans=plans))
    assert plan_variables(run) == {}
    assert plan_variables(replace(both, plan=plans[0])) == {ROOMIER_PLAN_VARIABLE: "1"}
    assert plan_variables(replace(both, plan=plans[1])) == {}


@pytest.mark.parametrize(("batch_host", "fault", "peers_only"), [("n0", True, False), ("n2", False, True)])
def test_a_start_without_an_address_of_rank_0_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_host: str, fault: bool, peers_only: bool
) -> None:
    """If srun does not reach the node of rank 0, the node may be dead. A fault of the batch host itself recurs."""

    def call(command: list[str]) -> str:
        raise FrontierError("srun: error: Unable to create step for job 7")

    monkeypatch.setattr("frontier_llm.cluster.slurm.call", call)
    here = replace(step(tmp_path / "logs"), directory=tmp_path)
    outcome = run_step(replace(here, allocation=replace(here.allocation, batch_host=batch_host)))
    assert outcome.failure is not None and "no address of rank 0: srun: error: Unable" in outcome.failure.what
    assert (outcome.cause, bool(outcome.failure.program_fault), outcome.peers_only) == ("crash", fault, peers_only)


def test_allocator_retries_are_out_of_memory(tmp_path: Path) -> None:
    record = Tight(retries=25, rank=1, host="n0", step=20).as_failure()
    said = ["srun: error: n0: task 1: Exited with exit code 1"]
    assert named(diagnose(1, said, tmp_path, record)) == (OUT_OF_MEMORY, 1, "n0", False)


def test_srun_starts_one_task_per_gcd() -> None:
    command = step().srun()
    assert {
        "--nodes=2",
        "--nodelist=n[0,2]",
        "--ntasks=16",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--kill-on-bad-exit=1",
    } <= set(command)
    assert {"--network=disable_rdzv_get", "--flag"} <= set(command)
    assert command[-5:] == [str(root_dir() / "launch" / "rank.sh"), rank_python(), "-m", "p", "x y"]


def test_srun_is_read_to_its_end_whatever_it_says_and_wherever_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If srun's output were not read to its end, srun would block on the full pipe. The job would then wait for srun
    until the walltime.
    """
    srun = tmp_path / "srun"
    srun.write_text(
        "#!/bin/bash\nprintf 'a node says \\xff\\n' >&2\nhead --bytes=200000 /dev/zero | tr '\\0' '\\n' >&2\n"
        "echo 'srun: error: n2: task 8: Segmentation fault' >&2\nexit 1\n"
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("frontier_llm.cluster.attempt.master_address", lambda step: "127.0.0.1")
    monkeypatch.setattr(sys, "stderr", FullDisk())
    outcome = run_step(step(log_dir=tmp_path / "logs", deadline_s=60.0))
    assert named(outcome)[:3] == ("crash", 8, "n2")


def test_ranks_are_told_to_save_when_the_budget_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    srun = tmp_path / "srun"
    warned = "echo 'srun: error: n0: tasks 0-15: Exited with exit code 75' >&2; exit 75"
    srun.write_text(f'#!/bin/bash\ntrap "{warned}" USR1\nfor _ in {{1..600}}; do sleep 0.1; done\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("frontier_llm.cluster.attempt.master_address", lambda step: "127.0.0.1")
    outcome = run_step(replace(step(log_dir=tmp_path / "logs", deadline_s=60.0), save_after_s=1.0))
    assert outcome == Outcome(75)


def write(log_dir: Path, rank: int, text: str, at_s: int) -> None:
    path = log_dir / f"rank_{rank}.log"
    path.write_text(text)
    os.utime(path, (at_s, at_s))


def test_the_cause_is_not_the_peer_that_complains_first(tmp_path: Path) -> None:
    write(tmp_path, 0, TRACE.format("RuntimeError: Connection closed by peer [10.0.0.1]"), 100)
    write(tmp_path, 9, TRACE.format("ValueError: bad sample") + "01:02:03 [rank 9] leaving\n", 101)
    said = ["srun: error: n0: tasks 0-1: Exited with exit code 1", "srun: error: n2: task 9: Exited with exit code 1"]
    outcome = diagnose(1, said, tmp_path)
    assert named(outcome) == ("crash", 9, "n2", False) and outcome.failure
    assert outcome.failure.message[-2] == "ValueError: bad sample" and outcome.failure.evidence is Evidence.LOGS
    assert outcome.failure.describe().endswith("exit code 1; ValueError: bad sample")


def test_a_killed_rank_beats_the_survivors_that_speak(tmp_path: Path) -> None:
    end = (
        "frontier_llm.errors.RankFailure: all_reduce on axis dp: rank 1 has died or left\n    fix: its own log "
        "says why\n01:02:03 leaving"
    )
    write(tmp_path, 0, TRACE.format(end), 100)
    outcome = diagnose(
        137, ["srun: error: n2: task 12: Killed", "srun: error: n0: task 0: Exited with exit code 1"], tmp_path
    )
    assert named(outcome)[1:3] == (12, "n2") and outcome.exit_code == 137 and outcome.failure
    assert "Killed" in outcome.failure.what and not outcome.peers_only


@pytest.mark.parametrize("how", ["Killed", "Segmentation fault (core dumped)", "Bus error", "Aborted"])
@pytest.mark.parametrize(
    "survivor", ["", TRACE.format("RuntimeError: Connection closed by peer")], ids=["silence", "a survivor"]
)
def test_a_rank_that_a_signal_ends_makes_its_host_suspect(tmp_path: Path, how: str, survivor: str) -> None:
    write(tmp_path, 0, survivor, 100)
    outcome = diagnose(
        139, [f"srun: error: n2: task 12: {how}", "srun: error: n0: task 0: Exited with exit code 1"], tmp_path
    )
    assert named(outcome)[1:] == (12, "n2", True)


@pytest.mark.parametrize(
    ("error", "suspect"),
    [
        ("torch.AcceleratorError: HIP error: an illegal memory access was encountered", True),
        ("OSError: [Errno 5] Input/output error: 'shard_00003.safetensors'", True),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB", False),
        ("RuntimeError: HIP error: out of memory", False),
        ("KeyError: 'layers.3'", False),
    ],
)
def test_an_exception_is_the_hosts_fault_only_when_it_speaks_of_hardware(
    tmp_path: Path, error: str, suspect: bool
) -> None:
    write(tmp_path, 9, TRACE.format(error), 100)
    outcome = diagnose(1, ["srun: error: n2: task 9: Exited with exit code 1"], tmp_path)
    assert named(outcome)[1:] == (9, "n2", suspect)


def test_a_rank_that_its_watchdog_has_ended_is_not_the_cause(tmp_path: Path) -> None:
    outcome = diagnose(70, ["srun: error: n0: task 0: Exited with exit code 70"], tmp_path)
    assert (named(outcome)[::2], outcome.peers_only) == (("crash", ""), True)


def test_survivors_only_means_that_a_node_may_be_dead(tmp_path: Path) -> None:
    write(tmp_path, 3, TRACE.format("RuntimeError: Timed out waiting 10000ms for recv"), 100)
    assert diagnose(1, [], tmp_path).peers_only
    assert diagnose(1, ["srun: error: Task launch failed"], tmp_path / "none").peers_only


@pytest.mark.parametrize(
    ("end", "silent"), [("", False), ("srun: error: Timed out waiting for job step to complete", True)]
)
def test_nobody_is_blamed_for_losing_a_peer(tmp_path: Path, end: str, silent: bool) -> None:
    write(tmp_path, 0, TRACE.format("RuntimeError: Connection reset by peer"), 100)
    said = [
        "srun: error: n0: task 0: Exited with exit code 1",
        "srun: Terminating StepId=1.1",
        "srun: error: n1: tasks 2-3: Killed",
        end,
    ]
    outcome = diagnose(137, said, tmp_path)
    assert (named(outcome)[::2], outcome.peers_only) == (("crash", ""), silent)
    assert "no rank recorded the cause" in outcome.failure.describe()  # type: ignore[union-attr]


def test_exit_code_two_is_for_the_user_to_mend(tmp_path: Path) -> None:
    """The refusal is reported with the message of `frontier-llm train`. The ranks that srun ends because of the refusal
    are victims, not causes.
    """
    write(tmp_path, 0, "frontier-llm train: error\n/nowhere.bin: no such file\n    fix: give the path\n", 100)
    said = [
        "srun: error: n0: task 0: Exited with exit code 2",
        "srun: launch/slurm: _step_signal: Terminating StepId=1.1",
        "srun: error: n0: task 1: Killed",
        "srun: error: n1: tasks 2-3: Killed",
    ]
    outcome = diagnose(137, said, tmp_path)
    assert named(outcome)[:3] == ("refused", 0, "n0") and outcome.failure
    assert outcome.failure.message[-1] == "    fix: give the path"
    assert (
        outcome.failure.describe() == "rank 0 on n0 failed first: Exited with exit code 2; /nowhere.bin: no such file"
    )


SURVIVORS = Failure(
    "it died or was stopped: it sends no heartbeats; seen as: Connection closed by peer",
    Evidence.NOTICES,
    rank=1,
    host="n0",
    host_suspect=True,
)


@pytest.mark.parametrize("record", [None, SURVIVORS], ids=["no record", "record of the survivors"])
def test_a_refusal_after_the_ranks_have_agreed_is_no_crash(tmp_path: Path, record: Failure | None) -> None:
    """One rank refuses the start. The other ranks only detect that this rank is gone, and one of them may have recorded
    its loss first.
    """
    refusal = "frontier-llm train: error\ncomm.backend: no process group of nccl fits\n    fix: comm.backend=gloo\n"
    write(tmp_path, 1, refusal, 100)
    write(tmp_path, 0, TRACE.format("RankFailure: all_reduce on axis dp: rank 1 has died or left"), 101)
    said = [
        "srun: error: n0: task 1: Exited with exit code 2",
        "srun: error: n0: task 0: Exited with exit code 1",
        "srun: launch/slurm: _step_signal: Terminating StepId=1.1",
        "srun: error: n2: tasks 2-3: Killed",
    ]
    outcome = diagnose(137, said, tmp_path, record)
    assert named(outcome) == ("refused", 1, "n0", False) and outcome.exit_code == 2 and outcome.failure
    assert "comm.backend" in "\n".join(outcome.failure.message) and "comm.backend" in outcome.failure.what


def test_a_killed_rank_beside_a_refusal_does_not_hide_it(tmp_path: Path) -> None:
    write(tmp_path, 5, "frontier-llm train: error\n/nowhere.bin: no such file\n    fix: give the path\n", 100)
    said = ["srun: error: n2: task 9: Killed", "srun: error: n0: task 5: Exited with exit code 2"]
    assert named(diagnose(137, said, tmp_path))[:3] == ("refused", 5, "n0")


@pytest.mark.parametrize(
    ("heading", "cause_known"), [("error", True), (PEER_HEADING, False)], ids=["own error", "error of a peer"]
)
def test_the_heading_of_our_own_message_and_not_its_words_decides(
    tmp_path: Path, heading: str, cause_known: bool
) -> None:
    write(tmp_path, 1, f"frontier-llm train: {heading}\nthe socket of a peer timed out\n    fix: another port\n", 100)
    outcome = diagnose(1, ["srun: error: n0: task 1: Exited with exit code 1"], tmp_path)
    assert outcome.failure is not None
    assert (outcome.failure.rank == 1) is cause_known


@pytest.mark.parametrize("code", [20, 255])
def test_a_code_that_begins_with_a_two_is_no_refusal(tmp_path: Path, code: int) -> None:
    """A container that cannot be started on a node exits with 255. Another attempt may succeed."""
    assert diagnose(code, [f"srun: error: n2: task 9: Exited with exit code {code}"], tmp_path).cause == "crash"


def test_a_save_at_a_signal_is_no_failure(tmp_path: Path) -> None:
    said = ["srun: error: n0: task 3: Exited with exit code 75", "srun: error: n2: tasks 8-15: Killed"]
    assert diagnose(137, said, tmp_path).cause == "interrupted"


def test_a_warning_that_comes_before_a_rank_listens_is_no_failure(tmp_path: Path) -> None:
    said = [
        "srun: error: n0: task 3: User defined signal 1",
        "srun: Terminating StepId=1.1",
        "srun: error: n2: tasks 8-15: Killed",
    ]
    outcome = diagnose(138, said, tmp_path)
    assert (outcome.cause, outcome.exit_code) == ("interrupted", 75)


def test_the_ranks_own_record_comes_before_their_logs(tmp_path: Path) -> None:
    write(tmp_path, 0, TRACE.format("ValueError: a trace that is no cause"), 100)
    record = Failure("KeyError: 'w'", Evidence.EXCEPTION, rank=9, step=17, section="train", message=("its trace",))
    outcome = diagnose(1, ["srun: error: n2: task 9: Exited with exit code 1"], tmp_path, record)
    assert named(outcome) == ("crash", 9, "n2", False) and outcome.failure
    assert (outcome.failure.message, outcome.failure.step) == (("its trace",), 17)


def test_a_silent_rank_is_not_blamed_where_srun_has_seen_another_one_killed(tmp_path: Path) -> None:
    silent = Failure("it sends no heartbeats", Evidence.NOTICES, rank=3, host="n0", host_suspect=True)
    said = ["srun: error: n2: task 12: Killed"]
    assert named(diagnose(137, said, tmp_path, silent)) == ("crash", 12, "n2", True)
    assert named(diagnose(137, [], tmp_path, silent)) == ("crash", 3, "n0", True)


def test_logs_of_old_starts_are_pruned_to_those_of_rank_0(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rank_1.log").touch()
    logs = tmp_path / "logs"
    for number in range(1, 5):
        folder = logs / f"attempt_{number:04}"
        folder.mkdir(parents=True)
        (folder / "001000").mkdir()
        for name in ("rank_0.log", "rank_1.log", "rank_12.log", "001000/rank_1234.log", "notes.txt"):
            (folder / name).touch()
    (logs / "attempt_0000").symlink_to(elsewhere)
    prune(logs, kept=2)
    left = {
        folder.name: sorted(path.name for path in folder.rglob("*") if path.is_file())
        for folder in sorted(logs.iterdir())
    }
    everything = ["notes.txt", "rank_0.log", "rank_1.log", "rank_12.log", "rank_1234.log"]
    assert left == {
        "attempt_0000": ["rank_1.log"],
        "attempt_0001": ["notes.txt", "rank_0.log"],
        "attempt_0002": ["notes.txt", "rank_0.log"],
        "attempt_0003": everything,
        "attempt_0004": everything,
    }
