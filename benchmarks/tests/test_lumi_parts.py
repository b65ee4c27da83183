"""The tables of GPT-175B on LUMI are those of the program that writes them."""

from __future__ import annotations

from benchmarks.planner.lumi_parts import PAGE, collectives, parts, series

TEXT = PAGE.read_text(encoding="utf-8")


def test_both_parts_of_the_step_are_shown() -> None:
    points = series()
    assert [point.run.layout.devices for point in points] == [128, 512, 2048]
    assert "\n".join(parts(points)) in TEXT


def test_the_published_collectives_are_shown_beside_their_prices() -> None:
    assert "\n".join(collectives()) in TEXT
