"""frontier-llm submit RUN --site SITE --nodes N [key=value …]: check a run, copy the code, and queue one job."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import JSON, RESUME, command, option, positive, positive_amount, run_options, show
from frontier_llm.cli.at_site import RUN_JOB, job_request, load_current
from frontier_llm.errors import ConfigError, Problem, suggest
from frontier_llm.run.job import EXAMINED_NODES

if TYPE_CHECKING:
    from frontier_llm.certificate.certificate import Certificate
    from frontier_llm.cluster.sites import Site
    from frontier_llm.cluster.submit import JobRequest, Submission
    from frontier_llm.config import RunConfig


@command(
    *run_options(),
    option(
        "--site",
        required=True,
        help="a site (frontier-llm list sites), or the path of a site file",
    ),
    option(
        "--nodes",
        type=positive,
        required=True,
        metavar="N",
        help="nodes that compute",
    ),
    *RUN_JOB,
    option("--qos", metavar="NAME", help="e.g. debug"),
    option(
        "--compare-nodes",
        type=positive,
        action="append",
        default=[],
        metavar="N",
        help="also show the number of jobs, days and node-hours of the same run on N nodes (may be repeated)",
    ),
    option(
        "--continue-with",
        choices=("requeue", "successor", "never"),
        help="after an unfinished slice: the same job again, a new one, or nothing (default: requeue; never if the "
        "run saves nothing)",
    ),
    option(
        "--failed-start-node-hours",
        type=positive_amount,
        metavar="H",
        help="give up when starts in a row without a step have used so many node-hours (default: 3 hours of all nodes)",
    ),
    option(
        "--preflight",
        action="store_true",
        help=f"`doctor` on every node before the first start (default: from {EXAMINED_NODES} nodes on)",
    ),
    option("--no-preflight", action="store_true", help="start without `doctor` on any number of nodes"),
    option(
        "--fallback-plan",
        action="store_true",
        help="also check a layout that needs less memory; if the run is out of memory, it continues once with that "
        "layout, with the same batch, samples and steps",
    ),
    option("--dependency", metavar="TYPE:JOB", help="as sbatch's"),
    option("--exclude", metavar="HOSTS", help="hosts to avoid, e.g. n[3,7-8]"),
    option(
        "--sbatch",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further option of sbatch for every job of the run, e.g. mail-type=END (may be repeated)",
    ),
    option(
        "--notice-command",
        metavar="PROGRAM",
        help="program to run on the batch host at the end, and if the run gives up, rewinds, has a straggler or loses "
        "a node; it receives event and text as arguments",
    ),
    option(
        "--webhook-file",
        metavar="PATH",
        help="file of mode 0600 with the address that receives these events as JSON (or export FRONTIER_LLM_WEBHOOK)",
    ),
    *RESUME,
    option(
        "--force",
        action="append",
        default=[],
        metavar="SECTION",
        help="submit although this section of the certificate is not checkable here; recorded in job.json (may be "
        "repeated)",
    ),
    option(
        "--dry-run",
        action="store_true",
        help="show the script, the command and the problems that would refuse the job; write and queue nothing",
    ),
    JSON,
    about="Queue a run. The job saves before its walltime and continues by itself until its last step, a file STOP "
    "in the run "
    "directory, or three attempts without progress; a file SAVE there makes a checkpoint in between. Hosts that "
    "failed before are excluded.",
    examples=(
        "frontier-llm submit train_small --site lumi --nodes 1 -A project_465 --dry-run",
        "frontier-llm submit pretrain_1t data.train=TOKENS --site frontier --nodes 384",
    ),
)
def submit(args: argparse.Namespace) -> int:
    """Return exit code 0 if the job is queued, or if a dry run finds no problem.

    1 if something is not installed or cannot be checked.
    """
    from frontier_llm import log
    from frontier_llm.certificate.certificate import certify, of_submit
    from frontier_llm.certificate.memory import describe_fallback, with_fallback
    from frontier_llm.certificate.subject import of_job
    from frontier_llm.cluster import submit as slurm
    from frontier_llm.cluster.admission import advice, cost_of
    from frontier_llm.cluster.sites import load_site

    site = load_site(args.site)

    def load(words: Sequence[str]) -> RunConfig:
        return load_current(args.run, [f"machine={site.machine}", *args.overrides, *words])

    request = _admitted(args, site, load(()))
    requests = [request]
    if args.fallback_plan:
        request, fallback, roomier = with_fallback(request, load)
        requests = [request, fallback]
        log.info(describe_fallback(of_job(request).fullest_plan, roomier))
    submission = slurm.prepare(request)
    certificates = [certify(of_job(each), of_submit()) for each in requests]
    _log_certificates(certificates, in_full=args.dry_run)
    if not args.dry_run:
        for certificate in certificates:
            _refuse(certificate, args.force)
        submission = slurm.queue_checked(request, submission)
    log.info(slurm.describe(request, submission))
    log.info(cost_of(request).describe(request.job.max_node_hours))
    for note in advice(request):
        log.warn(note)
    if args.dry_run:
        return _show_dry_run(args, submission, certificates)
    show(args, submission.as_dict(), lambda: str(submission.job_id))
    return 0


def _admitted(args: argparse.Namespace, site: Site, config: RunConfig) -> JobRequest:
    """Return the job that the arguments describe, after the checks of the site. Raises ConfigError."""
    from frontier_llm import log
    from frontier_llm.cluster.admission import admit, compare_nodes
    from frontier_llm.cluster.notices import webhook_address
    from frontier_llm.run import hostlist

    of_job_record = {
        "flags": _resume_flags(args),
        "failed_start_node_hours": args.failed_start_node_hours,
        "sbatch": tuple(args.sbatch),
        "notice_command": tuple(shlex.split(args.notice_command or "")),
        "webhook_file": str(Path(args.webhook_file).resolve()) if args.webhook_file else "",
        "preflight": _examines(args),
        "forced": _sections(args.force),
    }
    request = job_request(
        args,
        site,
        config,
        continuation=args.continue_with,
        of_job=of_job_record,
        qos=args.qos,
        dependency=args.dependency,
        exclude=hostlist.expand(args.exclude or ""),
    )
    webhook_address(request.job)  # raises an error for an unusable webhook file before anything is queued
    request = admit(request)
    if args.compare_nodes:
        log.info(compare_nodes(request, args.compare_nodes))
    return _before_maintenance(request, chosen=args.continue_with is not None)


def _log_certificates(certificates: Sequence[Certificate], in_full: bool) -> None:
    """Log the verdicts of the run's plan and, if there is one, of its roomier plan."""
    from frontier_llm import log
    from frontier_llm.certificate.page import as_text, summary

    for name, certificate in zip(("certificate", "certificate of the roomier plan"), certificates, strict=False):
        details = f"\n{as_text(certificate)}" if in_full else ""
        log.info(f"{name}: {summary(certificate)}{details}")


