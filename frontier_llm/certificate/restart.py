"""Section "restart": checks the cost of a failure, the first save, and the disk space for this save."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from frontier_llm.blueprint.optimizers import state_bytes
from frontier_llm.certificate.section import CertificateSection, judged
from frontier_llm.certificate.subject import Subject
from frontier_llm.checkpoint.remote_writer import taken, taken_by, this_writer
from frontier_llm.cluster.admission import quota_note, saving_problems
from frontier_llm.cluster.disk import free_space, run_dir_problems, space_problems
from frontier_llm.cluster.sites import format_walltime
from frontier_llm.cluster.submit import JobRequest
from frontier_llm.config import RunConfig, saves_nothing
from frontier_llm.config.urls import packages_of
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.errors import FrontierError, Problem, not_installed
from frontier_llm.planner.predict import planned_saves
from frontier_llm.run.uploads import read_uploads
from frontier_llm.units import format_bytes, format_hours, format_seconds, plural

NAME = "restart"


def check_restart(subject: Subject) -> CertificateSection:
    """Refuse a run whose work would be lost: without saves, without time or without space for them."""
    request = subject.request
    checkpoints = subject.directory / "checkpoints"  # may be a link to another file system
    evidence = list(_save_evidence(subject))
    problems: list[Problem] = []
    if request is not None:
        evidence += _job_evidence(request)
        problems += saving_problems(request)
    if subject.elsewhere:
        evidence.append(f"free space was not measured: {subject.elsewhere}")
    else:
        evidence.append(f"{format_bytes(free_space(checkpoints).bytes)} are free for {checkpoints}")
        remote = remote_problems(subject.config)
        problems += remote
        if subject.config.train.remote is not None and not remote:
            evidence.append(f"checkpoints are uploaded to {subject.config.train.remote}, where a test file was written")
    if request is None:  # at a site, the section "installation" checks the directory and its space
        problems += run_dir_problems(subject.directory)
        problems += space_problems(subject.config, free_space(checkpoints), subject.world_size)
    return judged(NAME, evidence, problems)


def _save_evidence(subject: Subject) -> Iterator[str]:
    config = subject.config
    train = config.train
    step_s = subject.cost.step_s
    if saves_nothing(train):
        lost_s = train.steps * step_s
        yield f"nothing is saved: a failure costs up to {plural(train.steps, 'step')}, {format_seconds(lost_s)}"
        return
    first = min(train.save_interval or train.steps, train.steps)
    campaign = planned_saves(config, subject.world_size)
    save_s = 0.0 if campaign is None else campaign.save_s
    lost_s = first * step_s + save_s
    start_s = subject.cost.start_s
    lost_node_hours = (lost_s + start_s) / 3600 * subject.cost.nodes
    yield (
        f"a failure costs at most {plural(first, 'step')}, {format_seconds(lost_s)}, and {format_seconds(start_s)} to "
        f"start again (assumed): {format_hours(lost_node_hours)} node-hours"
    )
    one_bytes = state_bytes(config.model, config.optimizer.name, config.precision.dtype)
    written = f" and takes about {format_seconds(save_s)} (estimated)" if campaign else ""
    yield (
        f"the first save, after step {first} ({format_seconds(first * step_s)} of training), has "
        f"{format_bytes(one_bytes)}{written}"
    )
    if campaign is not None:
        yield (
            f"a failure is expected every {campaign.mtbf_hours:.1f} h on these nodes (estimated); the best interval is "
            f"{plural(campaign.interval_steps, 'step')} (Young/Daly)"
        )


def _job_evidence(request: JobRequest) -> Iterator[str]:
    job = request.job
    then = "the run ends" if job.continuation == "never" else f"the run continues by {job.continuation}"
    if job.spares:
        yield f"{plural(job.spares, 'spare node')}: a lost node is replaced within the job"
    else:
        yield f"no spare nodes: if a node is lost, the job ends, and {then}"
    if request.slice_minutes is not None:
        yield (
            f"a job runs {format_walltime(request.slice_minutes)}; ranks are warned to save "
            f"{format_seconds(job.warning_s)} before its end, then {then}"
        )
    one_bytes = state_bytes(request.config.model, request.config.optimizer.name, request.config.precision.dtype)
    if note := quota_note(request, one_bytes):
        yield note


def package_problems(config: RunConfig) -> list[Problem]:
    """Return a problem for each package that `train.remote` needs and that is not installed."""
    if config.train.remote is None:
        return []
    missing = [package for package in packages_of(config.train.remote) if find_spec(package) is None]
    return [not_installed(package, "train.remote") for package in missing]


def remote_problems(config: RunConfig) -> list[Problem]:
    """Return a problem if the run could not upload to `train.remote`. Writes and deletes a small file there."""
    url = config.train.remote
    if url is None:
        return []
    if problems := package_problems(config):
        return problems
    run_dir = Path(config.train.run_dir)
    try:
        place = RemoteFolder(url)
        place.check_writable()
        record = read_uploads(run_dir)
        mine = this_writer(record.writer if record else "", run_dir)
        other = taken_by(place, mine)
    except FrontierError as error:
        return list(error.problems)
    return [] if other is None else list(taken(place, other, mine).problems)
