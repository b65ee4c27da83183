from __future__ import annotations

from pathlib import Path

import pytest

from frontier_llm.cluster.sites import format_walltime, load_site, parse_walltime, request_problems, site_names
from frontier_llm.errors import ConfigError


def test_every_shipped_site_loads() -> None:
    assert site_names() == ["adastra", "dardel", "frontier", "generic", "local", "lumi", "setonix"]
    assert all(load_site(name).name == name for name in site_names())


@pytest.mark.parametrize(("nodes", "minutes"), [(1, 120), (91, 120), (92, 360), (183, 360), (184, 720), (9472, 720)])
def test_frontier_bins(nodes: int, minutes: int) -> None:
    assert load_site("frontier").max_minutes(nodes) == minutes


def test_unknown_site_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'frontier'"):
        load_site("fronter")


def test_unknown_key_of_a_site_file_is_refused(tmp_path) -> None:
    (tmp_path / "x.yaml").write_text(
        "name: x\nmachine: local\ngpus_per_node: 4\ntasks_per_node: 4\ncpus_per_task: 2\nmodule: [a]\n"
    )
    with pytest.raises(ConfigError, match="did you mean 'modules'"):
        load_site(str(tmp_path / "x.yaml"))


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("1:30", 2), ("0:30", 1), ("01:30:00", 90), ("2-00:00:00", 2880), ("1-12", 2160), ("12:00:00", 720)],
)
def test_walltime_formats(text: str, minutes: int) -> None:
    assert parse_walltime(text) == minutes
    assert parse_walltime(format_walltime(minutes)) == minutes


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-5"])
def test_bad_walltimes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_walltime(text)


def test_all_violations_with_limits_and_nearest_values() -> None:
    frontier = load_site("frontier")
    assert not list(request_problems(frontier, 384, 720, "ABC123", None))
    problems = list(request_problems(frontier, 64, 600, None, None))
    assert [problem.where for problem in problems] == ["--account", "--time"]
    assert "02:00:00" in problems[1].what and "--time 02:00:00" in problems[1].fix and "184 nodes" in problems[1].fix
    (problem,) = request_problems(frontier, 10_000, None, "A", None)
    assert problem.where == "--nodes" and "--nodes 9472" in problem.fix
    (problem,) = request_problems(frontier, 64, 24 * 60, "A", None)
    assert "--partition extended" in problem.fix
    (problem,) = request_problems(frontier, 64, 60, "A", "batsh")
    assert "did you mean 'batch'" in problem.fix
    assert not list(request_problems(load_site("generic"), 10_000, 99_999, None, "any"))


def test_the_former_key_of_the_warning_time_is_read_with_a_notice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shipped = Path(__file__).parents[3] / "slurm" / "sites" / "local.yaml"
    file = tmp_path / "own.yaml"
    file.write_text(shipped.read_text(encoding="utf-8") + "\nsignal_lead_s: 77\n", encoding="utf-8")
    assert load_site(str(file)).warning_time_s == 77
    assert "signal_lead_s is now called warning_time_s: write the new name" in capfd.readouterr().err


def test_partitions_are_the_bins_of_the_machine_file() -> None:
    frontier = load_site("frontier")
    assert {name: [limit.max_nodes for limit in limits] for name, limits in frontier.partitions.items()} == {
        "batch": [91, 183, 9472],
        "extended": [64],
    }
    assert load_site("lumi").max_minutes(4, "small-g") == 72 * 60
    assert load_site("generic").partitions == {}
