"""The URL `train.remote`: its packages, whether it can be written, and whether another run writes there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from frontier_llm.checkpoint.remote_writer import taken, taken_by, this_writer
from frontier_llm.config import RunConfig
from frontier_llm.config.urls import packages_of
from frontier_llm.data.remote_folder import RemoteFolder
from frontier_llm.errors import FrontierError, Problem, not_installed
from frontier_llm.run.uploads import read_uploads


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
