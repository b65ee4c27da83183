from __future__ import annotations

from pathlib import Path

import pytest

from frontier_llm.cluster.sites import load_site
from frontier_llm.config import load_run
from frontier_llm.errors import ConfigError
from frontier_llm.experiments.scaling.series import Point, make_series
from frontier_llm.experiments.scaling.walltime import FEWEST_STEPS, MOST_STEPS, with_walltime
from frontier_llm.planner.predict import MARGIN, START_S, predict

FRONTIER = load_site("frontier")


def strong(nodes: list[int], batch: int = 8000) -> list[Point]:
    return make_series("strong", load_run("train_175b"), FRONTIER, nodes, batch, Path("unused"))


def test_every_point_fits_into_its_bin_with_a_margin() -> None:
    timed = with_walltime(strong([64, 128]), FRONTIER)
    steps = [point.config.train.steps for point, _ in timed]
    assert steps == sorted(steps) and steps[0] >= FEWEST_STEPS and steps[-1] == MOST_STEPS
    for point, minutes in timed:
        assert minutes is not None and minutes <= (FRONTIER.max_minutes(point.nodes) or 0)
        predicted = predict(point.config, point.devices)
        factor = max(MARGIN, 1 + predicted.band)  # upper end of the prediction interval
        seconds = START_S + factor * point.config.train.steps * predicted.step_time_s
        assert seconds - 300 < 60 * minutes < seconds + 600 or 60 * minutes >= seconds


def test_wanted_steps_that_do_not_fit_are_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError) as caught:
        with_walltime(strong([64, 128]), FRONTIER, steps=100)
    assert [problem.where for problem in caught.value.problems] == ["64 nodes", "128 nodes"]
    for problem, nodes in zip(caught.value.problems, (64, 128), strict=True):
        fits = int(problem.fix.removeprefix("set train.steps="))
        ((point, minutes),) = with_walltime(strong([nodes]), FRONTIER, steps=fits)
        assert point.config.train.steps == fits and minutes is not None


def test_a_step_longer_than_the_bin_names_another_partition() -> None:
    with pytest.raises(ConfigError, match="8 of them do not fit into 02:00:00") as caught:
        with_walltime(strong([8]), FRONTIER)
    assert "--partition extended" in str(caught.value)
    ((_, minutes),) = with_walltime(strong([8]), FRONTIER, "extended")
    assert minutes is not None and minutes > 120


def test_the_users_time_is_kept_and_limits_the_steps() -> None:
    ((few, minutes),) = with_walltime(strong([128]), FRONTIER, minutes=90)
    assert minutes == 90 and few.config.train.steps < MOST_STEPS


def test_a_site_without_limits_leaves_the_time_open() -> None:
    assert with_walltime(strong([16]), load_site("generic"), steps=8)[0][1] is None


def test_fewer_than_five_measured_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 steps leave 2 to measure") as caught:
        with_walltime(strong([128]), FRONTIER, steps=5)
    assert caught.value.problems[0].fix == "set train.steps=8 or more"
