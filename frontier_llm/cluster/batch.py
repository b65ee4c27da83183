"""Opens a job in its batch shell: reads the record `job.json`, the configuration, the site and Slurm's allocation.

    python -m frontier_llm.cli.job --run-dir=DIR [WORD …]          for a script of `submit`: the record exists
    python -m frontier_llm.cli.job RUN [WORD …]                    for a shipped script: the words define the record

WORD is an override `key=value` of the run, a flag of `train`, or one of `job.spares=N`,
`job.continuation=requeue|successor|never`, `job.max_node_hours=H`, `job.failed_start_node_hours=H`,
`job.warning_s=S` and `job.preflight=true|false`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frontier_llm import log
from frontier_llm.cluster import slurm
from frontier_llm.cluster.sites import Site, load_site
from frontier_llm.config import RunConfig, saves_nothing
from frontier_llm.data.recorded import as_it_stands
from frontier_llm.errors import FrontierError, LayoutError, Problem, suggest
from frontier_llm.machine.precision import load_resolved
from frontier_llm.run.job import CONTINUATIONS, EXAMINED_NODES, FILE, Job, read_job
from frontier_llm.run.rank_env import COMMAND, environ
from frontier_llm.topology.plan import plan_problems

TRAIN_FLAGS = {"--strict": 0, "--allow-change": 1}  # flags of `frontier-llm train` → number of words after the flag
TRAIN = (*COMMAND, "train")
RUN_DIR_FLAG = "--run-dir="
RUN_FILE = "run.yaml"  # `submit` writes it into the run directory
SETTING_PREFIX = "job."


@dataclass(frozen=True)
class BatchRun:
    """A job whose ranks are started inside an allocation."""

    job: Job
    config: RunConfig
    site: Site
    allocation: slurm.Allocation
    program: tuple[str, ...] = TRAIN
    more_words: tuple[str, ...] = ()  # overrides for this start only; they follow the job's words
    more_flags: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()  # overrides that select the layout of the next start; (): the layout of the run file

    @property
    def directory(self) -> Path:
        """The run directory, absolute."""
        return self.job.directory

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments of the ranks' interpreter."""
        words = (*self.job.words, *self.plan, *self.more_words)
        return (*self.program, *words, *self.job.flags, *self.more_flags)

    def with_plan(self, number: int) -> BatchRun:
        """Return the run with plan `number` of `job.plans`. If the job has no plans, return the run unchanged."""
        if not self.job.plans:
            return self
        plan = self.job.plans[number]
        words = (*self.job.words[1:], *plan, *self.more_words)
        config = as_it_stands(load_resolved(self.job.words[0], words))
        return replace(self, plan=plan, config=config)


def _spares(text: str, where: str) -> int:
    if not text.isdecimal():
        raise FrontierError(f"{text!r} is not a number of nodes, 0 or more", where=where)
    return int(text)


def _continuation(text: str, where: str) -> str:
    if text not in CONTINUATIONS:
        raise FrontierError(f"{text!r} is not one of 'requeue', 'successor' and 'never'", where=where)
    return text


def _positive(text: str) -> float | None:
    with suppress(ValueError):
        number = float(text)
        if math.isfinite(number) and number > 0:  # a limit of nan would never be exceeded
            return number
    return None


def _node_hours(text: str, where: str) -> float:
    hours = _positive(text)
    if hours is None:
        raise FrontierError(f"{text!r} is not a number of node-hours above 0", where=where)
    return hours


def _seconds(text: str, where: str) -> float:
    seconds = _positive(text)
    if seconds is None:
        raise FrontierError(f"{text!r} is not a number of seconds above 0", where=where)
    return seconds


