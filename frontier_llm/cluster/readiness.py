"""Checks that the packages and libraries that a run needs are installed at its site. The ranks' interpreter reports
facts about itself, and this module judges them.

`submit` starts that interpreter through launch/job.sh, with the site's modules. The batch script and `doctor` start it
in the environment that job.sh has made. `problems_of` returns the problems that follow from the facts.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from frontier_llm import log
from frontier_llm.cluster import slurm
from frontier_llm.cluster.batch import BatchRun
from frontier_llm.cluster.code import snapshot
from frontier_llm.cluster.disk import FreeSpace, space_problems
from frontier_llm.cluster.site_state import site_problems
from frontier_llm.cluster.sites import Site, root_dir
from frontier_llm.config import RunConfig, dump
from frontier_llm.errors import ConfigError, FrontierError, Problem
from frontier_llm.libraries import BUILD_COMMAND
from frontier_llm.machine.load import load_machine
from frontier_llm.machine.schema import Device
from frontier_llm.run.installation import Installation, NotInTime, ask
from frontier_llm.run.rank_env import environ, environment, rank_python

OLDEST_TORCH = (2, 10)  # the oldest version for which setup.py builds
INSTALL_PAGE = "docs/first_day.md, section 1"
ARCHIVE_PAGE = "docs/frontier.md, section 1"
CHECKED = (
    "torch and its build, the C++ libraries, the GPU kernels, the op back-ends, data, tokenizer, and the run directory"
)


class NotReadyError(FrontierError):
    """A package or library that the run needs is missing at its site, or this machine cannot check the site."""

    exit_code = 1


@dataclass(frozen=True)
class Readiness:
    """Result of the check before a job is queued."""

    problems: tuple[Problem, ...] = ()
    open_points: tuple[str, ...] = ()  # checks that are not possible here, and the command that runs them
    is_checkable: bool = True  # False on a machine that is not the site
    weight_gradients: str = ""  # how the ranks' torch adds weight gradients (`Installation.weight_gradients`)

    def render(self) -> str:
        """Return the result for a terminal."""
        if not self.is_checkable:
            return "nothing was checked"
        lines = [f"error: {problem}" for problem in self.problems] or ["everything that ranks need is installed"]
        return "\n".join([*lines, *self.notes()])

    def notes(self) -> Iterator[str]:
        """Yield facts about the installation that the planner can use."""
        if self.weight_gradients:
            yield (
                f"torch adds weight gradients with the method {self.weight_gradients}; doctor --emit-machine FILE "
                "writes it to a machine file for plan"
            )

    def refuse(self) -> None:
        """Raise NotReadyError if the job must not be queued."""
        if self.problems:
            raise NotReadyError(self.problems)
        if not self.is_checkable:
            raise NotReadyError(
                self.open_points[0], "run submit on a login node of the site; --dry-run shows the script here", "submit"
            )


def why_not_here(site: Site) -> str:
    """Return the reason why this machine cannot check the installation at the site. '' on the site itself."""
    name = slurm.cluster_name()
    if name is None:
        return f"not checkable here: Slurm does not respond, so this is not a login node of {site.name}"
    if site.cluster is not None and name != site.cluster:
        return f"not checkable here: this is cluster {name}, but {site.name} is cluster {site.cluster}"
    return ""


def before_the_queue(config: RunConfig, site: Site, directory: Path, variables: Mapping[str, str]) -> Readiness:
    """Check the environment that the job will have, with launch/job.sh of a copy of the code.

    `variables` are the variables that sbatch will pass to the job.
    """
    if reason := why_not_here(site):
        return Readiness(open_points=(f"{reason}. `submit` on the site checks {CHECKED}",), is_checkable=False)
    if gone := tuple(site_problems(site)):
        return Readiness(gone)
    open_points: list[str] = []
    if archive := environ("FRONTIER_LLM_ENV_ARCHIVE"):
        open_points.append(
            f"{archive} is unpacked only in the job, so the active environment was checked instead; the archive "
            "should be a copy of it"
        )
        if not Path(archive).is_file():
            return Readiness(
                (
                    Problem(
                        "FRONTIER_LLM_ENV_ARCHIVE", f"no file {archive}", f"create it with conda-pack ({ARCHIVE_PAGE})"
                    ),
                )
            )
    return replace(_readiness_as_rank(site, config, directory, variables), open_points=tuple(open_points))


def installation_problems(site: Site, config: RunConfig | None, directory: Path) -> Readiness:
    """Check the installation for `doctor`: in this environment if launch/job.sh has made it, otherwise through
    job.sh."""
    if reason := why_not_here(site):
        return Readiness(open_points=(f"the installation is {reason}",), is_checkable=False)
    if gone := tuple(site_problems(site)):
        return Readiness(gone)
    if environ("FRONTIER_LLM_SITE") != site.name or environ("FRONTIER_LLM_ROOT") is None:
        return _readiness_as_rank(site, config, directory, {"FRONTIER_LLM_PYTHON": rank_python()})
    try:
        facts = _ask_here(site, config)
    except FrontierError as error:
        return Readiness(error.problems)
    return _judged(facts, site, config, directory)


def _judged(facts: Installation, site: Site, config: RunConfig | None, directory: Path) -> Readiness:
    problems = tuple(problems_of(facts, site, config, directory))
    return Readiness(problems, weight_gradients=facts.weight_gradients)


def _ask_here(site: Site, config: RunConfig | None) -> Installation:
    """Collect facts from the ranks' interpreter in the environment of this process."""
    architecture = load_machine(site.machine).device.architecture
    return ask((rank_python(), "-P", "-m"), environment(), architecture, None if config is None else dump(config))


