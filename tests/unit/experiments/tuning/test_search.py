"""The search on tables of step times: its first trials, failures, its end, and its continuation after a walltime."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from frontier_llm.blueprint.layout import layout_of, run_keys
from frontier_llm.config import load_run
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.experiments.measure.fit import scaled
from frontier_llm.experiments.measure.machine_file import write_machine
from frontier_llm.experiments.tuning.constants import tuned_machine
from frontier_llm.experiments.tuning.search import Everything, Limits, Proposal, Tuner, run_search
from frontier_llm.experiments.tuning.space import Space, laid_out, make_space, words_of
from frontier_llm.experiments.tuning.trials import Trial, read_trials, write_trials
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.search import simulate_layout
from tests.unit.experiments.recorded import assert_recorded

NUMBERS = rates(load_machine("local"))


@pytest.fixture(scope="module")
def space() -> Space:
    config = load_run("train_small", ["batch.global_batch=16"])
    return make_space(
        config, NUMBERS, 8, 2, {"recompute": "none", "sharding": "optimizer", "cp": 1, "chunks": 1}, most=60
    )


def trial_of(search: Tuner, proposal: Proposal, step_s: float | None, status: str = "ok") -> Trial:
    plan = search.space.plans[proposal.number]
    steps = 0 if step_s is None else 9
    wall_s = 20 + 9 * (step_s or 0)
    return Trial(
        len(search.trials) + 1, plan.layout, proposal.why, plan.step_s, status, step_s, steps, wall_s, wall_s / 3600
    )


def true_times(space: Space) -> np.ndarray:
    """Return the step times of a machine on which tensor parallelism is slower and pipelines are faster than the
    planner predicts.
    """
    return np.array(
        [plan.step_s * (1.3 + 0.2 * (plan.layout.tp > 1) - 0.35 * (plan.layout.pp > 1)) for plan in space.plans]
    )


def search_whole(space: Space, trials: int, seed: int = 0, failing: tuple[int, ...] = ()) -> Tuner:
    search = Tuner(space, [], seed)
    seconds = true_times(space)

    def measure(proposal: Proposal, limit_s: float) -> Trial:
        bad = proposal.number in failing
        return trial_of(
            search, proposal, None if bad else float(seconds[proposal.number]), "out of memory" if bad else "ok"
        )

    run_search(search, 9, Limits(1e9, 1, trials), measure, lambda rows: None)
    return search


def test_the_planners_choice_is_tried_first_and_then_what_the_model_expects(space: Space) -> None:
    search = search_whole(space, 12)
    assert [trial.why for trial in search.trials[:5]] == ["planner", "spread", "spread", "spread", "model"]
    assert search.trials[0].layout == space.plans[0].layout
    assert len({trial.layout for trial in search.trials}) == len(search.trials)
    assert search.best is not None and search.best.step_s <= 1.03 * true_times(space).min()


def test_a_layout_that_fails_is_not_tried_again_and_its_like_come_later(space: Space) -> None:
    failing = tuple(number for number, plan in enumerate(space.plans) if plan.layout.pp == 2)
    search = search_whole(space, 14, failing=failing)
    failed = [trial for trial in search.trials if not trial.ok]
    assert failed and len({trial.layout for trial in failed}) == len(failed)
    assert [trial.layout.pp == 2 for trial in search.trials[-4:]].count(True) <= 1
    assert search.best is not None and search.best.ok


def test_it_ends_when_nothing_is_worth_a_trial(space: Space) -> None:
    search = Tuner(space, [])
    why = run_search(
        search,
        9,
        Limits(1e9, 1),
        lambda proposal, limit_s: trial_of(search, proposal, 2 * space.plans[proposal.number].step_s),
        lambda rows: None,
    )
    assert "no other layout is expected to gain" in why and len(search.trials) < 20
    assert search.best is not None and search.best.layout == space.plans[0].layout


def test_it_never_starts_what_it_cannot_pay(space: Space) -> None:
    search = Tuner(space, [])
    assert "would exceed" in run_search(search, 9, Limits(0.01, 1), pytest.fail, lambda rows: None)
    granted: list[float] = []

    def measure(proposal: Proposal, limit_s: float) -> Trial:
        granted.append(limit_s)
        return replace(trial_of(search, proposal, 0.5), node_hours=0.02, wall_s=72)

    run_search(search, 9, Limits(0.1, 1), measure, lambda rows: None)
    used = np.cumsum([0.02] * len(granted))
    assert 1 <= len(granted) <= 5 and all(
        limit <= (0.1 - before + 0.02) * 3600 + 1e-6 for limit, before in zip(granted, used, strict=True)
    )
    assert "walltime" in run_search(
        Tuner(space, []), 9, Limits(1e9, 1, time_left_s=lambda: 30.0), pytest.fail, lambda rows: None
    )


def test_a_slow_layout_need_not_finish_and_a_shortened_hang_says_nothing(space: Space) -> None:
    search = Tuner(space, [])
    search.trials.append(trial_of(search, Proposal(0, "planner", 1.0), 1.0))
    proposal = Proposal(1, "model", 1.0)
    assert search.limit_s(proposal, 9) == pytest.approx(3 * 20 + 9 * 2.5)
    why = run_search(
        search,
        9,
        Limits(1e9, 1, time_left_s=lambda: 35.0),
        lambda proposal, limit_s: trial_of(search, proposal, None, "hang"),
        lambda rows: None,
    )
    assert (
        why == "a stop was requested; run the same command again to continue"
        and search.trials[-1].status == "interrupted"
        and len(search.tried) == 1
    )


def test_nodes_that_fail_end_the_search_and_say_nothing_of_layouts(space: Space) -> None:
    search = Tuner(space, [])
    why = run_search(
        search,
        9,
        Limits(1e9, 1),
        lambda proposal, limit_s: trial_of(search, proposal, None, "node failure"),
        lambda rows: None,
    )
    assert "nodes failed in 3 trials" in why and not search.tried


def test_it_goes_on_from_its_table(space: Space, tmp_path: Path) -> None:
    whole = search_whole(space, 12, seed=3)
    path = tmp_path / "trials.csv"
    assert read_trials(path, space.plans[0].layout) == []
    write_trials(
        path, [replace(trial, detail='a "quoted",\nbroken line') for trial in search_whole(space, 6, seed=3).trials]
    )
    trials = read_trials(path, space.plans[0].layout)
    assert [trial.layout for trial in trials] == [trial.layout for trial in whole.trials[:6]]
    # a trial of a search with other fixed choices
    other = replace(space.plans[0].layout, gradient_wire="bf16", data_shard=2)
    assert read_trials(path, other) == trials
    assert trials[0].detail == 'a "quoted", broken line'
    search = Tuner(space, trials, 3)
    seconds = true_times(space)
    run_search(
        search,
        9,
        Limits(1e9, 1, 12),
        lambda proposal, limit_s: trial_of(search, proposal, float(seconds[proposal.number])),
        lambda rows: None,
    )
    assert [trial.layout for trial in search.trials] == [trial.layout for trial in whole.trials]
    path.write_text(path.read_text().replace(",1f1b,", ",", 1))
    with pytest.raises(DataError, match="is not a trial"):
        read_trials(path, space.plans[0].layout)


def test_everything_is_tried_once(space: Space) -> None:
    search = Everything(space, [])
    why = run_search(
        search,
        9,
        Limits(1e9, 1),
        lambda proposal, limit_s: trial_of(search, proposal, 1.0 + proposal.number),
        lambda rows: None,
    )
    assert why == "every layout has been tried" and len(search.trials) == len(space.plans) == len(search.tried)


def test_the_space_is_what_the_planner_prices_and_each_layout_can_be_said_in_words(space: Space) -> None:
    assert [plan.step_s for plan in space.plans] == pytest.approx(sorted(plan.step_s for plan in space.plans), rel=0.03)
    for plan in space.plans[::7]:
        words = words_of(run_keys(plan.layout))
        assert layout_of(load_run("train_small", ["batch.global_batch=16", *words]), 8) == plan.layout
        assert layout_of(laid_out(space.config, plan.layout), 8) == plan.layout
    with pytest.raises(ConfigError, match="no layout of 7 devices is legal"):
        make_space(space.config, NUMBERS, 7, 2, {"tp": 2})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("run", "overrides", "axis"), [("moe_small", [], "ep"), ("train_small", ["model.sequence_length=131072"], "cp")]
)
def test_a_layout_with_every_axis_is_run_as_what_it_is(run: str, overrides: list[str], axis: str) -> None:
    """The run file's own choices of a layout must all be replaced."""
    own = ["parallel.context=2", "parallel.tensor=2", "parallel.expert=2" if axis == "ep" else "comm.tensor_chunks=2"]
    overrides = [*overrides, "batch.global_batch=16", "precision.dtype=bf16"]
    space = make_space(load_run(run, overrides), NUMBERS, 8, 8, {})
    assert {getattr(plan.layout, axis) for plan in space.plans} > {1}
    for plan in space.plans[::5]:
        words = words_of(run_keys(plan.layout))
        as_run = layout_of(load_run(run, [*overrides, *own, *words]), 8)
        assert replace(as_run, imbalance=plan.layout.imbalance, expert_nodes=plan.layout.expert_nodes) == plan.layout


