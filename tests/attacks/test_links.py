"""No file below a run directory is written through a symbolic link.

The run directory itself and its `checkpoints/` may be links.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontier_llm.checkpoint.lock import RunLock
from frontier_llm.cluster import attempt
from frontier_llm.cluster.local import run_local_ranks
from frontier_llm.comm import Ledger
from frontier_llm.config import BatchConfig, RunConfig, TrainConfig, load_model
from frontier_llm.errors import FrontierError
from frontier_llm.files import folder_below, open_below
from frontier_llm.run import run_dir
from frontier_llm.run.holder import this_process
from frontier_llm.training.observers.trackers import Events

NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder outside the run directory with a file that must not change."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "rank_0.log").write_text("precious\n")
    return tmp_path / "victim"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory that is a symbolic link, for example to scratch."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["metrics.jsonl", "attempts.jsonl", "submissions.jsonl", "decisions.jsonl"])
def test_a_linked_record_is_refused(name: str, run: Path, victim: Path) -> None:
    (run / name).symlink_to(victim / "rank_0.log")
    with pytest.raises(
        FrontierError,
        match=f"{name}: is a link to .*/victim/rank_0.log; nothing is written through links below a run directory",
    ):
        run_dir.append_line(run / name, {"step": 1})
    assert (victim / "rank_0.log").read_text() == "precious\n"
    (run / name).unlink()
    run_dir.append_line(run / name, {"step": 1})
    assert list(run_dir.read_jsonl(run / name)) == [{"step": 1}]


@pytest.mark.parametrize("link", ["logs", "logs/rank_0.log"])
def test_logs_of_local_ranks_stay_in_the_run_directory(link: str, run: Path, victim: Path) -> None:
    (run / link).parent.mkdir(exist_ok=True)
    (run / link).symlink_to(victim if link == "logs" else victim / "rank_0.log")
    with pytest.raises(FrontierError, match=f"{link}: is a link to .*victim"):
        run_local_ranks(1, ["-c", "pass"], os.environ, run / "logs", program=(sys.executable,), run_dir=run)
    assert (victim / "rank_0.log").read_text() == "precious\n"
    (run / link).unlink()
    assert run_local_ranks(1, ["-c", "print(1)"], os.environ, run / "logs", program=(sys.executable,), run_dir=run) == 0
    assert (run / "logs" / "rank_0.log").read_text() == "1\n"


def test_a_rank_of_srun_refuses_a_linked_log(run: Path, victim: Path) -> None:
    (run / "rank_0.log").symlink_to(victim / "rank_0.log")
    variables = {**os.environ, "SLURM_PROCID": "0", "FRONTIER_LLM_LOG_DIR": str(run)}
    ended = subprocess.run(["launch/rank.sh", "true"], env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "rank_0.log is a link, and logs are not written through links" in ended.stderr
    assert (victim / "rank_0.log").read_text() == "precious\n"


def test_the_lock_stays_below_the_checkpoints(run: Path, victim: Path, tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "fast")  # the user may make this link
    (tmp_path / "fast" / "incarnations").symlink_to(victim)
    with pytest.raises(FrontierError, match=r"incarnations: is a link to .*victim"):
        RunLock(run / "checkpoints", this_process("1"))
    assert [path.name for path in victim.iterdir()] == ["rank_0.log"]
    (tmp_path / "fast" / "incarnations").unlink()
    lock = RunLock(run / "checkpoints", this_process("1"))
    assert lock.incarnation == 1
    lock.release()


def test_a_folder_that_is_swapped_for_a_link_on_the_way_is_refused(run: Path, victim: Path) -> None:
    folder_below(run, "logs/attempt_0001")
    (run / "logs" / "attempt_0001").rmdir()
    (run / "logs" / "attempt_0001").symlink_to(victim)
    with pytest.raises(FrontierError, match="attempt_0001: is a link"):
        open_below(run, "logs/attempt_0001/rank_0.log", NEW)
    assert (victim / "rank_0.log").read_text() == "precious\n"


def test_last_words_of_a_rank_replace_a_link(run: Path, victim: Path) -> None:
    (run / "flight.json").symlink_to(victim / "rank_0.log")
    Ledger().dump(run / "flight.json", "hung")
    assert json.loads((run / "flight.json").read_text())["reason"] == "hung" and not (run / "flight.json").is_symlink()
    assert (victim / "rank_0.log").read_text() == "precious\n"


def test_curves_stay_in_the_run_directory(run: Path, victim: Path) -> None:
    pytest.importorskip("tensorboard")
    (run / "events").symlink_to(victim)
    config = RunConfig(
        model=load_model("llama-tiny"), batch=BatchConfig(global_batch=8), train=TrainConfig(run_dir=str(run))
    )
    with pytest.raises(FrontierError, match="events: is a link"):
        Events(config).record("start", 0, {})
    assert [path.name for path in victim.iterdir()] == ["rank_0.log"]


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_file_is_named_and_blocks_nobody(kind: str, run: Path) -> None:
    os.mkfifo(run / "metrics.jsonl") if kind == "fifo" else (run / "metrics.jsonl").mkdir()
    with pytest.raises(FrontierError, match=r"metrics.jsonl: (is not a regular file|cannot be replaced)"):
        run_dir.append_line(run / "metrics.jsonl", {"step": 1})


@pytest.mark.parametrize("how", ["deleted", "renamed", "replaced"])
def test_a_run_directory_that_goes_away_under_the_launcher(how: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    away = "import os, shutil, sys\nrun = sys.argv[1]\n"
    away += "shutil.rmtree(run)\n" if how == "deleted" else "os.rename(run, run + '-elsewhere')\n"
    away += "os.mkdir(run)\n" if how == "replaced" else ""
    with pytest.raises(
        FrontierError, match="run: was moved or deleted during the run; nothing is written at its old path"
    ) as caught:
        words = ["-c", away + "sys.exit(1)", str(run)]
        run_local_ranks(1, words, os.environ, run / "logs", program=(sys.executable,), run_dir=run)
    assert "move it back, or start the run again at its new path" in str(caught.value)
    assert not run.exists() or list(run.iterdir()) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_directory_that_goes_away_under_the_supervisor(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def move_away(step: object) -> attempt.Outcome:
        run.rename(tmp_path / "elsewhere")
        if replaced:
            run.mkdir()
        return attempt.Outcome(1)

    monkeypatch.setattr(attempt, "run_step", move_away)
    job: Any = SimpleNamespace(
        directory=run,
        command=("train",),
        config=None,
        site=None,
        allocation=SimpleNamespace(job_id="7", batch_host="n0"),
        job=SimpleNamespace(plans=()),
    )
    with pytest.raises(FrontierError, match="run: was moved or deleted during the run"):
        attempt.start_ranks(job, ("n0",), None)
    assert not run.exists() or list(run.iterdir()) == []  # a record here would start another run at step 0
