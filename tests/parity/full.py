"""Compare all combinations, not only all pairs of settings (`scripts/parity_full.sh`).

Writes its table into docs/benchmarks/numerics.md. Exits with code 1 if any run differs.
`scripts/parity_full.sh --random 200 --seed 7` runs random cases instead (tests/parity/draw.py), each with its own
model.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections import defaultdict
from itertools import islice, product
from pathlib import Path

import torch

from tests.harness.families import FAMILIES
from tests.harness.pool import RankError, RankPool
from tests.parity.cases import Case, every_case
from tests.parity.compare import Run, differences, gather, worst
from tests.parity.draw import random_cases
from tests.parity.three_steps import train_case
from tests.parity.witness import witness

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "numerics.md"
BEGIN = "<!-- parity_full: begin -->"
END = "<!-- parity_full: end -->"
KINDS = ("loss", "gradient norm", "gradients", "parameters")


class Table:
    """Worst relative errors by row."""

    def __init__(self, first_column: str) -> None:
        self.first_column = first_column
        self.rows: dict[str, list[dict[str, float]]] = defaultdict(list)

    def text(self) -> str:
        lines = [f"| {self.first_column} | runs | {' | '.join(KINDS)} |", "|---|---:|" + "---:|" * len(KINDS)]
        for row, errors in self.rows.items():
            lines.append(
                f"| {row} | {len(errors)} | "
                f"{' | '.join(f'{max(error[kind] for error in errors):.1e}' for kind in KINDS)} |"
            )
        return "\n".join(lines)


def note(message: str) -> None:
    """Print progress on stderr."""
    print(message, file=sys.stderr, flush=True)


def compare_all(pool: RankPool, cases: list[Case]) -> tuple[Table, Table, list[str]]:
    """Return the table of serial runs against the oracle, the table of layouts against serial runs, and the
    failures.
    """
    oracle = Table("one rank against the oracle")
    layouts = Table("layout against one rank")
    failures = []
    serial: dict[Case, Run] = {}

    def alone(case: Case) -> Run:
        """Return the run of the case on one rank. Each case runs only once, and this run is also compared with the
        oracle.
        """
        case = case.serial()
        if case not in serial:
            serial[case] = gather(pool.run(1, train_case, case))
            expected = witness(case, serial[case].initial)
            failures.extend(f"{case} against the oracle: {line}" for line in differences(serial[case], expected))
            oracle.rows[case.family + (", document resets" if case.documents else "")].append(
                worst(serial[case], expected)
            )
        return serial[case]

    for family, documents in product(FAMILIES, (False, True)):
        alone(Case(family, documents=documents))
    begin_s = time.monotonic()
    for index, case in enumerate(cases, start=1):
        try:
            expected = alone(case)
            run = gather(pool.run(case.world_size, train_case, case))
        except (RankError, AssertionError) as error:
            failures.append(f"{case}: {error}")
            note(f"FAILED {case}: {error}")
            continue
        found = differences(run, expected)
        failures += [f"{case}: {line}" for line in found]
        layouts.rows[f"TP{case.tp} x PP{case.pp} x DP{case.dp}"].append(worst(run, expected))
        if found or index % 20 == 0 or index == len(cases):
            left_s = (time.monotonic() - begin_s) / index * (len(cases) - index)
            note(f"{index}/{len(cases)} {'DIFFERS' if found else 'equal'} {case}; {left_s:.0f} s left")
    return oracle, layouts, failures


def report(oracle: Table, layouts: Table, failures: list[str], cases: int, seconds: float) -> str:
    """Return the text between the marks of docs/benchmarks/numerics.md."""
    outcome = "all equal" if not failures else f"{len(failures)} differences"
    lines = [
        f"`scripts/parity_full.sh`: {cases} runs, **{outcome}**, {seconds / 60:.0f} min on {platform.machine()} with "
        f"torch {torch.__version__}.",
        "Worst relative error of each row:",
        "",
        oracle.text(),
        "",
        layouts.text(),
    ]
    if failures:
        lines += ["", "Differences:", ""]
        lines += [f"- {line.splitlines()[0]}" for line in failures]
    return "\n".join(lines)


def write(text: str) -> None:
    """Replace the text between the marks."""
    document = DOCUMENT.read_text(encoding="utf-8")
    head, rest = document.split(BEGIN)
    DOCUMENT.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--limit",
        type=int,
        default=None,
        help="run only the first N combinations, and do not change docs/benchmarks/numerics.md",
    )
    parser.add_argument(
        "--random",
        type=int,
        metavar="N",
        help="run N random configurations instead, and do not change docs/benchmarks/numerics.md",
    )
    parser.add_argument("--seed", type=int, default=0, help="of --random")
    options = parser.parse_args()
    limit = options.limit if options.random is None else options.random
    cases = list(islice(every_case() if options.random is None else random_cases(options.seed), limit))
    pool = RankPool()
    begin_s = time.monotonic()
    try:
        oracle, layouts, failures = compare_all(pool, cases)
    finally:
        pool.stop()
    text = report(oracle, layouts, failures, len(cases), time.monotonic() - begin_s)
    print(text)
    if limit is None:
        write(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