def _switch(text: str, where: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise FrontierError(f"{text!r} is neither true nor false", where=where)
    return text.lower() in ("true", "1")


@dataclass(frozen=True)
class _Setting:
    """A field of the job that a word `job.NAME=VALUE` sets."""

    name: str
    variable: str  # older environment variable for the setting, which is still read; '' if there is none
    parse: Callable[[str, str], Any]  # function of (text, name for error messages)


_SETTINGS = (
    _Setting("spares", "FRONTIER_LLM_SPARE_NODES", _spares),
    _Setting("continuation", "FRONTIER_LLM_CONTINUE", _continuation),
    _Setting("max_node_hours", "FRONTIER_LLM_MAX_NODE_HOURS", _node_hours),
    _Setting("failed_start_node_hours", "", _node_hours),
    _Setting("warning_s", "FRONTIER_LLM_SIGNAL_LEAD_S", _seconds),
    _Setting("preflight", "FRONTIER_LLM_PREFLIGHT", _switch),
)
ALL_SETTINGS = frozenset(setting.name for setting in _SETTINGS)


def split_settings(words: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (fields of the job by name, all other words). If several words set a field, the last is used.

    Raises FrontierError for a word `job.…` that is not a setting or has an invalid value.
    """
    known = {setting.name: setting for setting in _SETTINGS}
    settings: dict[str, Any] = {}
    others: list[str] = []
    for word in words:
        if not word.startswith(SETTING_PREFIX):
            others.append(word)
            continue
        name, equals, value = word.removeprefix(SETTING_PREFIX).partition("=")
        if name not in known or not equals:
            valid = [f"{SETTING_PREFIX}{each}=" for each in known]
            raise FrontierError(f"{word} is not a setting of the job", suggest(word, valid), "job")
        settings[name] = known[name].parse(value, f"{SETTING_PREFIX}{name}")
    return settings, tuple(others)


def settings_of_variables(names: Collection[str] = ALL_SETTINGS, *, notice: bool = True) -> dict[str, Any]:
    """Return the fields that are set by environment variables, with a notice for each.

    Raises FrontierError for an invalid value.
    """
    settings: dict[str, Any] = {}
    for setting in _SETTINGS:
        text = environ(setting.variable) if setting.variable else None
        if text and setting.name in names:
            settings[setting.name] = setting.parse(text, setting.variable)
            if notice:
                log.warn(
                    f"{setting.variable} is an old name; instead, write job.{setting.name}={text} "
                    f"after the script's name"
                )
    return settings


def _note_ignored_variables(job: Job) -> None:
    """Warn of variables that are ignored because the job already has a record."""
    for setting in _SETTINGS:
        text = environ(setting.variable) if setting.variable else None
        value = getattr(job, setting.name)
        if text and setting.parse(text, setting.variable) != value:
            log.warn(f"{setting.variable}={text} is ignored, because {job.directory / FILE} has {setting.name} {value}")


def open_batch(words: Sequence[str], program: tuple[str, ...] = TRAIN, continuation: str | None = None) -> BatchRun:
    """Return the job of this batch shell. `words` follow the module's name on the command line.

    `continuation` replaces the setting in the words. Writes nothing. Raises FrontierError for an invalid record,
    configuration, layout or environment, before any rank starts.
    """
    allocation = slurm.Allocation.from_environment()
    site = load_site()
    settings, words = split_settings(words)
    if words and words[0].startswith(RUN_DIR_FLAG):
        directory = Path(words[0].removeprefix(RUN_DIR_FLAG)).resolve()
        recorded = read_job(directory)
        if recorded is not None:
            run = _open_recorded(recorded, settings, words[1:], allocation, site, program)
            _refuse_layout(run)
            return run
        words = (str(directory / RUN_FILE), "ops.no_jit=true", *words[1:])
    words, flags = split_flags(words)
    words = (words[0], f"machine={site.machine}", *words[1:])  # the run file may name the machine of another site
    config = as_it_stands(load_resolved(words[0], words[1:]))
    chosen = {**settings_of_variables(), **settings}
    if continuation is not None:
        chosen["continuation"] = continuation
    job = make_job(
        directory=Path(config.train.run_dir).resolve(),
        words=words,
        flags=flags,
        site=site,
        allocated=len(allocation.nodes),
        settings={**_defaults(config, len(allocation.nodes)), **chosen},
    )
    run = BatchRun(job=job, config=config, site=site, allocation=allocation, program=program)
    _refuse_layout(run)
    return run


def _open_recorded(
    job: Job,
    settings: Mapping[str, Any],
    words: Sequence[str],
    allocation: slurm.Allocation,
    site: Site,
    program: tuple[str, ...],
) -> BatchRun:
    """Return the recorded job with settings and words of this start.

    Raises FrontierError if the job does not fit the site, the allocation or the run directory.
    """
    path = str(job.directory / FILE)
    if job.site != site.name:
        raise FrontierError(f"site is {job.site}, but this job runs on {site.name}", "submit the run here", path)
    have = len(allocation.nodes)
    if have < job.nodes:
        what = f"nodes is {job.nodes}, but this allocation has only {have}"
        raise FrontierError(what, f"sbatch --nodes={job.all_nodes}, or submit the run again", path)
    if have != job.all_nodes:
        log.warn(f"this allocation has {have} nodes, but {path} has nodes {job.nodes} and spares {job.spares}")
    _note_ignored_variables(job)
    more_words, more_flags = split_flags(["", *words])
    config = as_it_stands(load_resolved(job.words[0], (*job.words[1:], *more_words[1:])))
    if Path(config.train.run_dir).resolve() != job.directory.resolve():
        what = f"train.run_dir is {config.train.run_dir}, but this job trains in {job.run_dir}"
        raise FrontierError(what, "leave train.run_dir out, or submit the other directory as a separate run", path)
    return BatchRun(
        job=replace(job, **settings),
        config=config,
        site=site,
        allocation=allocation,
        program=program,
        more_words=more_words[1:],
        more_flags=more_flags,
    )


def make_job(
    *,
    directory: Path,
    words: tuple[str, ...],
    flags: tuple[str, ...],
    site: Site,
    allocated: int,
    settings: Mapping[str, Any],
) -> Job:
    """Return the record of a job that has `allocated` nodes. Raises FrontierError if all of them are spares."""
    return Job(
        run_dir=str(directory),
        words=words,
        flags=flags,
        site=site.name,
        nodes=working_nodes(settings, allocated),
        **{"warning_s": float(site.warning_time_s), **settings},
    )


def working_nodes(settings: Mapping[str, Any], allocated: int) -> int:
    """Return the number of nodes that are not spares. Raises FrontierError if there are none."""
    spares: int = settings.get("spares", 0)
    if spares >= allocated:
        raise FrontierError(
            f"is {spares}, and the allocation has {allocated} nodes",
            "leave at least one node that is not a spare",
            "job.spares",
        )
    return allocated - spares


def _refuse_layout(run: BatchRun) -> None:
    per_node = run.allocation.tasks_per_node
    if problems := plan_problems(run.config, run.job.nodes * per_node):
        ranks = Problem(
            "nodes", f"this job has {run.job.nodes} x {per_node} ranks", "sbatch --nodes=N changes the number of nodes"
        )
        raise LayoutError([*problems, ranks])


def _defaults(config: RunConfig, allocated: int) -> dict[str, Any]:
    """Return the fields of the job of a shipped script that depend on its run and its number of nodes."""
    return {"continuation": default_continuation(config), "preflight": allocated >= EXAMINED_NODES}


def default_continuation(config: RunConfig) -> str:
    """Return `requeue`, or `never` for a run that saves nothing, because its next job would restart at step 1."""
    return "never" if saves_nothing(config.train) else "requeue"


def split_flags(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (run file and overrides, flags of `train`) from the words after the script's name.

    Raises FrontierError for a flag that `train` does not have.
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
            raise FrontierError(f"{word} is not allowed after the script's name", suggest(name, TRAIN_FLAGS), "job")
        values = 0 if "=" in word else TRAIN_FLAGS[name]
        if len(rest) < values:
            raise FrontierError("needs the name of a key", f"write {name} train.steps", name)
        flags.append(word)
        for _ in range(values):
            flags.append(rest.pop(0))
    if not others:
        raise FrontierError(
            "no run file is named", "start a script that names one, for example sbatch slurm/train_small.sbatch", "job"
        )
    return tuple(others), tuple(flags)
