"""docs/frontier.md agrees with the scripts and the site file."""

from __future__ import annotations

import re

import pytest

from frontier_llm.cli.main import parse
from frontier_llm.cluster.admission import cost_of
from frontier_llm.cluster.sbatch import JOBS
from frontier_llm.cluster.sites import load_site, parse_walltime
from frontier_llm.cluster.submit import JobRequest, wanted_job
from frontier_llm.config import load_run
from frontier_llm.planner.predict import predict
from tests.docs.pages import PAGES, ROOT, commands, fences

TEXT = (ROOT / "docs" / "frontier.md").read_text(encoding="utf-8")
SITE = load_site("frontier")


def test_lead_times_are_those_of_the_scripts() -> None:
    stated = {name: int(seconds) for name, seconds in re.findall(r"`(pretrain_\w+)` (\d+) s", TEXT)}
    assert stated == {job.name: job.warning_s for job in JOBS if job.name in ("pretrain_175b", "pretrain_1t")}
    assert f"Frontier's {SITE.warning_time_s} s" in TEXT and f"asks for {SITE.warning_time_s} s plus" in TEXT
    for job in JOBS:
        script = (ROOT / "slurm" / f"{job.name}.sbatch").read_text()
        assert f"--signal=USR1@{job.warning_s or SITE.warning_time_s}\n" in script


def test_the_bins_are_those_of_the_site_file() -> None:
    bins = [
        (int(last), float(hours)) for last, hours in re.findall(r"^\| \d+–(\d+) \| (\d+) h \|$", TEXT, re.MULTILINE)
    ]
    assert bins == [(limit.max_nodes, limit.max_hours) for limit in SITE.limits("batch")]
    (extended,) = SITE.limits("extended")
    assert f"`extended`: {extended.max_hours:g} h on up to {extended.max_nodes} nodes" in TEXT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_ranks_are_started_with_the_environments_python(page) -> None:
    """After a site's modules are loaded, a bare `python` is the Python of the modules."""
    lines = [line for fence in fences(page) if fence.language in ("bash", "console") for line in commands(fence)]
    assert [line for line in lines if re.search(r"\bsrun\b.* python3? ", line)] == []


def test_the_first_days_costs_are_what_the_dry_runs_say(tmp_path) -> None:
    """For every job that `submit` queues, the page must give the predicted node-hours and the maximum by the
    walltime.
    """
    page = (ROOT / "docs" / "first_day.md").read_text(encoding="utf-8")
    table = {
        int(row[0]): row[1:]
        for row in re.findall(r"^\| (\d)\. .*? \| (\d+) \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    }
    seen = set()
    for fence in fences(ROOT / "docs" / "first_day.md"):
        for line in commands(fence) if fence.language == "bash" else []:
            if not line.startswith("frontier-llm submit ") or "runs/first" in line:
                continue
            args = parse(line.split()[1:])
            config = load_run(args.run, [f"machine={SITE.machine}", *args.overrides, f"train.run_dir={tmp_path}"])
            predicted = predict(config, args.nodes * SITE.tasks_per_node)
            minutes = parse_walltime(args.time)
            wanted = wanted_job(config, SITE, args.nodes, spares=args.spares)
            request = JobRequest(wanted, config, SITE, minutes=minutes).with_prediction(predicted)
            cost = cost_of(request)
            job = {"train_small": 1, "train_22b": 3, "train_175b": 6, "train_1t": 7}[args.run]
            nodes, predicted, most = table[job]
            assert float(predicted) == pytest.approx(cost.node_hours, rel=0.03, abs=0.05), line
            assert float(most) >= (cost.slice_hours or 0) * cost.nodes * 0.98 and int(nodes) == cost.nodes
            seen.add(job)
    assert seen == {1, 3, 6, 7} and set(table) == set(range(1, 8))
