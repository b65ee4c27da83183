"""Kills, freezes, errors and signals in complete runs. scripts/kill_anywhere.py and scripts/soak.sh do the same
hundreds of times.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.marks import but_first, exhaustive, thorough
from tests.harness.runs import START_LIMIT_S, Run
from tests.harness.stopped import stop_process

TWO = ("parallel.data=2",)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("undisturbed"), overrides=TWO)
    code, output, _ = run.finish()
    assert code == 0, output
    return run


def same_course(run: Run, undisturbed: Run) -> None:
    assert run.losses() == undisturbed.losses()
    assert run.shards() == undisturbed.shards()


@pytest.mark.parametrize(
    "failpoint",
    but_first(
        ["checkpoint.before_rename@0#2=kill", "train.step@1#8=kill", "checkpoint.shard_written@1#2=kill"], in_ci=2
    ),
)
def test_killed_rank_then_resumed_is_bit_equal(failpoint: str, undisturbed: Run, tmp_path: Path) -> None:
    run = Run(tmp_path, overrides=TWO)
    victim = int(failpoint.partition("@")[2][0])
    code, output, _ = run.finish(failpoint)
    assert code == 137 and f"rank {victim} on" in output.splitlines()[-1] and "it failed first" in output
    done = max(run.losses(), default=0)
    code, output, _ = run.finish()
    assert code == 0, output
    resumed = next(line for line in output.splitlines() if "resuming after step" in line)
    assert done - int(resumed.split("step ")[1].split()[0]) <= 2 * run.save_interval
    same_course(run, undisturbed)


@pytest.mark.thorough
def test_a_mixture_of_experts_is_killed_and_resumed_bit_equal(tmp_path: Path) -> None:
    """Experts are split over two ranks, and their optimizer state is not split. The checkpoint contains the selection
    biases and the load of the previous step.
    """
    router = (
        "model.moe.score=sigmoid",
        "model.moe.selection_bias=true",
        "model.moe.balance=global",
        "model.moe.balance_weight=0.1",
    )
    settings = (*TWO, "model.base=moe-tiny", "parallel.expert=2", "guard.replica_check_interval=2", *router)
    whole, run = (Run(tmp_path / name, steps=8, overrides=settings) for name in ("whole", "killed"))
    code, output, _ = whole.finish()
    assert code == 0, output
    code, output, _ = run.finish("train.step@1#6=kill")
    assert code == 137 and "it failed first" in output
    code, output, _ = run.finish()
    assert code == 0 and "resuming after step" in output, output
    same_course(run, whole)


@pytest.mark.parametrize(("victim", "store"), but_first([(1, "auto"), (0, "auto"), (0, "authenticated")]))
def test_dead_peer_is_named_and_all_others_leave(victim: int, store: str, tmp_path: Path) -> None:
    run = Run(tmp_path, steps=100_000, save_interval=0, timeout_s=3600.0, overrides=(*TWO, f"comm.store={store}"))
    process = run.start()
    pids = wait_for_ranks(process, run)
    os.kill(pids[victim], signal.SIGKILL)
    process.communicate()  # pytest's limit is shorter than train.timeout_s
    assert process.returncode == 137
    failure = run.failure()
    assert failure["rank"] == victim and not any(map(alive, pids))
    if store != "authenticated":  # the authenticated store, and with it the heartbeats, ends with rank 0
        assert int(str(failure["step"])) > 0 and failure["host"] == os.uname().nodename
        assert "it died or was stopped" in str(failure["what"])


@pytest.mark.thorough
@pytest.mark.parametrize("victim", but_first([0, 1], in_ci=1))  # rank 0 is the rank that searches for the cause
def test_frozen_peer_is_named_with_stacks(victim: int, tmp_path: Path) -> None:
    limit_s = 40.0  # 20 times a first step on an idle machine: only the frozen rank may be silent for so long
    run = Run(tmp_path, steps=10_000, save_interval=0, timeout_s=limit_s, overrides=TWO)
    process = run.start()
    pids = wait_for_ranks(process, run)
    stop_process(pids[victim])
    process.communicate()
    assert run.failure()["rank"] == victim
    stacks = (run.run_dir / "logs" / f"stacks_rank_{1 - victim:05}.txt").read_text()
    # The other rank was in a step, or in the agreement of all ranks after the step.
    assert "in _train_until_end" in stacks and not any(map(alive, pids))
    record = json.loads((run.run_dir / "logs" / f"flight_rank{1 - victim:05}.json").read_text())
    assert record["reason"] and not record["calls"][-1]["finished"]


@pytest.mark.parametrize(
    ("failpoint", "where"),
    [
        exhaustive("train.step@1#5=sleep:1000", "in hit"),  # Python code that never returns
        ("train.step@1#5=hold:1000", "in hit"),  # C code that holds the interpreter lock.
        # The writing thread is stuck, and the main thread waits for it.
        thorough("checkpoint.shard_written@1#1=sleep:1000", "in write"),
    ],
)
@pytest.mark.thorough
def test_stuck_rank_is_named_with_its_stacks(failpoint: str, where: str, tmp_path: Path) -> None:
    run = Run(tmp_path, save_interval=3, timeout_s=15.0, overrides=TWO)
    assert run.finish(failpoint)[0] in (1, 70)  # ends long before the failpoint's sleep would end
    assert run.failure()["rank"] == 1
    assert where in (run.run_dir / "logs" / "stacks_rank_00001.txt").read_text()


@pytest.mark.thorough
def test_a_save_that_takes_longer_than_the_timeout_succeeds(tmp_path: Path) -> None:
    """Regression: on a slow file system, the watchdog ended the run while its files were still growing."""
    large = "model.vocab_size=90000"  # 69 MB per rank are nine groups of blocks on two threads, so 20 s
    run = Run(tmp_path, steps=2, save_interval=0, timeout_s=15.0, overrides=(*TWO, large))
    code, output, _ = run.finish("checkpoint.block_written@1%=sleep:4")
    assert code == 0, output
    assert (run.run_dir / "checkpoints" / "LATEST").read_text() == "step_00000002\n"


@pytest.mark.thorough
def test_first_cause_wins(tmp_path: Path) -> None:
    code, output, _ = Run(tmp_path, overrides=TWO).finish("train.step@1#4=error:boom")
    assert code == 1
    failure = Run(tmp_path).failure()
    assert failure["rank"] == 1 and failure["step"] == 3 and "boom" in str(failure["what"])
    assert "RuntimeError: boom" in output.split("rank 0 on")[-1] and "rank 1 on" in output.splitlines()[-1]


@pytest.mark.parametrize("which", but_first(["one rank", "all ranks"], in_ci=1))
@pytest.mark.thorough
def test_signal_saves_one_agreed_step_and_the_run_goes_on(which: str, undisturbed: Run, tmp_path: Path) -> None:
    run = Run(tmp_path, save_interval=0, overrides=TWO)
    # Steps are so slow that the run is still training when the signal arrives, even if this process is late.
    process = run.start("train.step#6%=sleep:2")
    pids = wait_for_ranks(process, run)
    for pid in pids[1:] if which == "one rank" else pids:
        os.kill(pid, signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    done = max(run.losses())
    assert (run.run_dir / "checkpoints" / "LATEST").read_text() == f"step_{done:08}\n" and done < run.steps
    assert run.finish()[0] == 0
    same_course(run, undisturbed)


def test_stop_and_save_files(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=10_000, save_interval=0)
    process = run.start("train.step%=sleep:0.1")
    wait_for_step(process, run, 2)
    (run.run_dir / "SAVE").touch()
    latest = run.run_dir / "checkpoints" / "LATEST"
    deadline_s = time.monotonic() + 120
    while not latest.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert not (run.run_dir / "SAVE").exists()
    (run.run_dir / "STOP").touch()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75
    assert (
        f"is saved; to continue, delete {run.run_dir}/STOP, then run the same command again" in output.splitlines()[-1]
    )
    assert latest.read_text() == f"step_{max(run.losses()):08}\n"


@pytest.mark.thorough
def test_a_warning_during_the_last_save_does_not_lose_it(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=3, save_interval=0)
    process = run.start("checkpoint.before_manifest=sleep:3")
    assert process.stdout is not None
    assert any("failpoint checkpoint.before_manifest: sleeping" in line for line in process.stdout)
    process.send_signal(signal.SIGUSR1)  # Slurm's warning, sent when the run is already at its end
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert (run.run_dir / "checkpoints" / "LATEST").read_text() == "step_00000003\n"


def test_second_job_on_a_run_directory_leaves_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=10_000, save_interval=0)
    process = run.start()
    wait_for_step(process, run, 1)
    try:
        code, output, _ = run.finish()
        assert code == 2 and f"(pid {process.pid}, since" in output
    finally:
        process.kill()
        process.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for_step(process: subprocess.Popen[Any], run: Run, step: int) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while not (run.run_dir / "metrics.jsonl").exists() or max(run.losses(), default=0) < step:
        assert process.poll() is None, f"the run has ended: {process.communicate()[0]}"
        assert time.monotonic() < deadline_s, "the run does not start"
        time.sleep(0.05)


def wait_for_ranks(process: subprocess.Popen[Any], run: Run) -> list[int]:
    """Return the process ids by rank, after training has begun."""
    wait_for_step(process, run, 3)
    return children(process.pid)


def children(launcher: int) -> list[int]:
    """Return process ids in the order in which the processes were started. The ids themselves may wrap around."""
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
