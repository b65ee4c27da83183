"""The tables of GPT-175B on LUMI are those of the program that writes them."""

from __future__ import annotations

from benchmarks.planner.lumi_parts import PAGE, collectives, parts, read_tsv, series
from benchmarks.published.datasets import PUBLISHED, read_stated
from benchmarks.published.validate import judged
from frontier_llm.units import GIB

TEXT = PAGE.read_text(encoding="utf-8")


def test_both_parts_of_the_step_are_shown() -> None:
    points = series()
    assert [point.run.layout.devices for point in points] == [128, 512, 2048]
    assert "\n".join(parts(points)) in TEXT


def test_both_parts_are_priced_within_a_tenth() -> None:
    for point in series():
        assert abs(point.priced_microbatch_s / point.microbatch_s - 1) < 0.1
        # on 2048 GCDs, all ranks waited 2.9 s for two slow ranks; the prediction has no such wait
        if point.run.layout.devices < 2048:
            assert abs(point.priced_rest_s / point.rest_s - 1) < 0.1


def test_the_memory_is_what_torch_allocated() -> None:
    allocated_gib = {row["gcds"]: float(row["max_allocated_gib"]) for row in read_tsv("lumi_memory.tsv")}
    readings = {reading.key: reading for reading in read_stated(PUBLISHED / "mi250x_rows.tsv")}
    for gcds in ("128", "512", "2048"):
        prediction = judged(readings[f"lumi-mds-175b-{gcds}"])[1]
        assert prediction is not None
        assert abs(prediction.peak_bytes / GIB / allocated_gib[gcds] - 1) < 0.02


def test_the_published_collectives_are_shown_beside_their_prices() -> None:
    assert "\n".join(collectives()) in TEXT