def _readiness_as_rank(
    site: Site, config: RunConfig | None, directory: Path, variables: Mapping[str, str]
) -> Readiness:
    """Collect and judge facts from the interpreter that launch/job.sh chooses. job.sh runs in a copy of the code."""
    architecture = load_machine(site.machine).device.architecture
    with tempfile.TemporaryDirectory(prefix="frontier-llm-check-") as folder:
        root = Path(folder) / "code"
        snapshot(root, site, compiled=False)
        environment_of_job = {**environment(), **variables, "FRONTIER_LLM_ROOT": str(root)}
        command = (str(root / "launch" / "job.sh"), site.name, "--as-rank")
        try:
            facts = ask(command, environment_of_job, architecture, None if config is None else dump(config))
            readiness = _judged(facts, site, config, directory)
        except FrontierError as error:
            readiness = Readiness(error.problems)
    return replace(readiness, problems=tuple(_without_copy(problem, root) for problem in readiness.problems))


def _without_copy(problem: Problem, copy: Path) -> Problem:
    """Replace paths of the temporary copy in a problem by paths of the package."""
    package = Path(__file__).resolve().parents[1]

    def original(text: str) -> str:
        return text.replace(str(copy / package.name), str(package)).replace(str(copy), str(root_dir()))

    return Problem(where=original(problem.where), what=original(problem.what), fix=original(problem.fix))


def refuse_unready(run: BatchRun) -> None:
    """Check the installation in the batch shell, before the first srun. Raises ConfigError, so that no restart
    follows. If a slow file system prevents the check, only warn: the ranks then report what is missing.
    """
    name = slurm.cluster_name()
    site = run.site
    if site.cluster is not None and name is not None and name != site.cluster:
        what = f"this job runs on cluster {name}, but {site.name} is cluster {site.cluster}"
        raise ConfigError(
            what, "export FRONTIER_LLM_SITE=NAME, or correct `cluster:` in the site file", "FRONTIER_LLM_SITE"
        )
    try:
        facts = _ask_here(site, run.config)
    except NotInTime as error:
        log.warn(f"the installation is not checked: {error}")
        return
    if problems := list(problems_of(facts, site, run.config, run.directory)):
        raise ConfigError(problems)


def problems_of(
    facts: Installation, site: Site, config: RunConfig | None = None, directory: Path | None = None
) -> Iterator[Problem]:
    """Yield every problem that keeps these ranks from training on this site: found value, expected value, repair.

    Without a run, only the installation is judged.
    """
    device = load_machine(site.machine).device
    on_gpus = device.vendor != "none" and (config is None or config.train.device != "cpu")
    if facts.missing_modules:
        what = f"{facts.executable} has no {', '.join(facts.missing_modules)}"
        yield Problem("Python", what, "pip install --no-build-isolation -e . in that environment")
    torch_problems = list(_torch_problems(facts, site, device, on_gpus))
    yield from torch_problems
    if facts.ops_error and not torch_problems:
        what = (
            f"frontier_llm.ops cannot be imported with {facts.torch.describe()} of {facts.executable}: "
            f"{facts.ops_error}"
        )
        yield Problem("torch", what, f"install torch again ({INSTALL_PAGE})")
    yield from _library_problems(facts)
    if config is not None:
        yield from _provider_problems(facts, config)
    if on_gpus and facts.kernels is not None and (config is None or needs_kernels(config)):
        yield from _kernel_problems(facts)
    if config is not None and directory is not None:
        yield from _input_problems(facts, site, config, directory)


