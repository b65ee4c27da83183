"""The files that ranks leave determine how a trial ended. Also tests the command on a machine without a scheduler."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from frontier_llm.cli.main import main
from frontier_llm.config import load_run
from frontier_llm.errors import NOT_FINITE, OUT_OF_MEMORY
from frontier_llm.experiments.scaling.launch import LocalRanks, RunEnd, ShortRun, judge
from frontier_llm.experiments.tuning.trials import COLUMNS
from frontier_llm.run.failure import Evidence, Failure
from frontier_llm.units import strict_json

TINY = ["model=gpt-tiny", "precision.dtype=fp32", "batch.global_batch=8"]
SPACE = ["--fix", "recompute=none", "--fix", "zero=1", "--ranks", "2"]


def ended(what: str = "", *, in_time: bool = True, code: int = 1, cause: str = "crash", message: str = "") -> RunEnd:
    failure = Failure(what, Evidence.EXCEPTION, cause, 1, "n0", message=(message,)) if what else None
    return RunEnd(30.0, code if what or not in_time else 0, failure, in_time)


def steps(directory: Path, losses: list[float]) -> None:
    rows = [{"kind": "step", "step": number, "loss": loss, "step_time_s": 0.5} for number, loss in enumerate(losses, 1)]
    (directory / "metrics.jsonl").write_text("".join(strict_json(row, indent=None) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("end", "losses", "status"),
    [
        (ended(), [2.0] * 6, "ok"),
        (ended("exit code 1; torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB"), [], "out of memory"),
        (ended("killed by SIGKILL; lost a peer"), [2.0], "out of memory"),
        (
            ended("exit code 1", message="RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory"),
            [],
            "out of memory",
        ),
        (ended(in_time=False), [], "hang"),
        (ended("nothing moved for 540 s", code=70), [2.0], "hang"),
        (
            ended("lost a peer", message="Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4"),
            [2.0],
            "hang",
        ),
        (ended("n3 has no memory left", cause=OUT_OF_MEMORY), [], "out of memory"),
        (ended(in_time=False), [2.0] * 6, "ok"),
        (
            ended("whatever the message says", code=2, cause=NOT_FINITE),
            [],
            "not finite",
        ),
        (ended(), [float("nan")] * 6, "not finite"),
        (ended("n0 failed", cause="node failure"), [2.0] * 3, "node failure"),
        (ended("needs 2 GiB more", code=2, cause="refused"), [], "refused"),
        (ended("exit code 1; IndexError: 3"), [2.0], "crash"),
        (ended(), [], "crash"),
    ],
)
def test_failures_are_told_apart(tmp_path: Path, end: RunEnd, losses: list[float], status: str) -> None:
    steps(tmp_path, losses)
    assert judge(tmp_path, end)[0] == status


def test_ranks_of_this_machine_end_at_their_limit_and_a_refusal_is_read(tmp_path: Path) -> None:
    words = (
        "train_small",
        *TINY,
        "parallel.tensor=1",
        "parallel.pipeline=1",
        "train.steps=100000",
        f"train.run_dir={tmp_path}/run",
    )
    end = LocalRanks(1).start(ShortRun(words), 0.2)
    assert not end.in_time and judge(tmp_path / "run", end)[0] == "hang"
    words = (*words, "batch.micro_batch=3")
    end = LocalRanks(1).start(ShortRun(words), 60.0)
    assert end.in_time and end.exit_code == 2 and "micro_batch" in (tmp_path / "run" / "ranks.log").read_text()


def test_the_dry_run_lists_the_space_and_what_a_trial_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "train_small", *TINY, *SPACE, "--max-node-hours", "1", "--output", str(tmp_path), "--dry-run"]
    assert main(words) == 0
    text = capsys.readouterr()
    assert re.match(r" *step_s +gib +layout\n0\.\d+ +\d\.\d +TP\d PP\d", text.out) and "node-hours" in text.err
    assert main([*words, "--json"]) == 0
    steps_s = [float(row["step_s"]) for row in json.loads(capsys.readouterr().out)]
    assert len(steps_s) == len(text.out.splitlines()) - 1
    assert list(tmp_path.iterdir()) == []
    # the announced range is that of the list, and no layout is slower than --within times the fastest
    assert f"{len(steps_s)} of " in text.err
    named = re.search(r"searched, (\S+) (m?)s to (\S+) (m?)s per step", text.err)
    assert named
    least_s, most_s = (float(named[place]) / (1000 if named[place + 1] else 1) for place in (1, 3))
    assert (least_s, most_s) == pytest.approx((min(steps_s), max(steps_s)), rel=0.01)
    assert max(steps_s) <= 2.0 * min(steps_s)


def test_a_budget_below_one_trial_is_answered_with_the_budget_that_allows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The announced cost of a trial is the cost that the search compares with its budget."""
    words = ["tune", "train_small", *TINY, *SPACE, "--output", str(tmp_path), "--max-node-hours"]
    assert main([*words, "0.001"]) == 1
    text = capsys.readouterr()
    needed = re.search(r"--max-node-hours (\S+) or more allows it", text.err)
    announced = re.search(r"measured\), (\S+) node-hours; 0 of", text.err)
    assert needed and announced and float(needed[1]) == pytest.approx(float(announced[1]), abs=0.001)
    assert "None" not in text.out


