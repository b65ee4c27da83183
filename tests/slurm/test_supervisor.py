"""The supervisor on a real Slurm, with a stand-in for training. The tests check the job, not the training."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from frontier_llm.cluster.sbatch import JobScript, render
from frontier_llm.cluster.sites import load_site
from frontier_llm.run import run_dir
from tests.harness.scenarios import scenario
from tests.harness.slurm import ROOT, LocalSlurm

SMALL = ("model=gpt-tiny", "parallel.tensor=1", "parallel.pipeline=1", "batch.micro_batch=1", "batch.global_batch=64")


def write_script(tmp_path: Path, nodes: int, **fields: object) -> Path:
    """Write the template's script, with the stand-in as the program of launch/job.sh."""
    text = render(JobScript("stand_in", "stand-in", "train_small", nodes, "local", **fields), load_site("local"))  # type: ignore[arg-type]
    program = shlex.quote(str(ROOT / "tests" / "slurm" / "stand_in.py"))
    path = tmp_path / "stand_in.sbatch"
    shipped = "    frontier_llm.cli.job train_small ops.no_jit=true"
    assert shipped in text
    path.write_text(text.replace(shipped, "    runpy_shim"))
    (tmp_path / "runpy_shim.py").write_text(
        f"import runpy, sys\nsys.argv = [{program!r}, 'job', 'train_small', "
        f"*sys.argv[1:]]\nrunpy.run_path({program!r}, run_name='__main__')\n"
    )
    return path


