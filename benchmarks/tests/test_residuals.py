"""docs/benchmarks/planner.md contains the current table of the runs that the planner ranks wrongly, computed from the
shipped rows.
"""

from __future__ import annotations

from benchmarks.planner import residuals


def test_the_page_holds_the_table_of_residuals() -> None:
    table = residuals.table()
    assert table in residuals.PAGE.read_text()
    for name in residuals.COLUMNS:
        runs = [line.split("|")[3] for line in table.partition(f"**{name}**")[2].splitlines()[1:]]
        first = next((number for number, cell in enumerate(runs) if not cell.strip()), len(runs))
        assert sum(map(int, runs[:first])) == 73
