"""Section "configuration": checks the rules of the layout, the packages and files that a run names, and its data up to
the last step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace

from frontier_llm import log
from frontier_llm.certificate.named_code import code_problems, resume_problems
from frontier_llm.certificate.section import CertificateSection, judged, not_checkable
from frontier_llm.certificate.subject import Subject
from frontier_llm.config import RunConfig, phase_note, phases_of, warmup_note
from frontier_llm.config.load import find_file
from frontier_llm.data.loader import data_problems
from frontier_llm.data.plan import data_plan
from frontier_llm.data.position import Position
from frontier_llm.data.summary import dataset_lines, dataset_warnings
from frontier_llm.errors import FrontierError, Problem, not_installed, suggest
from frontier_llm.inference.tasks import read_task, requests
from frontier_llm.machine.load import load_machine
from frontier_llm.machine.precision import device_problem
from frontier_llm.units import plural

NAME = "configuration"


def check_configuration(subject: Subject) -> CertificateSection:
    """Refuse a run whose layout, named packages and files, or data would fail on the ranks."""
    config = subject.config
    problems = [*subject.layout_problems, *named_problems(config, subject.world_size)]
    data = data_problems(config, subject.position)
    evidence = [] if subject.layout_problems else list(_layout_evidence(subject))
    if data and not problems and subject.elsewhere:
        return not_checkable(NAME, f"{data[0]} ({subject.elsewhere})", evidence)
    if subject.request is None:
        problems += package_problems(config)
        problems += resume_problems(config, subject.allowed_changes)
    if not subject.layout_problems and importlib.util.find_spec("torch"):
        problems += code_problems(config, subject.plan.microbatches)
    if not data:
        evidence += _data_evidence(subject)
    return judged(NAME, evidence, [*problems, *data])


def _layout_evidence(subject: Subject) -> Iterator[str]:
    config = subject.config
    yield f"{config.model.name}: {subject.plan.describe()}, {plural(subject.world_size, 'rank')}"
    if config.train.phases:
        for phase in phases_of(config):
            yield phase.describe()
    yield from filter(None, (warmup_note(config), phase_note(config)))


def _data_evidence(subject: Subject) -> Iterator[str]:
    """Yield the datasets, and the data that will have been repeated, never read or left out at the last step."""
    yield from dataset_lines(subject.config, subject.position)
    yield from dataset_warnings(subject.config, subject.position)
    planned = data_plan(subject.config, subject.position)
    first = planned.after_step + 1
    yield f"data for steps {first} to {subject.config.train.steps} from {plural(len(planned.sources), 'source')}"
    yield from planned.notes


def configuration_problems(
    config: RunConfig, layout: Sequence[Problem], ranks: int, position: Position
) -> list[Problem]:
    """Return the problems that would make the run fail on `ranks` ranks of this computer. `layout` has the problems of
    the layout.
    """
    return [
        *package_problems(config),
        *layout,
        *data_problems(config, position),
        *named_problems(config, ranks),
    ]


def named_problems(config: RunConfig, ranks: int) -> Iterator[Problem]:
    """Yield problems of files, profiled steps, held-out sets and question files that the run names."""
    named_file = list(named_file_problems(config))
    yield from named_file
    if not named_file and (problem := device_problem(config)):  # the device comes from the machine file
        yield problem
    yield from profile_problems(config, ranks)
    yield from best_problems(config)
    yield from task_problems(config)


def package_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield missing packages that the ranks need.

    A missing `tensorboard` is only a problem if the run file sets train.tensorboard. By default, events are left out.
    """
    if importlib.util.find_spec("torch") is None:
        yield not_installed("torch")
    if config.train.tensorboard and importlib.util.find_spec("tensorboard") is None:
        missing = not_installed("tensorboard", "train.tensorboard")
        if "tensorboard" in config.train.model_fields_set:
            yield replace(missing, fix=f"{missing.fix}, or set train.tensorboard=false")
        else:
            log.info(
                "tensorboard is not installed: no events are written, metrics.jsonl has the same numbers (pip "
                "install tensorboard)"
            )
    for name in {"wandb", "mlflow"}.intersection(config.train.observers):
        if importlib.util.find_spec(name) is None:
            yield not_installed(name, "train.observers")


def profile_problems(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Yield profiled steps and ranks that the run does not have."""
    profile = config.train.profile
    steps = config.train.steps
    if profile is None:
        return
    if profile.range[-1] > steps:
        yield Problem(
            where="train.profile.steps",
            what=f"{profile.steps} ends after the last step of the run, {steps}",
            fix=f"end the range at {steps}",
        )
    if missing := [rank for rank in profile.ranks if rank >= world_size]:
        yield Problem(
            where="train.profile.ranks",
            what=f"the run has no rank {missing[0]}",
            fix=f"name ranks from 0 to {world_size - 1}",
        )


def best_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if `keep_best` names an unknown held-out set, or if only the run's last step is evaluated."""
    best = config.train.keep_best
    sets = list(config.data.held_out)
    if best is not None and best not in sets:
        yield Problem(
            where="train.keep_best", what=f"{best!r} is not a held-out set of this run", fix=suggest(best, sets)
        )
    elif best is not None and not config.train.eval_interval:
        yield Problem(
            where="train.keep_best",
            what="the run is evaluated only once, at its end, so there is only one checkpoint to choose from",
            fix="set train.eval_interval=100",
        )


def named_file_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of the machine file and of the algorithm table of the run."""
    try:
        load_machine(config.machine)
    except FrontierError as error:
        yield from error.problems
    try:
        if config.comm.algorithms not in ("flat", "hierarchical"):
            find_file(config.comm.algorithms, "algorithms")
    except FrontierError as error:
        yield from (replace(problem, where="comm.algorithms") for problem in error.problems)


def task_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield problems of question files: unreadable files, or text without a tokenizer."""
    tasks = config.train.eval_tasks
    if tasks and config.data.tokenizer is None:
        fix = "set data.tokenizer to the tokenizer that made the data"
        yield Problem(where="train.eval_tasks", what="questions are text, but the run has no tokenizer", fix=fix)
    for name, task in tasks.items():
        try:
            requests(read_task(name, task.path, task.limit), task.shots)
        except FrontierError as error:
            yield from (
                replace(problem, where=f"train.eval_tasks.{name}: {problem.where}") for problem in error.problems
            )
