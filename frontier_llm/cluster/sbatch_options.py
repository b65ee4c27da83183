"""Options of sbatch that a user adds to every job of a run: `submit --sbatch KEY=VALUE`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from frontier_llm.errors import Problem

OWN_FLAGS = {
    "account": "-A",
    "dependency": "--dependency",
    "exclude": "--exclude",
    "nodes": "--nodes and --spares",
    "partition": "-p",
    "qos": "--qos",
    "time": "--time",
}
# options that a user may not set, because the supervisor relies on their values
OWNED = (
    "array",
    "chdir",
    "clusters",
    "cpus-per-task",
    "error",
    "export",
    "export-file",
    "gpus-per-node",
    "job-name",
    "no-kill",
    "no-requeue",
    "nodefile",
    "nodelist",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "parsable",
    "requeue",
    "signal",
    "test-only",
    "wait",
    "wrap",
)


def option_problems(words: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each word that is not KEY=VALUE or whose option belongs to the framework."""
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[a-z][a-z0-9-]+", key) or not value.isprintable() or not value:
            yield Problem("--sbatch", f"{word!r} is not KEY=VALUE", "e.g. --sbatch mail-type=END, without dashes")
            continue
        # sbatch also accepts the beginning of a name
        flag = next((flag for name, flag in OWN_FLAGS.items() if name.startswith(key)), "")
        owned = next((name for name in OWNED if name.startswith(key)), "")
        if flag:
            yield Problem("--sbatch", f"{key} has a flag of submit", f"use {flag}")
        elif owned:
            yield Problem("--sbatch", f"{owned} is set by the framework, and its jobs rely on it", "leave it out")


def as_options(words: Sequence[str]) -> dict[str, str]:
    """Return name -> value. If several words set an option, the last is used."""
    return {key: value for key, _, value in (word.partition("=") for word in words)}
