"""Text tables: widths come from the cells, and numbers are aligned to the right."""

from __future__ import annotations

from frontier_llm.tables import aligned, markdown

HEAD = ("op", ">seconds", "note")
ROWS = [("norm", 1.5, ""), ("attention", 12, "slow")]


def test_columns_are_as_wide_as_their_widest_cell_and_numbers_stand_to_the_right() -> None:
    assert aligned(HEAD, ROWS, indent="  ").splitlines() == [
        "  op         seconds  note",
        "  norm           1.5",
        "  attention       12  slow",
    ]
    assert aligned(HEAD, ()) == "op  seconds  note"


def test_markdown_has_the_same_columns() -> None:
    assert markdown(HEAD, ROWS).splitlines() == [
        "| op | seconds | note |",
        "| --- | --: | --- |",
        "| norm | 1.5 |  |",
        "| attention | 12 | slow |",
    ]
