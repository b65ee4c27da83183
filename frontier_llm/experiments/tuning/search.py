"""Tuning search: chooses the layout that is measured next and its time limit, and decides when the search ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from frontier_llm.experiments.tuning.space import Space
from frontier_llm.experiments.tuning.surrogate import Belief, Surrogate
from frontier_llm.experiments.tuning.trials import RETRIED, Trial
from frontier_llm.planner.predict import START_S

# Number of trials after the first trial (the planner's choice) whose layouts are far from the measured layouts. One
# trial alone shows no differences between layouts.
SPREAD_TRIALS = 3
# The search ends if no untried layout is expected to shorten the step by more than this share. Two runs of the same
# layout differ by about this share.
WORTH = 0.003
LEAST_TRIALS = 8
MOST_NODE_FAILURES = 3  # the search ends after this number of trials in a row with failed nodes
SLOWER = 2.5  # A trial is stopped if its step takes more than this factor times the best measured step.
PATIENCE = 4.0  # Factor on the predicted step, used instead of SLOWER until a step is measured.
AGAIN = "run the same command again to continue"


@dataclass(frozen=True)
class Proposal:
    """Layout to try next."""

    number: int  # index in `Space.plans`
    why: str  # planner | spread | model | exhaustive
    expected_s: float  # seconds per step


class Tuner:
    """State of a search. When a search continues in another job, the state is rebuilt from the table of trials."""

    def __init__(self, space: Space, trials: Sequence[Trial], seed: int = 0) -> None:
        self.space = space
        self.trials = list(trials)
        self.seed = seed
        self.surrogate = Surrogate(space)

    @property
    def tried(self) -> dict[int, Trial]:
        """Number of a layout → its latest trial. Trials that gave no result for their layout are left out."""
        numbers = ((self.space.index(trial.layout), trial) for trial in self.trials if trial.status not in RETRIED)
        return {number: trial for number, trial in numbers if number is not None}

    @property
    def best(self) -> Trial | None:
        """Fastest successful trial, or None."""
        return min(
            (trial for trial in self.tried.values() if trial.ok),
            key=lambda trial: trial.step_s or math.inf,
            default=None,
        )

    def belief(self) -> Belief:
        """Return the expected step time of every layout, given the trials."""
        plans = self.space.plans
        errors = {
            number: math.log(trial.step_s / plans[number].step_s)
            for number, trial in self.tried.items()
            if trial.step_s
        }
        return self.surrogate.learn(errors, tuple(number for number, trial in self.tried.items() if not trial.ok))

    def propose(self) -> Proposal | None:
        """Return the layout to measure next, or None if no untried layout has an expected gain of at least WORTH."""
        tried = self.tried
        plans = self.space.plans
        left = [number for number in range(len(plans)) if number not in tried]
        if not left:
            return None
        if 0 in left:
            return Proposal(0, "planner", plans[0].step_s)
        belief = self.belief()
        expected = np.exp(belief.mean)
        if len(tried) <= SPREAD_TRIALS or self.best is None:
            shares = self.surrogate.distances(left, list(tried)) ** 2
            number = int(
                np.random.default_rng([self.seed, len(tried)]).choice(
                    left,
                    p=shares / shares.sum() if shares.any() else None,
                )
            )
            return Proposal(number, "spread", float(expected[number]))
        gain = belief.expected_gain(self.best.step_s or math.inf)
        number = max(left, key=lambda index: gain[index])
        if gain[number] < WORTH and len(tried) >= LEAST_TRIALS:
            return None
        return Proposal(number, "model", float(expected[number]))

    def start_s(self) -> float:
        """Return a time limit in seconds for the start of a run, without its steps.

        The limit is three times the longest start so far, or START_S before the first successful trial.
        """
        seen = [trial.wall_s - (trial.step_s or 0.0) * trial.steps for trial in self.trials if trial.ok]
        return 3 * max(seen) if seen else START_S

    def limit_s(self, proposal: Proposal, steps: int) -> float:
        """Return the time limit of a trial in seconds."""
        slowest_s = SLOWER * self.best.step_s if self.best and self.best.step_s else PATIENCE * proposal.expected_s
        return self.start_s() + steps * slowest_s

    def expected_s(self, proposal: Proposal, steps: int) -> float:
        """Return the expected duration of a trial in seconds."""
        return self.start_s() / 3 + steps * proposal.expected_s


class Everything(Tuner):
    """Search that measures every layout of the search space once.

    The order is random, so that times when the machine is slow affect all kinds of layouts equally.
    """

    def propose(self) -> Proposal | None:
        """Return the next layout of a shuffled list."""
        left = [number for number in range(len(self.space.plans)) if number not in self.tried]
        if not left:
            return None
        number = int(np.random.default_rng([self.seed, len(left)]).choice(left))
        return Proposal(number, "exhaustive", self.space.plans[number].step_s)


@dataclass(frozen=True)
class Limits:
    """Resources that a search may use."""

    node_hours: float
    nodes: int
    trials: int | None = None
    time_left_s: Callable[[], float] = lambda: math.inf


def run_search(
    search: Tuner,
    steps: int,
    limits: Limits,
    measure: Callable[[Proposal, float], Trial],
    record: Callable[[list[Trial]], None],
) -> str:
    """Run trials until a limit is reached or nothing is left to gain. Returns the reason for the end.

    `measure` runs one trial within a time limit in seconds. `record` receives all trials after each trial.
    """
    while True:
        used = sum(trial.node_hours for trial in search.trials)
        if limits.trials is not None and len(search.tried) >= limits.trials:
            return f"{len(search.tried)} trials are done"
        if used >= limits.node_hours:
            return f"{used:.3g} of {limits.node_hours:.3g} node-hours are used"
        proposal = search.propose()
        if proposal is None:
            done = len(search.tried) == len(search.space.plans)
            if done:
                return "every layout has been tried"
            return f"no other layout is expected to gain more than {100 * WORTH:.1f} %"
        expected_s = search.expected_s(proposal, steps)
        limit_s = search.limit_s(proposal, steps)
        if used + expected_s * limits.nodes / 3600 > limits.node_hours:
            needed = used + expected_s * limits.nodes / 3600
            return (
                f"a further trial of about {expected_s:.0f} s would exceed {limits.node_hours:.3g} node-hours; "
                f"--max-node-hours {math.ceil(1000 * needed) / 1000:g} or more allows it"
            )
        if (left_s := limits.time_left_s()) < expected_s:
            return f"{max(left_s, 0):.0f} s of walltime are left, but a trial takes about {expected_s:.0f} s; {AGAIN}"
        affordable_s = (limits.node_hours - used) * 3600 / limits.nodes
        granted_s = min(limit_s, left_s, affordable_s)
        trial = measure(proposal, granted_s)
        if trial.status == "hang" and granted_s < limit_s:  # the walltime left less time than the layout's limit
            trial = replace(trial, status="interrupted")
        search.trials.append(trial)
        record(search.trials)
        if trial.status == "interrupted":
            return f"a stop was requested; {AGAIN}"
        last = [one.status for one in search.trials[-MOST_NODE_FAILURES:]]
        if last == ["node failure"] * MOST_NODE_FAILURES:
            return f"nodes failed in {MOST_NODE_FAILURES} trials in a row"
