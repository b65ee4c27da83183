"""`plan --validate`: compares predictions with published measurements, by data set and separately for fitted and unseen
rows.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published.datasets import PublishedRun, Reading, is_fitted, read_stated, shipped
from benchmarks.published.predict import RowPrediction, cluster, cluster_rates, complete, predict, rates_of
from frontier_llm.errors import DataError, FrontierError
from frontier_llm.planner.breakdown import breakdown
from frontier_llm.planner.search import simulate_layout
from frontier_llm.planner.uncertainty import BANDS, ESTIMATED, SAME, basis
from frontier_llm.planner.uncertainty import PUBLISHED as PUBLISHED_STEPS
from frontier_llm.tables import aligned
from frontier_llm.units import GIB, plural, strict_json

# Ranges of the measured gap between two rows: name → smallest difference of log time. A range ends at the start of the
# next range.
GAPS = {"under 1 %": 0.0, "1 to 2 %": 0.01, "2 to 5 %": 0.02, "over 5 %": 0.05}


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
    # mean excess of the step time if the layout that is predicted as best of a group is used, percent; None without
    # groups
    regret: float | None
    false_no_fit: int  # number of measured runs that the planner would refuse for lack of memory


def score(dataset: str, part: str, predictions: Sequence[RowPrediction]) -> Accuracy:
    """Return the accuracy of one set of predictions."""
    errors = np.array([one.error for one in predictions])
    size = 100 * np.abs(errors)
    pairs = ranked_pairs(predictions)
    regrets = []
    for group in groups(predictions):
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
        pairs=len(pairs),
        order=100 * sum(pair.right for pair in pairs) / len(pairs) if pairs else None,
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


@dataclass(frozen=True)
class RankedPair:
    """Two rows between which a user could choose."""

    gap: float  # difference of the measured log times
    right: bool  # True if the prediction has the two rows in the measured order


def ranked_pairs(predictions: Iterable[RowPrediction]) -> list[RankedPair]:
    """Return all pairs of rows that differ only in their layout."""
    pairs = []
    for group in groups(predictions):
        for one, other in combinations(group, 2):
            gap = abs(float(np.log(one.row.seconds / other.row.seconds)))
            right = (one.seconds - other.seconds) * (one.row.seconds - other.row.seconds) > 0
            pairs.append(RankedPair(gap, right))
    return pairs


def order_by_gap(pairs: Sequence[RankedPair]) -> list[tuple[str, int, float | None]]:
    """Return for each range of GAPS its name, the number of pairs, and the percentage of pairs that are predicted in
    the measured order.
    """
    rows = []
    for (name, low), (_, high) in pairwise([*GAPS.items(), ("", np.inf)]):
        right = [pair.right for pair in pairs if low <= pair.gap < high]
        rows.append((name, len(right), 100 * float(np.mean(right)) if right else None))
    return rows


def gap_table(predictions: Sequence[RowPrediction]) -> str:
    """Return a table of `order_by_gap`, for fitted and unseen rows."""
    parts = [[one for one in predictions if is_fitted(one.row) == fitted] for fitted in (True, False)]
    fitted, unseen = (order_by_gap(ranked_pairs(part)) for part in parts)
    head = ("measured gap of a pair", ">fitted: pairs", ">order", ">unseen: pairs", ">order")
    rows = []
    for (name, number, share), (_, other_number, other_share) in zip(fitted, unseen, strict=True):
        words = ["-" if value is None else f"{value:.1f}" for value in (share, other_share)]
        rows.append((name, number, words[0], other_number, words[1]))
    return aligned(head, rows)


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


def band_of(row: PublishedRun) -> float:
    """Return the factor of the 90 % interval for a run of this machine and stack."""
    return 1 + BANDS[basis_of(row)]


def basis_of(row: PublishedRun) -> str:
    """Return the key of BANDS for a published run.

    A row is itself a published step of its stack, so its basis is at least PUBLISHED_STEPS. A row that uses the file
    of a similar cluster has not run on that machine.
    """
    known = row.known and basis_of_stack(row.machine, row.stack) == SAME
    return SAME if known else PUBLISHED_STEPS


@cache
def basis_of_stack(machine: str, stack: str) -> str:
    """Return the basis of the longest step among the shipped rows of a stack. ESTIMATED if it has none."""
    rows = [row for row in shipped() if (row.machine, row.stack) == (machine, stack) and row.layout.cp == 1]
    if not rows:
        return ESTIMATED
    row = max(rows, key=lambda row: row.seconds)
    numbers = rates_of(row, cluster_rates(machine, stack))
    plan = simulate_layout(row.model, complete(row, numbers), numbers)
    return basis(cluster(machine), stack, breakdown(plan, numbers))


def judged(reading: Reading) -> tuple[Reading, RowPrediction | None]:
    """Return the reading and its prediction. A row for which no prediction is possible gets the reason."""
    if reading.run is None:
        return reading, None
    try:
        (prediction,) = predict([reading.run])
    except (FrontierError, ValueError, ArithmeticError, LookupError) as error:
        return replace(reading, run=None, reason=" ".join(str(error).split())), None
    return reading, prediction


def row_as_dict(reading: Reading, prediction: RowPrediction | None) -> dict[str, Any]:
    """Return the object of one row for `--rows --json`: the prediction, or the reason why there is none."""
    if prediction is None:
        return {"id": reading.key, "reason": reading.reason}
    row = prediction.row
    return {
        "id": reading.key,
        "measured_s": row.seconds,
        "predicted_s": prediction.seconds,
        "error": prediction.error,
        "peak_gib": prediction.peak_bytes / GIB,
        "limit_gib": prediction.limit_bytes / GIB,
        "measured_gib": row.memory_gib,
        "band": band_of(row),
        "fitted": is_fitted(row),
        "machine": row.machine,
        "stack": row.stack,
        "assumed": list(row.unstated),
    }


def validate_command(files: Sequence[Path], as_json: bool = False, show_rows: bool = False) -> int:
    """Print the scores of the shipped set, or of files in the two known formats.

    In given files, rows that no layout of this project matches are left out, with the reason.
    """
    if files:
        readings = [reading for path in files for reading in read_stated(path)]
    else:
        readings = [Reading(row.key, row) for row in shipped()]
    rows = [judged(reading) for reading in readings]
    predictions = [prediction for _, prediction in rows if prediction is not None]
    if as_json and show_rows:
        print(strict_json([row_as_dict(*row) for row in rows]))
        return 0
    reasons = Counter(reading.reason for reading, prediction in rows if prediction is None)
    why = f"left out {plural(reasons.total(), 'row')}: " + ", ".join(
        f"{number} {reason}" for reason, number in reasons.most_common()
    )
    if not predictions:
        raise DataError(
            "no row has a time, a model shape, a known cluster and a supported layout"
            + (f"; {why}" if reasons else ""),
            "see benchmarks/published for the columns",
            "plan --validate",
        )
    if reasons:
        print(why, file=sys.stderr)
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
        "`refused` is the number of measured runs that the planner would refuse for lack of memory (should be 0)"
    )
    print(as_text(scores))
    if any(one.pairs for one in scores):
        print("\nshare of pairs in the measured order, percent, by their measured gap")
        print(gap_table(predictions))
    return 0
