"""A training job as its batch shell finds it: run file, allocation, site, and how to go on when the job ends first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.cluster import slurm
from frontier_llm.cluster.lead import job_lead_s
from frontier_llm.cluster.recorded import as_it_stands
from frontier_llm.cluster.sites import Site, load_site
from frontier_llm.config import RunConfig, load_run, saves_nothing
from frontier_llm.errors import FrontierError, LayoutError, Problem, suggest
from frontier_llm.run import run_dir
from frontier_llm.run.rank_env import COMMAND, environ
from frontier_llm.topology.plan import plan_problems

TRAIN_FLAGS = {"--strict": 0, "--allow-change": 1}  # of `frontier-llm train`, and how many words follow
TRAIN = (*COMMAND, "train")


@dataclass(frozen=True)
class BatchJob:
    """What to run, on which nodes, and what to do when the run is not done."""

    config: RunConfig
    words: tuple[str, ...]  # run file and overrides, as the ranks get them
    directory: Path  # of the run, absolute
    site: Site
    allocation: slurm.Allocation
    spares: int = 0
    continue_with: str = "requeue"
    program: tuple[str, ...] = TRAIN
    flags: tuple[str, ...] = ()  # of the program, passed on

    @property
    def nodes_needed(self) -> int:
        """Nodes that one attempt uses."""
        return len(self.allocation.nodes) - self.spares

    @property
    def world_size(self) -> int:
        """Ranks of one attempt."""
        return self.nodes_needed * self.allocation.tasks_per_node

    @property
    def lead_s(self) -> float:
        """How long before the walltime Slurm warns this job."""
        return job_lead_s(self.site)

    @property
    def max_node_hours(self) -> float | None:
        """What the run may use in all its jobs; None: no limit. Raises FrontierError for something that is no
        number.
        """
        text = environ("FRONTIER_LLM_MAX_NODE_HOURS")
        if not text:
            return None
        with suppress(ValueError):
            hours = float(text)
            if math.isfinite(hours) and hours > 0:  # nan would be no limit at all
                return hours
        raise FrontierError(f"{text!r} is not a number of node-hours above 0", where="FRONTIER_LLM_MAX_NODE_HOURS")

    @property
    def budget_left_s(self) -> float:
        """For how long its nodes may still run."""
        limit = self.max_node_hours
        return math.inf if limit is None else (limit - run_dir.node_hours(self.directory)) * 3600 / self.nodes_needed

    @property
    def untrusted(self) -> list[str]:
        """Nodes of the allocation that computed wrongly, or that differed from the others at a start."""
        return [node for node in run_dir.untrusted_hosts(self.directory) if node in self.allocation.nodes]

    @property
    def too_slow(self) -> list[str]:
        """Hosts that were named slow as often as the site bears."""
        limit = self.site.exclude_slow_after
        return (
            [] if limit is None else [slow.host for slow in run_dir.slow_hosts(self.directory) if slow.times >= limit]
        )


def make_job(words: Sequence[str], program: tuple[str, ...] = TRAIN, continue_with: str | None = None) -> BatchJob:
    """The job of this batch shell. Raises FrontierError for a bad config, layout or environment, before any rank
    starts.
    """
    allocation = slurm.Allocation.from_environment()
    site = load_site()
    words, flags = split_flags(words)
    words = (words[0], f"machine={site.machine}", *words[1:])  # a run file may have been written for another site
    config = as_it_stands(load_run(words[0], words[1:]))
    continue_with = continue_with or environ("FRONTIER_LLM_CONTINUE") or default_continuation(config)
    if continue_with not in ("requeue", "successor", "never"):
        raise FrontierError(f"{continue_with!r} is not requeue, successor or never", where="FRONTIER_LLM_CONTINUE")
    job = BatchJob(
        config=config,
        words=words,
        directory=Path(config.train.run_dir).resolve(),
        site=site,
        allocation=allocation,
        spares=spare_nodes(allocation),
        continue_with=continue_with,
        program=program,
        flags=flags,
    )
    if problems := plan_problems(config, job.world_size):
        raise LayoutError(
            [*problems, Problem("nodes", f"{job.nodes_needed} x {allocation.tasks_per_node} ranks", "sbatch --nodes=N")]
        )
    return job


def default_continuation(config: RunConfig) -> str:
    """`requeue`, or `never` for a run that saves nothing: a further job would begin at the first step again."""
    return "never" if saves_nothing(config.train) else "requeue"


def spare_nodes(allocation: slurm.Allocation) -> int:
    """How many of its nodes to keep in hand. Raises FrontierError where none would be left to work."""
    text = environ("FRONTIER_LLM_SPARE_NODES") or "0"
    if not text.isdecimal() or int(text) >= len(allocation.nodes):
        raise FrontierError(
            f"{text} of {len(allocation.nodes)} nodes", "keep at least one to work", "FRONTIER_LLM_SPARE_NODES"
        )
    return int(text)


def split_flags(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(run file and overrides, flags of train) of what stood after the script's name. Raises FrontierError for a
    flag that train has not.
    """
    others = list[str]()
    flags = list[str]()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            others.append(word)
            continue
        name = word.partition("=")[0]
        if name not in TRAIN_FLAGS:
            raise FrontierError(f"{word} cannot stand after the script's name", suggest(name, TRAIN_FLAGS), "job")
        values = 0 if "=" in word else TRAIN_FLAGS[name]
        if len(rest) < values:
            raise FrontierError("needs the name of a key", f"write {name} train.steps", name)
        flags += [word, *(rest.pop(0) for _ in range(values))]
    if not others:
        raise FrontierError("no run file is named", "sbatch slurm/train_small.sbatch does", "job")
    return tuple(others), tuple(flags)
