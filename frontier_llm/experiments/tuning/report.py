"""Report of a tuning search (tune.html) and the run file of its fastest layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from frontier_llm.blueprint.layout import FIELD_OF_KEY, run_keys
from frontier_llm.config.load import merge, parse_overrides
from frontier_llm.errors import FrontierError
from frontier_llm.experiments.tuning.constants import changed, fitted_constants
from frontier_llm.experiments.tuning.measure import fastest_first
from frontier_llm.experiments.tuning.search import Tuner
from frontier_llm.experiments.tuning.trials import Trial
from frontier_llm.pages import COLORS, Chart, figures, line, points, table, text, tiles, write_page
from frontier_llm.planner.emit import reference, write_run
from frontier_llm.planner.report import layout_words
from frontier_llm.units import format_seconds

LEAST_FITTED = 4  # trials that are needed before constants are fitted


def summary(search: Tuner) -> dict[str, Any]:
    """Return the result of the search as a mapping."""
    tried = search.tried
    best = search.best
    first = tried.get(0)
    planner_step_s = first.step_s if first else None
    best_step_s = best.step_s if best else None
    shares = search.surrogate.importance(search.belief())
    return {
        "layouts": len(search.space.plans),
        "trials": len(search.trials),
        "node_hours": round(sum(trial.node_hours for trial in search.trials), 4),
        "failures": dict(Counter(trial.status for trial in search.trials if trial.status != "ok")),
        "best": None if best is None else _words(search, best),
        "best_step_s": best_step_s,
        "best_predicted_s": None if best is None else best.predicted_s,
        "planner_step_s": planner_step_s,
        "faster_than_planner": planner_step_s / best_step_s - 1 if planner_step_s and best_step_s else None,
        "importance": {_keys_of(name): round(share, 3) for name, share in shares.items()},
    }


def _keys_of(choice: str) -> str:
    """Return the keys of a run file that set a field of the layout: 'tensor', 'data_mode, zero'."""
    return ", ".join(key for key, field in FIELD_OF_KEY.items() if field == choice)


def _words(search: Tuner, trial: Trial) -> str:
    number = search.space.index(trial.layout)
    return "a layout outside the space" if number is None else layout_words(search.space.plans[number])


def write_best(path: Path, run: str, overrides: Sequence[str], search: Tuner) -> Path:
    """Write a run file with the fastest layout, and load this file as a check. Returns the path of the file."""
    best = search.best
    assert best is not None and best.step_s is not None
    content = merge({"base": reference(run, path.parent), **parse_overrides(overrides)}, run_keys(best.layout))
    head = (
        _words(search, best),
        f"measured: {best.step_s:.4g} s per step on {search.space.devices} devices, in trial {best.number} of "
        f"{len(search.trials)}; "
        f"predicted {best.predicted_s:.4g} s",
    )
    write_run(path, head, content, search.space.devices)
    return path


def write_report(search: Tuner, directory: Path) -> Path:
    """Write tune.html. Returns its path."""
    config = search.space.config
    facts = summary(search)
    subtitle = (
        f"{search.space.devices} devices of {config.machine}, {config.batch.global_batch} sequences of "
        f"{config.model.sequence_length} per step; "
        f"{facts['layouts']} of {search.space.legal} layouts that fit are searched."
    )
    parts = [_tiles(facts), f"<h2>Search</h2>{figures(charts(search))}"]
    parts += [_importance(facts["importance"]), _constants(search), _trials(search)]
    return write_page(directory / "tune.html", f"{config.model.name}: measured search", subtitle, parts)


def _tiles(facts: Mapping[str, Any]) -> str:
    numbers = [(str(facts["trials"]), "trials"), (f"{facts['node_hours']:.3g}", "node-hours")]
    if facts["best_step_s"]:
        numbers.insert(0, (format_seconds(facts["best_step_s"]), f"per step, measured: {facts['best']}"))
        numbers.append((format_seconds(facts["best_predicted_s"]), "predicted for that layout"))
    if facts["faster_than_planner"] is not None:
        numbers.append((f"{100 * facts['faster_than_planner']:.1f} %", "faster than the planner's choice, measured"))
    return tiles(numbers)


def _importance(shares: Mapping[str, float]) -> str:
    rows = [(name, f"{100 * share:.0f} %") for name, share in shares.items()]
    note = (
        "Share of the variance of the expected log step time, over all layouts, that the values of this choice alone "
        "explain. Choices that depend on each other (tensor, pipeline, data) share the same variance."
    )
    return f"<h2>What mattered</h2>{table(('choice', 'share'), rows)}<p class=sub>{note}</p>" if rows else ""


def _constants(search: Tuner) -> str:
    """Return HTML with the constants of the machine file whose values a fit to the trials would change."""
    if sum(trial.ok for trial in search.tried.values()) < LEAST_FITTED:
        return ""
    try:
        moved = changed(*fitted_constants(search))
    except FrontierError as error:
        return f"<p class=sub>{text(error)}</p>"
    rows = [(name, f"{old:.4g}", f"{new:.4g}", f"x {new / old:.2f}") for name, (old, new) in moved.items()]
    title = f"<h2>Constants of {text(search.space.config.machine)} that the trials change</h2>"
    note = (
        "<p class=sub>Fitted to all trials together. A constant that the trials do not determine keeps the value of "
        "the machine file. --emit-machine writes a machine file with the fitted values.</p>"
    )
    found = (
        table(("constant", "machine file", "fitted", "factor"), rows)
        if rows
        else "<p>No constant changes by more than 10 %.</p>"
    )
    return title + found + note


def _trials(search: Tuner) -> str:
    head = ("trial", "chosen by", "layout", "predicted", "measured", "steps", "node-hours", "outcome")
    trials = fastest_first(search.trials)
    rows = [
        (
            trial.number,
            trial.why,
            _words(search, trial),
            format_seconds(trial.predicted_s),
            format_seconds(trial.step_s) if trial.step_s else "–",
            trial.steps,
            f"{trial.node_hours:.3g}",
            f"{trial.status} {trial.detail[:100]}".strip(),
        )
        for trial in trials
    ]
    return f"<h2>Trials, fastest first</h2>{table(head, rows, ['' if trial.ok else 'bad' for trial in trials])}"


def charts(search: Tuner) -> Iterator[Chart]:
    """Yield charts of predicted against measured steps, and of the progress of the search."""
    done = [trial for trial in search.tried.values() if trial.ok]
    if not done:
        return
    both = [value for trial in done for value in (trial.predicted_s, trial.step_s or 0.0)]
    traces = [line("as predicted", [min(both), max(both)], [min(both), max(both)], 7, dash="dash")]
    for index, why in enumerate(dict.fromkeys(trial.why for trial in done)):
        mine = [trial for trial in done if trial.why == why]
        names = [_words(search, trial) for trial in mine]
        traces.append(
            points(why, [trial.predicted_s for trial in mine], [trial.step_s for trial in mine], index, hover=names)
        )
    yield Chart("Predicted and measured", "predicted step, s", "measured step, s", traces, height_px=380)
    numbers = [trial.number for trial in done]
    best = np.minimum.accumulate([trial.step_s or 0.0 for trial in done]).tolist()
    course: list[dict[str, Any]] = [
        points("trial", numbers, [trial.step_s for trial in done], 0, hover=[_words(search, trial) for trial in done]),
        {**line("fastest so far", numbers, best, 1), "line": {"shape": "hv", "color": COLORS[1]}},
    ]
    if failed := [trial for trial in search.trials if not trial.ok]:
        course.append(
            points(
                "no measurement",
                [trial.number for trial in failed],
                [min(best)] * len(failed),
                3,
                shape="x",
                hover=[t.status for t in failed],
            )
        )
    yield Chart("Course of the search", "trial", "measured step, s", course, height_px=380)
