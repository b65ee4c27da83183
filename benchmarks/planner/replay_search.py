"""Replays the search of `frontier-llm tune` with many seeds on a table with the measured time of every layout.

    python -m benchmarks.planner.replay_search [TABLE] [--seeds N] [--figure F]

benchmarks/planner/measure_layouts.py writes TABLE (docs/benchmarks/results/tune.csv). After each number of trials,
prints the best step time so far divided by the table's best step time. Compares searches, random order, and the
planner's choice alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.harness import RESULTS, parse_arguments
from benchmarks.planner.measure_layouts import FIXED, RUN, WITHIN
from frontier_llm.config import load_run
from frontier_llm.experiments.tuning.search import Limits, Proposal, Tuner, run_search
from frontier_llm.experiments.tuning.space import Space, make_space
from frontier_llm.experiments.tuning.trials import Trial, read_trials
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.candidates import parse_fixed

TABLE = RESULTS / "tune.csv"
STEPS = TABLE.with_name("tune_steps.csv")  # the nine steps of each trial; the table has their median
ORDERS = 2000  # number of random orders


def measured_space(table: Path = TABLE) -> tuple[Space, np.ndarray]:
    """Return the layouts of the table as a space, and the seconds of each layout.

    V-shaped schedules were added after the measurement, so the table does not contain them. The search that measured
    the table applied its limit to times of the closed form. The table therefore has layouts whose simulated times are
    above this limit.
    """
    config = load_run("train_22b", ["machine=local", *RUN])
    space = make_space(
        config,
        rates(load_machine("local")),
        4,
        1,
        parse_fixed(list(FIXED)),
        within=2 * WITHIN,
    )
    seconds = {trial.layout: trial.step_s for trial in read_trials(table, space.plans[0].layout)}
    space = replace(space, plans=tuple(plan for plan in space.plans if plan.layout in seconds))
    assert len(space.plans) == len(seconds), "the planner no longer proposes some of the table's layouts"
    return space, np.array([seconds[plan.layout] for plan in space.plans], dtype=float)


def searched(space: Space, seconds: np.ndarray, seed: int, trials: int) -> np.ndarray:
    """Return the best step time so far after each trial of one search, divided by the table's best. After the end of
    the search, its last value is repeated.
    """
    search = Tuner(space, [], seed)

    def measure(proposal: Proposal, limit_s: float) -> Trial:
        plan = space.plans[proposal.number]
        step_s = float(seconds[proposal.number])
        return Trial(
            len(search.trials) + 1,
            plan.layout,
            proposal.why,
            plan.step_s,
            "ok",
            step_s,
            9,
            12.0,
            0.01,
        )

    run_search(
        search,
        12,
        Limits(1e9, 4, trials),
        measure,
        lambda rows: None,
    )
    steps = [trial.step_s or np.inf for trial in search.trials]
    return np.minimum.accumulate([*steps, *[np.inf] * (trials - len(steps))]) / seconds.min()


def at_random(seconds: np.ndarray, trials: int) -> np.ndarray:
    """Return the best step time so far for layouts in random order, divided by the table's best: one row per order."""
    orders = (np.random.default_rng(seed).permutation(len(seconds))[:trials] for seed in range(ORDERS))
    return np.array([np.minimum.accumulate(seconds[order]) for order in orders]) / seconds.min()


def repeatability(drawings: int = 2000) -> tuple[float, float]:
    """Return how well a repeated measurement agrees with the table: (spread, share).

    The spread is the median over layouts of the standard deviation of log time. The share counts the repeated tables in
    which this table's best layout is within 3 % of the best.

    A repeated table takes each median from steps drawn with replacement from the layout's trial. It does not include
    differences between trials, such as the time of day and the cores.
    """
    steps = np.loadtxt(STEPS, delimiter=",", skiprows=1)[:, 1:]
    rng = np.random.default_rng(0)
    tables = [
        np.median(np.take_along_axis(steps, rng.integers(steps.shape[1], size=steps.shape), 1), axis=1)
        for _ in range(drawings)
    ]
    again = np.array(tables)
    best = np.median(steps, axis=1).argmin()
    return float(np.median(np.log(again).std(axis=0))), float((again[:, best] <= 1.03 * again.min(axis=1)).mean())


def draw(path: Path, found: np.ndarray, chance: np.ndarray, planner: float) -> None:
    """Plot mean and 10 to 90 % range of each method over the number of trials."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    trials = np.arange(1, found.shape[1] + 1)
    for label, rows in (("measured search", found), ("random order", chance)):
        (line,) = axes.plot(trials, rows.mean(0), label=label)
        axes.fill_between(trials, *np.quantile(rows, (0.1, 0.9), axis=0), alpha=0.2, color=line.get_color())
    axes.axhline(planner, linestyle=":", color="gray", label="planner's choice")
    axes.set(
        xlabel="trials", ylabel="best step so far / best of all", ylim=(0.98, float(np.quantile(chance[:, 0], 0.9)))
    )
    axes.legend()
    figure.savefig(path)


def main() -> int:
    """Print the tables and plot the figure. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, nargs="?", default=TABLE)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--figure", type=Path)
    args = parse_arguments(parser, smoke=["--seeds", "1"])
    space, seconds = measured_space(args.table)
    trials = len(seconds) // 4
    found = np.array([searched(space, seconds, seed, trials) for seed in range(args.seeds)])
    chance = at_random(seconds, trials)
    print(f"{len(seconds)} layouts; the planner's choice takes {seconds[0] / seconds.min():.3f} times the best")
    if args.table == TABLE:
        print(
            "a time repeats to {:.1%}; in {:.0%} of tables measured anew the best of this one is within 3 %".format(
                *repeatability()
            )
        )
    print(f"{'trials':>6} {'search':>7} {'random':>7}   within 3 %: search, random")
    for after in range(4, trials + 1):
        near = [100 * float((rows[:, after - 1] <= 1.03).mean()) for rows in (found, chance)]
        print(
            f"{after:>6} {found[:, after - 1].mean():>7.3f} {chance[:, after - 1].mean():>7.3f}   {near[0]:>16.0f} % "
            f"{near[1]:>5.0f} %"
        )
    if args.figure:
        draw(args.figure, found, chance, seconds[0] / seconds.min())
    return 0


if __name__ == "__main__":
    sys.exit(main())
