"""Measures the step time of one layout by a short run within a time limit (a trial)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from frontier_llm import log
from frontier_llm.blueprint.layout import run_keys
from frontier_llm.experiments.scaling.harvest import step_times_s
from frontier_llm.experiments.scaling.launch import BARE, Launcher, ShortRun, judge
from frontier_llm.experiments.tuning.search import Proposal, Tuner
from frontier_llm.experiments.tuning.space import words_of
from frontier_llm.experiments.tuning.trials import Trial
from frontier_llm.planner.report import layout_words
from frontier_llm.units import format_seconds


@dataclass(frozen=True)
class Bench:
    """Launcher and settings with which trials are run."""

    launcher: Launcher
    run: str  # run file as the user typed it
    overrides: Sequence[str]
    steps: int
    directory: Path  # directory of the search; contains a directory per trial

    def words(self, search: Tuner, number: int, directory: Path) -> tuple[str, ...]:
        """Return the command-line arguments for the ranks of a trial."""
        layout = search.space.plans[number].layout
        words = [self.run, *self.overrides, *BARE, *words_of(run_keys(layout))]
        words += [f"train.steps={self.steps}", f"train.run_dir={directory}", f"guard.max_skips_in_row={self.steps}"]
        return tuple(words)

    def measure(self, search: Tuner, proposal: Proposal, limit_s: float) -> Trial:
        """Run a trial and return its result. If a node failed or the walltime ended, its status is in RETRIED."""
        number = len(search.trials) + 1
        directory = self.directory / f"trial_{number:04}"
        words = self.words(search, proposal.number, directory)
        plan = search.space.plans[proposal.number]
        log.info(
            f"trial {number} ({proposal.why}): {layout_words(plan)}; expected {format_seconds(proposal.expected_s)}, "
            f"limit {limit_s:.0f} s"
        )
        end = self.launcher.start(ShortRun(words), limit_s)
        status, detail = ("interrupted", "") if end.interrupted else judge(directory, end)
        times_s = step_times_s(directory) if status == "ok" else []
        step_s = median(times_s) if times_s else None
        log.info(
            f"trial {number}: {status}" + (f", {format_seconds(step_s)} per step" if step_s else f" {detail[:120]}")
        )
        return Trial(
            number=number,
            layout=plan.layout,
            why=proposal.why,
            predicted_s=plan.step_s,
            status=status,
            step_s=step_s,
            steps=len(times_s),
            wall_s=end.seconds,
            node_hours=end.seconds * self.launcher.nodes / 3600,
            detail=detail,
        )


def fastest_first(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials sorted by measured step time, failures last."""
    return sorted(trials, key=lambda trial: trial.step_s or math.inf)
