"""frontier-llm list models|machines|runs|schedules|sites|tasks: the names that other commands accept."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from frontier_llm.cli.arguments import JSON, command, option, show
from frontier_llm.tables import aligned


def _shipped(kind: str) -> dict[str, str]:
    """Return the names of the shipped files of a kind, each with its first comment."""
    from frontier_llm.config import available
    from frontier_llm.config.load import about_file
    from frontier_llm.config.places import configs_dir

    return {name: about_file(configs_dir() / kind / f"{name}.yaml") for name in available(kind)}


def _machines() -> dict[str, str]:
    from frontier_llm.config import available
    from frontier_llm.config.load import read_yaml
    from frontier_llm.config.places import configs_dir

    folder = configs_dir() / "machines"
    return {name: str(read_yaml(folder / f"{name}.yaml")["title"]) for name in available("machines")}


def _sites() -> dict[str, str]:
    from frontier_llm.cluster.sites import site_file, site_names
    from frontier_llm.config.load import about_file

    return {name: about_file(site_file(name)) for name in site_names()}


def _schedules() -> dict[str, str]:
    from frontier_llm import schedule

    return {name: schedule.rule(name).about for name in schedule.names()}


def _tasks() -> dict[str, str]:
    from frontier_llm.inference.task_prompts import LM_EVAL

    return {name: f"{task.source}, as JSONL" for name, task in LM_EVAL.items()}


KINDS: Mapping[str, Callable[[], dict[str, str]]] = {
    "models": lambda: _shipped("models"),
    "machines": _machines,
    "runs": lambda: _shipped("runs"),
    "schedules": _schedules,
    "sites": _sites,
    "tasks": _tasks,
}
# kind → command that takes a name of that kind
USES = {
    "models": "frontier-llm plan NAME, or model: NAME in a run file",
    "machines": "frontier-llm plan MODEL --machine NAME, or machine: NAME in a run file",
    "runs": "frontier-llm train NAME, or base: NAME in a run file",
    "schedules": "parallel.schedule=NAME, or frontier-llm plan MODEL --fix schedule=NAME (docs/schedules.md)",
    "sites": "frontier-llm submit RUN --site NAME",
    "tasks": "frontier-llm evaluate CHECKPOINT --task NAME=FILE",
}


@command(
    option("kind", choices=tuple(KINDS), help="what to list"),
    JSON,
    about="List the names that other commands accept, with one line about each.",
    examples=("frontier-llm list models", "frontier-llm list machines --json"),
)
def list(args: argparse.Namespace) -> int:
    """Print the names of a kind."""
    rows = KINDS[args.kind]()
    content = [{"name": name, "about": about} for name, about in rows.items()]
    show(args, content, lambda: _text(args.kind, rows))
    return 0


def _text(kind: str, rows: Mapping[str, str]) -> str:
    table = aligned(("name", "about"), rows.items())
    return f"{table}\n\nuse: {USES[kind]}"
