"""Writes the changes that lead from ORNL's measured runs to the planner's predictions (`plan --explain`) as a table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from benchmarks.harness import MEASURED, parse_arguments, write_measured
from benchmarks.planner.scaling_tables import table_row
from frontier_llm.config import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.search import search
from frontier_llm.planner.steps import Steps, steps_of

PAGE = MEASURED / "planner.md"
# model, nodes, batch
CASES = (
    ("gpt-22b", 16, 1024),
    ("gpt-175b", 128, 10240),
    ("gpt-1t", 384, 9600),
)


def explained(models: Sequence[str]) -> dict[str, Steps]:
    """Return model → the changes from the best measured run of its size to the prediction on Frontier."""
    machine = load_machine("frontier")
    numbers = rates(machine)
    found = {}
    for model, nodes, batch in CASES:
        if model not in models:
            continue
        outcome = search(load_model(model), numbers, nodes, batch)
        steps = steps_of(outcome, machine, numbers)
        assert steps is not None
        found[model] = steps
    return found


def table(found: dict[str, Steps]) -> Iterator[str]:
    """Yield the table: a column of seconds for each model, and a row for each change.

    The model with most changes gives the order of the rows. A change that a model does not have has an empty cell.
    """
    models = found.values()
    changes = [_changes(steps) for steps in models]
    titles = max((list(column) for column in changes), key=len)
    for column in changes:
        titles += [title for title in column if title not in titles]
    titles.sort(key=lambda title: title.startswith("recompute"))  # recomputation is the last change of every model
    yield table_row("seconds", *found)
    yield "|---|" + "--:|" * len(found)
    yield table_row("measured", *(f"{steps.measured_s:.1f}" for steps in models))
    for title in titles:
        cells = []
        for column in changes:
            cell = f"{column[title]:+.1f}" if title in column else ""
            cells.append(cell)
        yield table_row(title, *cells)
    yield table_row("predicted", *(f"{steps.predicted_s:.1f}" for steps in models))


def _changes(steps: Steps) -> dict[str, float]:
    """Return the seconds of each change by its title."""
    changes = {}
    for step in steps.steps:
        title = _title(step.name)
        changes[title] = step.change_s
    return changes


def _title(name: str) -> str:
    """Return the name of a change without the values of one model."""
    before_layout = name.partition(":")[0]
    return before_layout.partition(" (")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [model for model, _, _ in CASES]
    parser.add_argument(
        "--models",
        nargs="+",
        choices=names,
        default=names,
        help="models of the table",
    )
    options = parse_arguments(parser, smoke=["--models", "gpt-22b"])
    text = "\n".join(table(explained(options.models)))
    write_measured(PAGE, __file__, f"\n{text}\n\n", options.smoke)


if __name__ == "__main__":
    main()