def test_a_tune_inside_no_allocation_names_its_batch_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "train_22b", "--nodes", "16", "--max-node-hours", "1"]) == 2
    assert "sbatch --nodes=16 slurm/tune.sbatch" in capsys.readouterr().err


def table(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Write trials.csv with step times that reverse the planner's order, and return the trials' layouts. No trial is
    run.
    """
    assert (
        main(["tune", "train_small", *TINY, *SPACE, "--max-node-hours", "1", "--output", str(directory), "--dry-run"])
        == 0
    )
    capsys.readouterr()
    from frontier_llm.experiments.tuning.space import make_space
    from frontier_llm.experiments.tuning.trials import Trial, write_trials
    from frontier_llm.machine.load import load_machine, rates

    config = load_run("train_small", TINY)
    space = make_space(config, rates(load_machine("local")), 2, 2, {"recompute": "none", "sharding": "optimizer"})
    trials = [
        Trial(
            number,
            plan.layout,
            "exhaustive",
            plan.step_s,
            *(("ok", 3.0 - 0.1 * number, 7) if number != 2 else ("hang", None, 0)),
            9.0,
            0.0025,
        )
        for number, plan in enumerate(space.plans[:6], 1)
    ]
    write_trials(directory / "trials.csv", trials)
    return [str(trial.layout) for trial in trials]


@pytest.mark.thorough
def test_the_report_and_the_fastest_layout_come_from_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path, capsys)
    assert (tmp_path / "trials.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    words = ["tune", "train_small", *TINY, *SPACE, "--max-node-hours", "0", "--output", str(tmp_path)]
    assert main([*words, "--emit-machine", str(tmp_path / "machine.yaml"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["best_step_s"] == pytest.approx(2.4) and facts["failures"] == {"hang": 1} and facts["trials"] == 6
    assert facts["faster_than_planner"] == pytest.approx(2.9 / 2.4 - 1)
    page = (tmp_path / "tune.html").read_text()
    assert page.count("class=chart") == 2 and "What mattered" in page and "fitted" in page and "hang" in page
    best = load_run(str(tmp_path / "best.yaml"))
    assert best.model.name == "gpt-tiny" and best.batch.global_batch == 8
    assert yaml.safe_load((tmp_path / "machine.yaml").read_text())["base"] == "local"


@pytest.mark.thorough
def test_a_search_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "tune",
        "train_small",
        *TINY,
        *SPACE,
        "--max-node-hours",
        "1",
        "--output",
        str(tmp_path),
        "--steps",
        "5",
        "--json",
    ]
    assert main([*words, "--trials", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == 2
    assert main([*words, "--trials", "3"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["trials"] == 3 and facts["failures"] == {} and facts["best_step_s"] > 0