def measured_on(space: Space, true: Rates, trials: int, noise: float) -> Everything:
    """Run trials of a machine with the constants `true`. Their log times have the standard deviation `noise`."""
    rng = np.random.default_rng(5)
    search = Everything(space, [])

    def measure(proposal: Proposal, limit_s: float) -> Trial:
        disturbance = float(np.exp(rng.normal(0, noise)))
        layout = space.plans[proposal.number].layout
        step_s = disturbance * simulate_layout(space.config.model, layout, true).step_s
        return trial_of(search, proposal, step_s)

    run_search(search, 9, Limits(1e9, 1, trials), measure, lambda rows: None)
    return search


SLOWER = scaled(NUMBERS, ("gemm_efficiency", "fabric_bytes_s"), np.log([0.5, 0.1]), {})


@pytest.mark.thorough
def test_constants_that_have_changed_are_found_and_written(space: Space, tmp_path: Path) -> None:
    content = tuned_machine(measured_on(space, SLOWER, 24, noise=0.08))
    assert_recorded("tuned.yaml", content)
    write_machine(tmp_path / "tuned.yaml", content)
    written = rates(load_machine(str(tmp_path / "tuned.yaml")))
    assert written.gemm_efficiency == pytest.approx(SLOWER.gemm_efficiency, rel=0.25)
    assert written.fabric_bytes_s == pytest.approx(SLOWER.fabric_bytes_s, rel=0.4)
    layouts = [plan.layout for plan in space.plans]
    errors = [
        [
            abs(
                math.log(
                    simulate_layout(space.config.model, layout, one).step_s
                    / simulate_layout(space.config.model, layout, SLOWER).step_s
                )
            )
            for layout in layouts
        ]
        for one in (NUMBERS, written)
    ]
    assert np.median(errors[1]) < 0.25 * np.median(errors[0])
