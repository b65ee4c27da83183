"""Sends signals to runs in all their states: starting, loading, evaluating, saving. A second signal ends the run at
once and leaves a loadable checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import termios
import time
from pathlib import Path

import pytest

from tests.faults.test_runs import children, wait_for_ranks, wait_for_step
from tests.harness.marks import but_first
from tests.harness.runs import START_LIMIT_S, Run

TWO = ("parallel.data=2", "data.validation=synthetic", "train.eval_interval=3", "train.eval_samples=64")


def wait_until_inside(run: Run, process: subprocess.Popen[str], state: str) -> None:
    """Wait until both ranks sleep at a failpoint. Another process cannot see their stacks. The function therefore waits
    for the text that is logged before the sleep.
    """
    deadline_s = time.monotonic() + START_LIMIT_S
    for log in (run.run_dir / "logs" / "rank_0.log", run.run_dir / "logs" / "rank_1.log"):
        while not log.exists() or f"failpoint {state}: sleeping" not in log.read_text():
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("undisturbed"), overrides=TWO)
    assert run.finish()[0] == 0
    return run


@pytest.mark.parametrize(
    ("state", "nth"),
    but_first(
        [("train.evaluate", 11), ("checkpoint.shard_written", 2), ("checkpoint.loading", 1), ("train.start", 1)],
        in_ci=2,
    ),
)
@pytest.mark.thorough
def test_one_agreed_step_is_saved_wherever_the_signal_comes(
    state: str, nth: int, undisturbed: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path, overrides=TWO)
    if state == "checkpoint.loading":
        assert run.finish("train.step#8=kill")[0] == 137
    process = run.start(f"{state}#{nth}=sleep:5")
    wait_until_inside(run, process, state)
    os.kill(children(process.pid)[1], signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert run.finish()[0] == 0
    assert run.losses() == undisturbed.losses() and run.shards() == undisturbed.shards()


@pytest.mark.thorough
def test_a_warning_as_python_starts_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs sitecustomize before any module of this project."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\nif os.environ.get('RANK') == '1':\n    os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run = Run(tmp_path, overrides=TWO)
    code, output, _ = run.finish()
    assert code == 75, output


@pytest.mark.parametrize("ranks", but_first([2, 1]))
@pytest.mark.thorough
def test_a_terminal_that_closes_saves_the_run(ranks: int, tmp_path: Path) -> None:
    """The kernel sends SIGHUP. Every later write to that terminal fails."""
    run = Run(tmp_path, steps=10_000, save_interval=0, overrides=(f"parallel.data={ranks}",))
    ours, theirs = os.openpty()

    def take_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the tests and the run ignore it
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    words = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(run.command, env=run.environment(), preexec_fn=take_terminal, **words)
    os.close(theirs)
    try:
        wait_for_step(process, run, 3)
        os.close(ours)
        assert process.wait(60) == 75
    finally:
        process.kill()
    assert (run.run_dir / "checkpoints" / "LATEST").read_text() == f"step_{max(run.losses()):08}\n"


@pytest.mark.thorough
def test_a_second_signal_ends_a_save_at_once_and_safely(undisturbed: Run, tmp_path: Path) -> None:
    run = Run(tmp_path, overrides=TWO)
    process = run.start("checkpoint.shard_written#3=sleep:3600")
    pids = wait_for_ranks(process, run)
    wait_until_inside(run, process, "checkpoint.shard_written")
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    time.sleep(4.0)  # a second signal within one second counts as the same request, delivered twice
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    output, _ = process.communicate()  # pytest's limit is shorter than the sleep
    assert process.returncode == 128 + signal.SIGTERM, output
    assert (run.run_dir / "checkpoints" / "LATEST").read_text() == "step_00000006\n"
    assert run.finish()[0] == 0
    assert run.losses() == undisturbed.losses() and run.shards() == undisturbed.shards()
