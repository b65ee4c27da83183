"""Points of a scaling series: runs that differ in their number of nodes.

A weak series keeps the batch per replica, a strong series the global batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from frontier_llm.cluster.sites import Site, request_problems, whole_replicas
from frontier_llm.config import RunConfig, available, load_run
from frontier_llm.errors import ConfigError, LayoutError, Problem, first_of
from frontier_llm.files import write_atomically
from frontier_llm.topology.plan import plan_problems
from frontier_llm.units import strict_json

Mode = Literal["weak", "strong"]
MODES: tuple[Mode, ...] = ("weak", "strong")
POINT_FILE = "point.json"
STARTED_FILES = ("submissions.jsonl", "attempts.jsonl", "metrics.jsonl")  # one exists after a job or a start

# batches of ORNL's measurements (arXiv 2312.12705): per replica in the weak series, global in the strong one
PUBLISHED_BATCHES: dict[str, dict[Mode, int]] = {
    "gpt-175b": {"weak": 640, "strong": 8000},
    "gpt-1t": {"weak": 1600, "strong": 8016},
}


@dataclass(frozen=True)
class Point:
    """One run of a series."""

    mode: Mode
    nodes: int
    tasks_per_node: int
    repeat: int
    config: RunConfig  # configuration of the point, with its global batch and run directory
    site: str

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self.nodes * self.tasks_per_node

    @property
    def directory(self) -> Path:
        """Run directory of the point."""
        return Path(self.config.train.run_dir)

    def describe(self) -> dict[str, Any]:
        """Return the content of point.json, from which the results of succeeded and failed points are collected."""
        parallel = self.config.parallel
        return {
            "mode": self.mode,
            "model": self.config.model.name,
            "site": self.site,
            "machine": self.config.machine,
            "nodes": self.nodes,
            "devices": self.devices,
            "repeat": self.repeat,
            "tensor": parallel.tensor,
            "context": parallel.context,
            "pipeline": parallel.pipeline,
            "data": self.devices // parallel.model_ranks,
            "micro_batch": self.config.batch.micro_batch,
            "global_batch": self.config.batch.global_batch,
            "sequence_length": self.config.model.sequence_length,
            "steps": self.config.train.steps,
        }


def find_run(model: str) -> str:
    """Return the shipped training run of a model. Raises ConfigError if there is none."""
    for name in available("runs"):
        if name.startswith("train_") and load_run(name).model.name == model:
            return name
    fix = f"use --run {model}" if model in available("runs") else "give a run file with --run"
    raise ConfigError(f"no run file in configs/runs trains {model!r}", fix, "--model")


def default_batch(mode: Mode, config: RunConfig) -> int:
    """Return the published batch of this model and mode. Raises ConfigError if there is none."""
    published = PUBLISHED_BATCHES.get(config.model.name)
    if published is None:
        name = {"weak": "--batch-per-replica", "strong": "batch.global_batch"}[mode]
        added = {"weak": "--batch-per-replica N", "strong": "batch.global_batch=N"}[mode]
        models = ", ".join(PUBLISHED_BATCHES)
        raise ConfigError(
            f"is not set, and only models with published {mode} scaling have a default ({models}), not "
            f"{config.model.name!r}",
            f"add {added} (sequences per step{' and replica' if mode == 'weak' else ''})",
            name,
        )
    return published[mode]


def make_point(
    mode: Mode, config: RunConfig, site: Site, nodes: int, batch: int, directory: Path, repeat: int = 1
) -> Point:
    """Return a point with a batch of `batch` samples per replica (weak) or in total (strong), without checking it."""
    replicas = max(1, nodes * site.tasks_per_node // config.parallel.model_ranks)
    global_batch = batch * replicas if mode == "weak" else batch
    changes = {
        "machine": site.machine,
        "batch": config.batch.model_copy(update={"global_batch": global_batch}),
        "train": config.train.model_copy(update={"run_dir": str(directory)}),
    }
    return Point(
        mode=mode,
        nodes=nodes,
        tasks_per_node=site.tasks_per_node,
        repeat=repeat,
        config=config.model_copy(update=changes),
        site=site.name,
    )


def make_series(
    mode: Mode, config: RunConfig, site: Site, nodes: Sequence[int], batch: int, root: Path, repeats: int = 1
) -> list[Point]:
    """Return every point of a series with run directories under `root`, smallest first.

    Raises LayoutError with each illegal point and its nearest legal node counts.
    """
    if not nodes or repeats < 1:
        raise ConfigError(
            "a series needs at least one node count and one repeat",
            "for example --nodes 16,32,64 --repeats 1",
            "--nodes",
        )
    points = []
    for count in sorted(set(nodes)):
        for repeat in range(1, repeats + 1):
            directory = root / f"{mode}_{config.model.name}_nodes{count:05}_r{repeat}"
            point = make_point(mode, config, site, nodes=count, batch=batch, directory=directory, repeat=repeat)
            points.append(point)
    problems = []
    for point in points:
        if point.repeat > 1:
            continue
        for problem in _problems_of(point, site):
            fix = problem.fix or _node_fix(config, site, point.nodes)
            problems.append(replace(problem, where=f"{point.nodes} nodes: {problem.where}", fix=fix))
    if problems:
        raise LayoutError(problems)
    return points


def _problems_of(point: Point, site: Site) -> Iterator[Problem]:
    """Yield problems of the point's layout, with fixes that name options of the command: node counts and batches."""
    for problem in plan_problems(point.config, point.devices):
        if problem.where == "world size":
            yield replace(problem, fix=_node_fix(point.config, site, point.nodes))
        # in a weak series the global batch is always a multiple of dp, so only batch.micro_batch can be the cause
        elif problem.where == "batch.global_batch" and point.mode == "weak":
            fix = f"give a multiple of batch.micro_batch, {point.config.batch.micro_batch}"
            yield replace(problem, where="--batch-per-replica", fix=fix)
        else:
            yield problem


