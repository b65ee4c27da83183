"""frontier-llm check RUN [--site SITE --nodes N] [key=value …]: check a run before it is queued, and print one
certificate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import ALLOW_CHANGE, JSON, command, option, positive, run_options, show
from frontier_llm.cli.at_site import RUN_JOB, job_request, load_current
from frontier_llm.errors import ConfigError

if TYPE_CHECKING:
    from frontier_llm.certificate.subject import Subject
    from frontier_llm.config import RunConfig


@command(
    *run_options(),
    option("--site", help="frontier, lumi, generic, local, or the path of a site file (default: this computer)"),
    option("--nodes", type=positive, metavar="N", help="nodes that compute; with --site"),
    *RUN_JOB,
    ALLOW_CHANGE,
    JSON,
    option("--html", type=Path, metavar="FILE", help="also write the certificate as one self-contained HTML page"),
    about="Check a run before it is queued and print one certificate: installation, configuration and data, "
    "communication, types of values on mesh axes, restart, memory and cost. Nothing is queued.",
    examples=(
        "frontier-llm check train_small",
        "frontier-llm check train_1t --site frontier --nodes 384 -A ABC123",
    ),
)
def check(args: argparse.Namespace) -> int:
    """Return exit code 0 if no section is refused, 1 otherwise. The output lists the sections of the certificate that
    cannot be checked on this computer.
    """
    from frontier_llm import log
    from frontier_llm.certificate.certificate import certify
    from frontier_llm.certificate.page import as_text, write_html

    certificate = certify(subject_of(args))
    show(args, certificate.as_dict(), lambda: as_text(certificate))
    if args.html:
        log.info(f"wrote {write_html(certificate, args.html)}")
    return 1 if certificate.refused else 0


def subject_of(args: argparse.Namespace) -> Subject:
    """Return the run that the arguments name. If they name a site, the result includes the job."""
    from frontier_llm.certificate.subject import of_job
    from frontier_llm.cli.ranks import local_world_size
    from frontier_llm.cluster.admission import with_prediction
    from frontier_llm.cluster.sites import load_site
    from frontier_llm.config.keys import check_allowable

    check_allowable(args.allow_change)
    if args.site is None and args.nodes is not None:
        raise ConfigError("needs the site of the nodes", "add --site NAME, e.g. --site frontier", "--nodes")
    if args.site is None:
        config = load_current(args.run, args.overrides)
        return on_this_computer(config, local_world_size(config), args.allow_change)
    if args.nodes is None:
        raise ConfigError("needs a number of nodes", "add --nodes N", "--site")
    site = load_site(args.site)
    config = load_current(args.run, [f"machine={site.machine}", *args.overrides])
    return of_job(with_prediction(job_request(args, site, config)))


def on_this_computer(config: RunConfig, world_size: int, allowed_changes: Sequence[str]) -> Subject:
    """Return a run on ranks of this computer. The keys in `allowed_changes` may differ from the checkpoint's."""
    from frontier_llm.certificate.subject import Subject
    from frontier_llm.data.position import START
    from frontier_llm.data.recorded import recorded_position

    return Subject(
        config=config,
        world_size=world_size,
        position=recorded_position(Path(config.train.run_dir)) or START,
        allowed_changes=tuple(allowed_changes),
    )
