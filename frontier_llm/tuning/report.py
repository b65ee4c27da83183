"""tune.html: predicted beside measured, the course of the search, what mattered; and the fastest layout as a run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from frontier_llm.config import load_run
from frontier_llm.config.load import available, merge, parse_overrides
from frontier_llm.errors import FrontierError
from frontier_llm.pages import COLORS, Chart, figures, line, points, table, text, tiles, write_page
from frontier_llm.planner.report import layout_words
from frontier_llm.topology import make_plan
from frontier_llm.tuning.constants import changed, fitted_constants
from frontier_llm.tuning.measure import fastest_first
from frontier_llm.tuning.search import Tuner
from frontier_llm.tuning.space import choices_of
from frontier_llm.tuning.trials import Trial
from frontier_llm.units import format_seconds

RUN_FILE_NAMES = {
    "tp": "tensor", "pp": "pipeline", "dp": "data", "sharding": "zero, data_mode", "chunks": "chunks", "schedule": "schedule",
    "micro_batch": "micro_batch", "sequence_parallel": "sequence_parallel", "recompute": "recompute", "axis_order": "axis_order",
}  # fmt: skip


def summary(search: Tuner) -> dict[str, Any]:
    """The result in one mapping."""
    tried, best = search.tried, search.best
    first = tried.get(0)
    failures = {
        status: count for status in {trial.status for trial in search.trials} if (count := _count(search, status)) and status != "ok"
    }
    return {
        "layouts": len(search.space.plans),
        "trials": len(search.trials),
        "node_hours": round(sum(trial.node_hours for trial in search.trials), 4),
        "failures": failures,
        "best": None if best is None else _words(search, best),
        "best_step_s": None if best is None else best.step_s,
        "best_predicted_s": None if best is None else best.predicted_s,
        "planner_step_s": first.step_s if first else None,
        "faster_than_planner": first.step_s / best.step_s - 1 if best and best.step_s and first and first.step_s else None,
        "importance": {RUN_FILE_NAMES[name]: round(share, 3) for name, share in search.surrogate.importance(search.belief()).items()},
    }


def _count(search: Tuner, status: str) -> int:
    return sum(trial.status == status for trial in search.trials)


def _words(search: Tuner, trial: Trial) -> str:
    number = search.space.index(trial.layout)
    return "a layout outside the space" if number is None else layout_words(search.space.plans[number])


def write_best(path: Path, run: str, overrides: Sequence[str], search: Tuner) -> Path:
    """The run in its fastest layout as a run file, which is loaded and checked. Returns its path."""
    best = search.best
    assert best is not None and best.step_s is not None
    base = run if run in available("runs") else str(Path(run).resolve())
    content = merge({"base": base, **parse_overrides(overrides)}, choices_of(best.layout))
    head = (
        f"# {_words(search, best)}\n# measured: {best.step_s:.4g} s per step on {search.space.devices} devices, in trial {best.number} of "
        f"{len(search.trials)}; predicted {best.predicted_s:.4g} s\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=140), encoding="utf-8")
    make_plan(load_run(str(path)), search.space.devices)
    return path


def write_report(search: Tuner, directory: Path) -> Path:
    """Write tune.html; returns its path."""
    config, facts = search.space.config, summary(search)
    subtitle = (
        f"{search.space.devices} devices of {config.machine}, {config.batch.global_batch} sequences of {config.model.sequence_length} per step; "
        f"{facts['layouts']} layouts of {search.space.legal} that fit"
    )
    parts = [tiles(_tiles(facts)), figures(_charts(search)), _importance(facts["importance"]), _constants(search), _trials(search)]
    return write_page(directory / "tune.html", f"{config.model.name}: measured search", subtitle, parts)


def _tiles(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    boxes = [(str(facts["trials"]), "trials"), (f"{facts['node_hours']:.3g}", "node-hours")]
    if facts["best_step_s"]:
        boxes.insert(0, (format_seconds(facts["best_step_s"]), f"per step, measured: {facts['best']}"))
        boxes.append((format_seconds(facts["best_predicted_s"]), "predicted for that layout"))
    if facts["faster_than_planner"] is not None:
        boxes.append((f"{100 * facts['faster_than_planner']:.1f} %", "faster than the planner's choice, measured"))
    return boxes


def _importance(shares: Mapping[str, float]) -> str:
    rows = [(name, f"{100 * share:.0f} %") for name, share in shares.items()]
    note = (
        "Share of the variance of the expected log step time, over the whole space, that a choice's values alone explain. "
        "Choices that come together (tensor, pipeline, data) share theirs."
    )
    return f"<h2>What mattered</h2>{table(('choice', 'share'), rows)}<p class=sub>{note}</p>" if rows else ""


def _constants(search: Tuner) -> str:
    """Which constants of the machine file the trials would change."""
    if sum(trial.ok for trial in search.tried.values()) < 4:
        return ""
    try:
        moved = changed(*fitted_constants(search))
    except FrontierError as error:
        return f"<p class=sub>{text(str(error))}</p>"
    rows = [(name, f"{old:.4g}", f"{new:.4g}", f"x {new / old:.2f}") for name, (old, new) in moved.items()]
    title = f"<h2>Constants of {text(search.space.config.machine)} that the trials change</h2>"
    note = "<p class=sub>Fitted to all trials at once, held to the machine file's values where these cannot tell; --emit-machine writes them.</p>"
    return title + (table(("constant", "machine file", "fitted", "factor"), rows) if rows else "<p>None by more than 10 %.</p>") + note


def _trials(search: Tuner) -> str:
    head = ("trial", "chosen by", "layout", "predicted", "measured", "steps", "outcome", "node-hours")
    rows = [
        (
            trial.number,
            trial.why,
            _words(search, trial),
            format_seconds(trial.predicted_s),
            format_seconds(trial.step_s) if trial.step_s else "–",
            trial.steps,
            f"{trial.status} {trial.detail[:100]}".strip(),
            f"{trial.node_hours:.3g}",
        )
        for trial in fastest_first(search.trials)
    ]
    return f"<h2>Trials, fastest first</h2>{table(head, rows)}"


def _charts(search: Tuner) -> list[Chart]:
    """Predicted against measured, the course of the search, what mattered."""
    done = [trial for trial in search.tried.values() if trial.ok]
    both = [value for trial in done for value in (trial.predicted_s, trial.step_s or 0.0)]
    scatter = []
    for index, why in enumerate(dict.fromkeys(trial.why for trial in done)):
        mine = [trial for trial in done if trial.why == why]
        names = [_words(search, trial) for trial in mine]
        scatter.append(points(why, [trial.predicted_s for trial in mine], [trial.step_s for trial in mine], index, hover=names))
    if both:
        scatter.append(line("as predicted", [min(both), max(both)], [min(both), max(both)], 7))
    measured = [(trial.number, trial.step_s, _words(search, trial)) for trial in search.trials if trial.ok and trial.step_s]
    numbers, times, labels = zip(*measured, strict=True) if measured else ((), (), ())
    course = [points("measured", numbers, times, 0, hover=labels)]
    if measured:
        course.append({**line("fastest so far", numbers, np.minimum.accumulate(times), 1), "line": {"shape": "hv", "color": COLORS[1]}})
        failed = [trial for trial in search.trials if not trial.ok]
        course.append(
            points(
                "no measurement",
                [trial.number for trial in failed],
                [min(times)] * len(failed),
                3,
                shape="x",
                hover=[trial.status for trial in failed],
            )
        )
    shares = search.surrogate.importance(search.belief())
    bars = {"type": "bar", "orientation": "h", "marker": {"color": COLORS[0]}, "x": [100 * share for share in shares.values()]}
    rising = {"yaxis": {"autorange": "reversed"}}
    return [
        Chart("Predicted and measured", "predicted step, s", "measured step, s", scatter, log_y=True, layout={"xaxis": {"type": "log"}}),
        Chart("Course of the search", "trial", "measured step, s", course),
        Chart(
            "What mattered",
            "% of the variance that the choice alone explains",
            "",
            [{**bars, "y": [RUN_FILE_NAMES[name] for name in shares]}],
            layout=rising,
        ),
    ]