class Run:
    def __init__(
        self,
        cluster: LocalSlurm,
        tmp_path: Path,
        nodes: int,
        tasks: int,
        words: tuple[str, ...],
        env: dict[str, str],
        *options: str,
    ) -> None:
        self.cluster = cluster
        self.directory = tmp_path / "run"
        script = write_script(tmp_path, nodes)
        env = {"FRONTIER_LLM_SIGNAL_LEAD_S": "10", "PYTHONPATH": str(tmp_path), **env}
        self.output = tmp_path / "job.out"
        self.job_id = cluster.submit(
            f"--ntasks-per-node={tasks}",
            f"--output={self.output}",
            *options,
            str(script),
            f"train.run_dir={self.directory}",
            *SMALL,
            *words,
            cwd=tmp_path,
            env=env,
        )

    def wait(self, timeout_s: float = 240) -> dict[str, str]:
        try:
            return self.cluster.wait_job(self.job_id, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from error

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else "(no output yet)"

    def causes(self) -> list[str]:
        return [attempt.cause for attempt in run_dir.attempts(self.directory)]

    def wait_step(self, step: int, timeout_s: float = 120) -> None:
        self.cluster.wait_for(
            lambda: run_dir.latest_step(self.directory) >= step, timeout_s, f"step {step}: {self.text()}"
        )


def test_runs_every_rank_once_and_finishes(cluster: LocalSlurm, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, 4, 2, ("train.steps=3",), {})  # test_train.py trains with 4 x 8 ranks
    assert run.wait()["JobState"] == "COMPLETED", run.text()
    assert run.causes() == ["finished"]
    logs = sorted((run.directory / "logs" / "attempt_0001").iterdir())
    assert len(logs) == 8
    assert "rank 0 ends at 3" in run.text() and "rank 1 ends" not in run.text()
    hosts = {path.read_text().split()[0] for path in (run.directory / "alive").iterdir()}
    assert hosts == {"n0", "n1", "n2", "n3"}
    assert run.job_id not in cluster.queued()


@pytest.mark.thorough
@scenario(nodes=2)
def test_crash_is_retried_and_its_traceback_comes_last(cluster: LocalSlurm, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, 2, 2, ("train.steps=6",), {"STAND_IN_CRASH": "0:3", "STAND_IN_STEP_S": "60"})
    job = run.wait()
    assert job["JobState"] == "FAILED", run.text()
    assert run.causes() == ["crash"] * 3  # the limit of repeated crashes ends the job
    record = json.loads((run.directory / "failure.json").read_text())
    assert (record["rank"], record["host"]) == (3, "n1")
    tail = run.text().splitlines()[-12:]
    assert any("RuntimeError: planted crash" in line for line in tail)
    assert any("the run is not started again" in line for line in tail[-2:])


def test_refused_config_ends_at_once(cluster: LocalSlurm, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, 1, 2, ("train.steps=3", "batch.global_batch=3"), {})
    assert run.wait()["ExitCode"] == "2:0"
    assert "batch.global_batch" in run.text() and "set batch.global_batch=2 or 4" in run.text()
    assert not (run.directory / "attempts.jsonl").exists()


@pytest.mark.thorough
def test_a_refusal_after_the_ranks_have_agreed_ends_the_job_at_once(cluster: LocalSlurm, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, 1, 2, ("train.steps=3",), {"STAND_IN_REFUSE": "1"})
    assert run.wait()["ExitCode"] == "2:0", run.text()
    assert run.causes() == ["refused"] and "comm.backend: not possible here" in run.text()
    assert run_dir.bad_hosts(run.directory) == [] and cluster.queued() == []


def test_stop_file_ends_a_running_job_in_order(cluster: LocalSlurm, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, 2, 2, ("train.steps=4000",), {})
    run.wait_step(2)
    (run.directory / run_dir.STOP_FILE).touch()
    assert run.wait()["JobState"] == "COMPLETED", run.text()
    assert run.causes() == ["interrupted"]
    assert "stopped at step" in run.text() and cluster.queued() == []


@pytest.mark.thorough
def test_second_job_in_a_run_directory_is_refused(cluster: LocalSlurm, tmp_path: Path) -> None:
    first = Run(cluster, tmp_path, 1, 1, ("train.steps=400",), {})
    first.wait_step(2)
    script = tmp_path / "stand_in.sbatch"
    second = cluster.submit(
        "--ntasks-per-node=1",
        f"--output={tmp_path}/second.out",
        str(script),
        f"train.run_dir={first.directory}",
        *SMALL,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert cluster.wait_job(second)["ExitCode"] == "2:0"
    assert f"job {first.job_id} on n0" in (tmp_path / "second.out").read_text()
    cluster.run("scancel", first.job_id)
    cluster.wait_job(first.job_id)


@scenario(nodes=1)
def test_warned_before_python_listens_and_requeued(cluster: LocalSlurm, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, 1, 2, ("train.steps=6",), {"STAND_IN_DEAF": "1"})
    assert run.wait()["JobState"] == "COMPLETED", run.text()
    assert run.causes() == ["interrupted", "finished"], run.text()


@pytest.mark.thorough
@scenario(nodes=2)
def test_warned_before_the_walltime_and_requeued_until_done(cluster: LocalSlurm, tmp_path: Path) -> None:
    # The walltime is one minute. Slurm checks its timers every 30 s, so the warning comes 5 to 35 s after the start.
    run = Run(
        cluster,
        tmp_path,
        2,
        1,
        ("train.steps=150",),
        {"STAND_IN_STEP_S": "0.3", "FRONTIER_LLM_SIGNAL_LEAD_S": "25"},
        "--time=1",
        "--signal=USR1@25",
    )
    job = run.wait(300)
    assert job["JobState"] == "COMPLETED", run.text()
    assert int(job["Restarts"]) >= 1
    causes = run.causes()
    assert causes[-1] == "finished" and set(causes[:-1]) == {"interrupted"}
    steps = [row["step"] for row in run_dir.read_jsonl(run.directory / "metrics.jsonl")]
    assert steps == list(range(1, 151))  # no step is lost, and none is done twice
    assert cluster.queued() == []


@scenario(nodes=4)
def test_dead_node_is_replaced_by_the_spare_while_its_ranks_live_on(cluster: LocalSlurm, tmp_path: Path) -> None:
    env = {"FRONTIER_LLM_SPARE_NODES": "1", "STAND_IN_STEP_S": "0.2"}
    run = Run(cluster, tmp_path, 4, 2, ("train.steps=400", "batch.global_batch=6"), env)
    run.wait_step(3)
    cluster.kill_node("n1")
    cluster.wait_for(lambda: len(run_dir.attempts(run.directory)) == 1, 120, f"end of the first attempt: {run.text()}")
    first = run_dir.attempts(run.directory)[0]
    assert (first.cause, first.nodes) == ("node failure", ("n0", "n1", "n2"))
    cluster.wait_for(
        lambda: len(list((run.directory / "alive").glob("2-*"))) == 6, 120, f"second attempt: {run.text()}"
    )
    hosts = {(run.directory / "alive" / f"2-{rank}").read_text().split()[0] for rank in range(6)}
    assert hosts == {"n0", "n2", "n3"}
    # The ranks on the dead node continue to run. tests/slurm/test_train.py shows that they cannot save.
    stale = run.directory / "alive" / "1-2"
    before = stale.read_text()
    cluster.wait_for(lambda: stale.read_text() != before, 60, "step of a stale rank")
    assert run_dir.bad_hosts(run.directory) == ["n1"]
    assert cluster.job(run.job_id)["Restarts"] == "0"
    cluster.start_node("n1")
    cluster.wait_for(lambda: cluster.node_states()["n1"] == "IDLE", 60, "return of n1, which the job has lost")
    judge = "from frontier_llm.cluster import slurm; print(slurm.unhealthy(['n0', 'n1', 'n2', 'n3']))"
    assert cluster.run(sys.executable, "-c", judge, env={"SLURM_JOB_ID": run.job_id}).strip() == "['n1']"


@pytest.mark.thorough
@scenario(nodes=4)
def test_dead_batch_host_requeues_the_job_elsewhere(cluster: LocalSlurm, tmp_path: Path) -> None:
    # The supervisor dies with its node, so Slurm itself requeues the job (--requeue).
    run = Run(cluster, tmp_path, 2, 1, ("train.steps=160", "batch.global_batch=6"), {"STAND_IN_STEP_S": "0.5"})
    run.wait_step(3)
    cluster.kill_node("n0")
    assert run.wait(300)["JobState"] == "COMPLETED", run.text()
    assert int(cluster.job(run.job_id)["Restarts"]) >= 1
    last = run_dir.attempts(run.directory)[-1]
    assert last.cause == "finished" and "n0" not in last.nodes


@pytest.mark.thorough
@scenario(nodes=3)
def test_a_host_that_computes_wrongly_is_used_no_more(cluster: LocalSlurm, tmp_path: Path) -> None:
    env = {"FRONTIER_LLM_SPARE_NODES": "1", "STAND_IN_WRONG": "n1"}
    run = Run(cluster, tmp_path, 3, 2, ("train.steps=6",), env)
    assert run.wait()["JobState"] == "COMPLETED", run.text()
    assert [(attempt.cause, attempt.nodes) for attempt in run_dir.attempts(run.directory)] == [
        ("wrong results", ("n0", "n1")),
        ("finished", ("n0", "n2")),
    ]
    assert run_dir.attempts(run.directory)[0].failed_host == "n1" and run_dir.bad_hosts(run.directory) == ["n1"]


@pytest.mark.thorough
@scenario(nodes=3)
def test_a_node_failure_that_is_not_continued_fails_the_job(cluster: LocalSlurm, tmp_path: Path) -> None:
    run = Run(
        cluster,
        tmp_path,
        3,
        1,
        ("train.steps=400", "batch.global_batch=6", "job.continuation=never"),
        {"STAND_IN_STEP_S": "0.5"},
    )
    run.wait_step(3)
    cluster.kill_node("n1")
    job = run.wait(300)
    assert job["JobState"] == "FAILED" and job["ExitCode"] != "0:0", run.text()
    assert run.causes() == ["node failure"] and "job.continuation is never" in run.text()
    assert run.job_id not in cluster.queued()


@pytest.mark.thorough
@scenario(nodes=2)
def test_a_host_that_computes_wrongly_is_not_requeued(cluster: LocalSlurm, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path, 2, 1, ("train.steps=6",), {"STAND_IN_WRONG": "n1"})
    assert run.wait()["ExitCode"] == "2:0", run.text()
    assert run.causes() == ["wrong results"] and "--exclude=n1" in run.text()
    # The record that the ranks have written is not replaced.
    assert json.loads((run.directory / "failure.json").read_text())["suspects"][0]["tensor"] == "w"
    assert cluster.queued() == []


@pytest.mark.thorough
def test_preflight_leaves_a_bad_node_out(cluster: LocalSlurm, tmp_path: Path) -> None:
    # n1 reports that its disk is full. The spare node replaces it before the first attempt.
    planted = """
import collections, os, shutil
if os.environ.get("SLURMD_NODENAME") == "n1":
    usage = collections.namedtuple("usage", "total used free")
    shutil.disk_usage = lambda path: usage(10**12, 10**12, 0)
"""
    (tmp_path / "sitecustomize.py").write_text(planted)
    env = {"FRONTIER_LLM_PREFLIGHT": "1", "FRONTIER_LLM_SPARE_NODES": "1"}
    run = Run(cluster, tmp_path, 3, 1, ("train.steps=3",), env)
    assert run.wait()["JobState"] == "COMPLETED", run.text()
    assert [attempt.nodes for attempt in run_dir.attempts(run.directory)] == [("n0", "n2")]
    assert "--exclude=n1" in run.text() and run_dir.bad_hosts(run.directory) == ["n1"]


@pytest.mark.thorough
def test_preflight_stops_when_too_few_nodes_pass(cluster: LocalSlurm, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import collections, shutil\nshutil.disk_usage = lambda path: collections.namedtuple('u', 'free')(0)\n"
    )
    run = Run(cluster, tmp_path, 1, 1, ("train.steps=3",), {"FRONTIER_LLM_PREFLIGHT": "1"})
    assert run.wait()["ExitCode"] == "2:0"
    assert "see the findings above" in run.text() and not (run.directory / "attempts.jsonl").exists()


@pytest.mark.thorough
@scenario(nodes=3)
def test_a_new_job_excludes_nodes_if_too_few_pass_preflight(cluster: LocalSlurm, tmp_path: Path) -> None:
    """n0 reports that its disk is full, and the job has no spare. A requeued job would get n0 again."""
    planted = """
import collections, os, shutil
if os.environ.get("SLURMD_NODENAME") == "n0":
    usage = collections.namedtuple("usage", "total used free")
    shutil.disk_usage = lambda path: usage(10**12, 10**12, 0)
"""
    (tmp_path / "sitecustomize.py").write_text(planted)
    (tmp_path / "run").mkdir()
    words = shlex.join([f"train.run_dir={tmp_path}/run", *SMALL, "train.steps=3"])
    options = f"#SBATCH --ntasks-per-node=1\n#SBATCH --output={tmp_path}/job-%j.out\nset -euo pipefail"
    text = write_script(tmp_path, 2).read_text().replace('"$@"', words)
    script = tmp_path / "run" / "job.sbatch"
    script.write_text(text.replace("set -euo pipefail", options, 1))
    env = {"FRONTIER_LLM_PREFLIGHT": "1", "FRONTIER_LLM_SIGNAL_LEAD_S": "10", "PYTHONPATH": str(tmp_path)}
    first = cluster.submit(str(script), cwd=tmp_path, env=env)
    assert cluster.wait_job(first)["JobState"] == "COMPLETED"
    output = (tmp_path / f"job-{first}.out").read_text()
    assert "n0 failed; only 1 of the 2 needed nodes are left" in output, output
    second = run_dir.queued_job(tmp_path / "run")
    assert second not in ("", first), output
    assert cluster.wait_job(second)["JobState"] == "COMPLETED"
    (made,) = run_dir.attempts(tmp_path / "run")
    assert (made.nodes, made.cause, made.job_id) == (("n1", "n2"), "finished", second)


@pytest.mark.thorough
@scenario(nodes=1)
def test_successor_jobs_follow_one_at_a_time(cluster: LocalSlurm, tmp_path: Path) -> None:
    # As after `submit --continue-with successor`: the script is in the run directory.
    (tmp_path / "run").mkdir()
    script = write_script(tmp_path, 1)
    words = shlex.join([f"train.run_dir={tmp_path}/run", *SMALL, "train.steps=120"])
    (tmp_path / "run" / "job.sbatch").write_text(script.read_text().replace('"$@"', words))
    env = {
        "FRONTIER_LLM_CONTINUE": "successor",
        "STAND_IN_STEP_S": "0.4",
        "FRONTIER_LLM_SIGNAL_LEAD_S": "25",
        "PYTHONPATH": str(tmp_path),
    }
    options = ("--time=1", "--signal=USR1@25", "--ntasks-per-node=1")
    # The successor gets account, partition and QOS of the first job's command line. All other options must be in the
    # script.
    text = (tmp_path / "run" / "job.sbatch").read_text()
    lines = "\n".join(f"#SBATCH {option}" for option in options)
    (tmp_path / "run" / "job.sbatch").write_text(text.replace("set -euo pipefail", f"{lines}\nset -euo pipefail", 1))
    first = cluster.submit(str(tmp_path / "run" / "job.sbatch"), cwd=tmp_path, env=env)
    # by this text a supervisor finds the job that a failed sbatch has queued
    shown = cluster.run("squeue", "--me", "--noheader", "--format=%A|%o").splitlines()
    assert shown == [f"{first}|{tmp_path}/run/job.sbatch"]
    most = 0

    def finished() -> bool:
        nonlocal most
        most = max(most, len(cluster.queued()))
        return run_dir.latest_step(tmp_path / "run") >= 120 and not cluster.queued()

    cluster.wait_for(finished, 400, "end of the chain")
    made = run_dir.attempts(tmp_path / "run")
    assert len({attempt.job_id for attempt in made}) == len(made) >= 2 and made[0].job_id == first
    assert [attempt.cause for attempt in made] == ["interrupted"] * (len(made) - 1) + ["finished"]
    assert most <= 2  # the running job and one successor
    assert [row["step"] for row in run_dir.read_jsonl(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 121))