def needs_kernels(config: RunConfig) -> bool:
    """Return whether the run uses the prebuilt GPU kernels. `auto` uses them, and fails without them unless
    `ops.allow_fallback` is set.
    """
    wanted = {getattr(config.ops, group) for group in _op_groups(config)}
    automatic = "auto" in wanted and not config.ops.allow_fallback and config.precision.dtype != "fp64"
    return automatic or "triton" in wanted


def _op_groups(config: RunConfig) -> list[str]:
    """Return the keys of OpsConfig that select a back-end."""
    others = {"attention_table", "allow_fallback", "deterministic", "no_jit"}
    return [name for name in type(config.ops).model_fields if name not in others]


def _torch_problems(facts: Installation, site: Site, device: Device, on_gpus: bool) -> Iterator[Problem]:
    torch = facts.torch
    install = (
        f"activate the environment that has the site's torch, or install torch ({INSTALL_PAGE}), or export "
        f"FRONTIER_LLM_PYTHON"
    )
    if torch.error:
        yield Problem("torch", f"{facts.executable} cannot import torch: {torch.error}", install)
        return
    numbers = tuple(int(number) for number in re.findall(r"\d+", torch.version)[:2])
    if numbers < OLDEST_TORCH:
        yield Problem(
            "torch",
            f"{facts.executable} has torch {torch.version}; at least {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} is needed",
            install,
        )
    if on_gpus and torch.vendor != device.vendor:
        what = f"{facts.executable} has {torch.describe()}, but {site.name} has {device.vendor} GPUs ({device.name})"
        yield Problem("torch", what, f"{install}; to train on CPUs instead, set train.device=cpu")


def _library_problems(facts: Installation) -> Iterator[Problem]:
    """Yield the problems of libraries. Libraries with the same fault are grouped."""
    found: dict[str, list[str]] = {}
    for name, error in facts.libraries.items():
        if error:
            found.setdefault(error.replace(name, "").strip(), []).append(name)
    for error, names in found.items():
        yield Problem(
            f"{facts.package}/_native", f"{', '.join(names)} {error}", f"run with {facts.executable}: {BUILD_COMMAND}"
        )


def _provider_problems(facts: Installation, config: RunConfig) -> Iterator[Problem]:
    for group in _op_groups(config):
        wanted = getattr(config.ops, group)
        if error := facts.providers.get(wanted, ""):
            yield Problem(f"ops.{group}={wanted}", error, f"install it for {facts.executable}, or set ops.{group}=auto")


def _kernel_problems(facts: Installation) -> Iterator[Problem]:
    assert facts.kernels is not None
    others = [name for name in facts.kernels.built if name != facts.kernels.architecture]
    for problem in facts.kernels.problems:
        beside = f"; only those for {', '.join(others)} are built" if others and not facts.kernels.digest else ""
        yield Problem(problem.where, problem.what + beside, problem.fix)


def _input_problems(facts: Installation, site: Site, config: RunConfig, directory: Path) -> Iterator[Problem]:
    if site.run_roots and not any(directory.is_relative_to(Path(root).resolve()) for root in site.run_roots):
        what = f"{directory} is not on {' or '.join(site.run_roots)}, where {site.name} requires jobs to write"
        yield Problem("train.run_dir", what, f"set train.run_dir={_example(site)}")
    if facts.inputs is None:
        return
    yield from facts.inputs.problems
    if facts.inputs.run_dir_error:
        yield Problem(
            "train.run_dir",
            f"cannot be written: {facts.inputs.run_dir_error}",
            "free space there, or choose another train.run_dir",
        )
    else:
        yield from space_problems(config, FreeSpace(facts.inputs.run_dir_free_bytes))


def _example(site: Site) -> str:
    return f"{site.scratch or site.run_roots[0]}/runs/NAME"
