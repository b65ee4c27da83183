from __future__ import annotations

from pathlib import Path

import pytest

from frontier_llm.cluster.sites import load_site
from frontier_llm.config import RunConfig, load_run
from frontier_llm.errors import ConfigError, LayoutError
from frontier_llm.experiments.scaling.series import announce, default_batch, find_run, make_series, submission_problems

FRONTIER = load_site("frontier")


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_run("train_175b", ["train.steps=20"])


def test_weak_grows_the_batch_with_the_replicas(config: RunConfig, tmp_path: Path) -> None:
    points = make_series("weak", config, FRONTIER, [128, 16, 32], 640, tmp_path)
    assert [(point.nodes, point.devices, point.config.batch.global_batch) for point in points] == [
        (16, 128, 1280),
        (32, 256, 2560),
        (128, 1024, 10240),
    ]
    assert len({point.directory for point in points}) == 3


def test_strong_keeps_the_batch_and_repeats_have_their_own_directories(config: RunConfig, tmp_path: Path) -> None:
    points = make_series("strong", config, FRONTIER, [16, 32], 8000, tmp_path, repeats=3)
    assert {point.config.batch.global_batch for point in points} == {8000}
    assert len(points) == 6 and len({point.directory for point in points}) == 6


def test_illegal_points_name_the_nearest_node_counts(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(LayoutError) as caught:
        make_series("strong", config, FRONTIER, [8, 12, 24], 8000, tmp_path)
    text = str(caught.value)
    assert "12 nodes" in text and "use 8 or 16 nodes" in text
    assert (
        "24 nodes: batch.global_batch: 8000 is not a multiple" in text
        and "fix: set batch.global_batch=7998 or 8001" in text
    )
    assert "8 nodes: " not in text.replace("use 8", "")


def test_a_batch_per_replica_is_answered_as_such(tmp_path: Path) -> None:
    run = load_run("train_175b", ["train.steps=20", "batch.micro_batch=4"])
    with pytest.raises(LayoutError) as caught:
        make_series("weak", run, FRONTIER, [16], 6, tmp_path)
    assert str(caught.value).startswith(
        "16 nodes: --batch-per-replica: 12 is not a multiple of micro_batch 4 x dp 2 = 8"
    )
    assert "fix: give a multiple of batch.micro_batch, 4" in str(caught.value)


def test_published_batches_and_models(config: RunConfig) -> None:
    assert (default_batch("weak", config), default_batch("strong", config)) == (640, 8000)
    assert find_run("gpt-1t") == "train_1t"
    with pytest.raises(ConfigError, match="--run"):
        find_run("gpt-9t")
    with pytest.raises(ConfigError, match="--batch-per-replica"):
        default_batch("weak", load_run("train_small"))


def test_the_site_is_asked_about_every_point_before_the_first_is_queued(config: RunConfig, tmp_path: Path) -> None:
    points = make_series("weak", config, FRONTIER, [8, 128], 640, tmp_path, repeats=60)
    found = {problem.where: problem for problem in submission_problems(points, FRONTIER, None, None, 300)}
    assert set(found) == {"--account", "--time", "points"}
    assert "for 8 nodes" in found["--time"].what and "120 jobs" in found["points"].what
    assert not list(submission_problems(points[:2], FRONTIER, "ABC", None, 60))


def test_a_point_is_announced_before_it_runs(config: RunConfig, tmp_path: Path) -> None:
    (point,) = make_series("weak", config, FRONTIER, [8], 640, tmp_path)
    announce(point)
    assert '"nodes": 8' in (point.directory / "point.json").read_text()