def _node_fix(config: RunConfig, site: Site, nodes: int) -> str:
    replica = config.parallel.model_ranks
    counts = whole_replicas(nodes, site.tasks_per_node, replica)
    return f"use {' or '.join(map(str, counts))} nodes: a replica takes {replica} devices"


def submission_problems(
    points: Sequence[Point], site: Site, account: str | None, partition: str | None, minutes: int | None
) -> Iterator[Problem]:
    """Yield reasons for which the site would refuse the series, before its first job is queued."""
    nodes = sorted({point.nodes for point in points})
    yield from dict.fromkeys(
        problem for count in nodes for problem in request_problems(site, count, minutes, account, partition)
    )
    if site.max_queued_jobs is not None and len(points) > site.max_queued_jobs:
        what = f"the series has {len(points)} jobs, but {site.name} queues at most {site.max_queued_jobs} per user"
        yield Problem("points", what, "use fewer --nodes or --repeats")


def announce(point: Point) -> None:
    """Write point.json into the point's run directory, before anything runs there."""
    write_atomically(point.directory / POINT_FILE, _content(point))


def _content(point: Point) -> str:
    content = {
        **point.describe(),
        "config": point.config.model_dump(mode="json"),
    }
    return strict_json(content, indent=None) + "\n"


def refuse_other_runs(points: Sequence[Point]) -> None:
    """Raise ConfigError if a directory belongs to another point, for example one with another batch.

    The new point would end at once, and its throughput would be computed from the step times of the other point. Only
    the number of steps may differ, because it follows from the walltime and from the predicted step time.
    """
    problems = []
    for point in points:
        has_started = any((point.directory / name).is_file() for name in STARTED_FILES)
        if has_started and not _is_announced(point):
            problem = Problem(
                where=str(point.directory),
                what="holds a run with another configuration",
                fix="use another --output, or delete the directory",
            )
            problems.append(problem)
    if problems:
        raise ConfigError(first_of(problems))


def _is_announced(point: Point) -> bool:
    """Return whether the directory has the point.json of this point, with any number of steps."""
    try:
        announced = json.loads((point.directory / POINT_FILE).read_bytes())
        return bool(_without_steps(announced) == _without_steps(json.loads(_content(point))))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _without_steps(content: dict[str, Any]) -> dict[str, Any]:
    config = content["config"]
    return {**content, "steps": None, "config": {**config, "train": {**config["train"], "steps": None}}}