def _show_dry_run(args: argparse.Namespace, submission: Submission, certificates: Sequence[Certificate]) -> int:
    """Print the script and what would refuse the job. Return the exit code."""
    from frontier_llm import log

    certificate = certificates[0]
    for section in certificate.not_checkable:
        log.warn(f"section {section.name} is not checkable here: {section.why}")
    problems = list(dict.fromkeys(problem for each in certificates for problem in each.problems))
    for problem in problems:
        log.warn(f"submit would refuse this job: {problem}")
    content = {
        **submission.as_dict(),
        "problems": [asdict(problem) for problem in problems],
        "open_points": [f"{section.name}: {section.why}" for section in certificate.not_checkable],
        "is_checkable": not certificate.not_checkable,
        "certificate": certificate.as_dict(),
        "fallback_certificate": certificates[1].as_dict() if args.fallback_plan else None,
    }
    show(args, content, lambda: submission.script)
    return 1 if problems else 0


def _sections(names: Sequence[str]) -> tuple[str, ...]:
    from frontier_llm.certificate.certificate import NAMES

    for name in names:
        if name not in NAMES:
            raise ConfigError(f"{name!r} is not a section of the certificate", suggest(name, NAMES), "--force")
    return tuple(names)


def _refuse(certificate: Certificate, forced: Sequence[str]) -> None:
    """Raise NotReadyError if a section of the certificate is refused. Raise it also if a section cannot be checked here
    and the user did not force it.
    """
    from frontier_llm.cluster.readiness import NotReadyError

    problems = list(certificate.problems)
    for section in certificate.not_checkable:
        if section.name not in forced:
            fix = (
                f"run submit on a login node of the site; --dry-run shows the script here, and --force {section.name} "
                f"submits without this section"
            )
            problems.append(Problem(f"section {section.name}", f"not checkable here: {section.why}", fix))
    if problems:
        raise NotReadyError(problems)


def _examines(args: argparse.Namespace) -> bool:
    """Return True if the job checks its nodes before the first start."""
    from frontier_llm.run.rank_env import environ

    if args.no_preflight:
        return False
    is_large = args.nodes + args.spares >= EXAMINED_NODES
    return args.preflight or is_large or environ("FRONTIER_LLM_PREFLIGHT") == "1"


def _before_maintenance(request: JobRequest, *, chosen: bool) -> JobRequest:
    """Return the request with a first job that ends before the site's next maintenance.

    `chosen`: the user has chosen the continuation. Otherwise a successor follows, because a requeued job would keep the
    short walltime.
    """
    from frontier_llm import log
    from frontier_llm.cluster import slurm
    from frontier_llm.cluster.sites import format_walltime
    from frontier_llm.cluster.submit import before_maintenance

    now_unix_s = time.time()
    partition = request.partition or request.site.default_partition
    maintenance = slurm.next_maintenance(now_unix_s, request.job.all_nodes, partition)
    shortened = before_maintenance(request, now_unix_s, maintenance)
    if maintenance is None or shortened.shortened_minutes is None:
        return request
    if shortened.job.continuation == "requeue" and not chosen:
        shortened = replace(shortened, job=replace(shortened.job, continuation="successor"))
    starts = time.strftime("%Y-%m-%d %H:%M", time.localtime(maintenance.starts_unix_s))
    log.warn(
        f"maintenance {maintenance.name} begins at {starts}: the first job gets "
        f"{format_walltime(shortened.shortened_minutes or 0)}, then {shortened.job.continuation}"
    )
    return shortened


def _resume_flags(args: argparse.Namespace) -> tuple[str, ...]:
    from frontier_llm.config.keys import check_allowable

    check_allowable(args.allow_change)
    flags = []
    if args.strict:
        flags.append("--strict")
    for key in args.allow_change:
        flags += ["--allow-change", key]
    return tuple(flags)
