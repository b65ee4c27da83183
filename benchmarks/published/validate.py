"""`plan --validate`: compares predictions with published measurements, by data set and separately for fitted and unseen
rows.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.published.datasets import FITTED, PublishedRun, read_stated, shipped
from benchmarks.published.predict import RowPrediction, predict
from frontier_llm.errors import DataError
from frontier_llm.tables import aligned
from frontier_llm.units import plural, strict_json


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a set of predictions. Percentages refer to seconds per step (equal to the inverse of tokens/s)."""

    dataset: str
    part: str  # fitted | unseen | left out
    n: int
    mape: float
    median: float
    p90: float
    bias: float
    pairs: int  # pairs of rows that differ only in their layout
    order: float | None  # share of pairs in the measured order, percent; None without pairs
    regret: float | None  # mean loss if the predicted best of a group is used, percent; None without groups
    false_no_fit: int  # runs that took place but that the planner would refuse


def score(dataset: str, part: str, predictions: Sequence[RowPrediction]) -> Accuracy:
    """Return the accuracy of one set."""
    errors = np.array([one.error for one in predictions])
    size = 100 * np.abs(errors)
    right = 0
    pairs = 0
    regrets = []
    for group in groups(predictions):
        for one, other in combinations(group, 2):
            pairs += 1
            right += (one.seconds - other.seconds) * (one.row.seconds - other.row.seconds) > 0
        chosen = min(group, key=lambda one: one.seconds)
        regrets.append(chosen.row.seconds / min(one.row.seconds for one in group) - 1)
    return Accuracy(
        dataset=dataset,
        part=part,
        n=len(predictions),
        mape=float(size.mean()),
        median=float(np.median(size)),
        p90=float(np.quantile(size, 0.9)),
        bias=float(100 * errors.mean()),
        pairs=pairs,
        order=100 * right / pairs if pairs else None,
        regret=100 * float(np.mean(regrets)) if regrets else None,
        false_no_fit=sum(not one.fits and not one.row.approximate for one in predictions),
    )


def groups(predictions: Iterable[RowPrediction]) -> list[list[RowPrediction]]:
    """Return groups of rows between which a user could choose: same cluster, model, sequence, devices and tokens per
    step.
    """
    groups: dict[tuple[object, ...], list[RowPrediction]] = {}
    for one in predictions:
        row = one.row
        model = one.row.model
        shape = model.layers, model.hidden, model.heads, model.sequence_length
        key = (row.machine, row.stack, *shape, row.layout.devices, row.layout.global_batch)
        groups.setdefault(key, []).append(one)
    return [group for group in groups.values() if len(group) > 1]


def score_all(predictions: Sequence[RowPrediction]) -> list[Accuracy]:
    """Return one accuracy per data set and part, in the order of the predictions."""
    scores = []
    for dataset in dict.fromkeys(one.row.dataset for one in predictions):
        mine = [one for one in predictions if one.row.dataset == dataset]
        for part, chosen in (("fitted", True), ("unseen", False)):
            group = [one for one in mine if is_fitted(one.row) == chosen]
            if group:
                scores.append(score(dataset, part, group))
    return scores


def is_fitted(row: PublishedRun) -> bool:
    """True if a shipped constant was fitted on this row: its stack is fitted, and the row is on the fitted side of the
    split.
    """
    return row.fitted and (row.machine, row.stack) in FITTED


def as_text(scores: Sequence[Accuracy]) -> str:
    """Return the scores as a table."""
    head = ("data set", "part", ">n", ">MAPE", ">median", ">p90", ">bias", ">pairs", ">order", ">regret", ">refused")
    rows = (
        (
            *(
                one.dataset,
                one.part,
                one.n,
                f"{one.mape:.1f}",
                f"{one.median:.1f}",
                f"{one.p90:.1f}",
                f"{one.bias:+.1f}",
            ),
            *(
                one.pairs,
                *("-" if share is None else f"{share:.1f}" for share in (one.order, one.regret)),
                one.false_no_fit,
            ),
        )
        for one in scores
    )
    return aligned(head, rows)


def validate_command(files: Sequence[Path], as_json: bool = False, show_rows: bool = False) -> int:
    """Print the scores of the shipped set, or of files in the two known formats.

    In given files, rows that no layout of this project matches are left out.
    """
    rows, left_out = ([], Counter[str]()) if files else (shipped(), Counter[str]())
    for path in files:
        runs, reasons = read_stated(path)
        rows += runs
        left_out += reasons
    why = f"left out {plural(left_out.total(), 'row')}: " + ", ".join(
        f"{number} {reason}" for reason, number in left_out.most_common()
    )
    if not rows:
        raise DataError(
            "no row holds a time, a model shape, a known cluster and a layout that exists here"
            + (f"; {why}" if left_out else ""),
            "see benchmarks/published for the columns",
            "plan --validate",
        )
    if left_out:
        print(why, file=sys.stderr)
    predictions = predict(rows)
    scores = score_all(predictions)
    if as_json:
        print(strict_json([asdict(one) for one in scores]))
        return 0
    if show_rows:
        for one in predictions:
            times = f"measured {one.row.seconds:9.3f} s  predicted {one.seconds:9.3f} s  {100 * one.error:+6.1f} %"
            print(f"{one.row.dataset:24} {one.row.key:44} {times}")
    print(
        "seconds per step, percent; `order` is the share of pairs ranked as measured\n"
        "`refused` counts runs that took place but would have been called too big (should be 0)"
    )
    print(as_text(scores))
    return 0
