"""Tests the predicted time of tensor-parallel products in pieces. A plan uses pieces only if overlap was measured on
the machine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from frontier_llm.blueprint.items import Collective, Product
from frontier_llm.blueprint.layout import Layout
from frontier_llm.cli.main import main
from frontier_llm.config import load_model, load_run
from frontier_llm.experiments.measure.pieces import PiecesTime, chunk_overlap
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.costs.kernels import memory_s, product_s
from frontier_llm.planner.costs.seconds import alone_s, tensor_s
from frontier_llm.planner.search import in_chunks

FRONTIER = rates(load_machine("frontier"))
LAYOUT = Layout(tp=8, sequence_parallel=True, microbatches=8)
PRODUCT = Product(2048, 4096, 8192)


@pytest.mark.parametrize(
    ("operation", "size", "copied"),
    [
        ("all_gather", 2048 * 8192, 2048 * 4096),
        ("reduce_scatter", 2048 * 4096, 2048 * 8192),
        ("all_reduce", 2048 * 4096, 2048 * 4096),
    ],
)
@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_of_each_piece_but_one_the_shorter_half_hides(operation: str, size: int, copied: int, overlap: float) -> None:
    numbers = replace(FRONTIER, chunk_overlap=overlap)
    shown_s = tensor_s(Collective("tp", operation, 2 * size, beside=PRODUCT), replace(LAYOUT, tensor_chunks=4), numbers)
    product_piece_s = product_s(Product(512, 4096, 8192), numbers)
    sent_piece_s = alone_s(Collective("tp", operation, size // 2), 8, numbers)
    whole_s = (
        4 * (product_piece_s + sent_piece_s)
        - 3 * overlap * min(product_piece_s, sent_piece_s)
        + memory_s(4 * copied, 4, numbers)
    )
    assert shown_s == pytest.approx(whole_s - product_s(PRODUCT, numbers), rel=1e-12)


def test_a_collective_that_no_product_is_cut_with_stays_whole() -> None:
    collective = Collective("tp", "all_reduce", 1 << 24)
    numbers = replace(FRONTIER, chunk_overlap=1.0)
    assert tensor_s(collective, replace(LAYOUT, tensor_chunks=4), numbers) == tensor_s(collective, LAYOUT, numbers)


def test_pieces_are_chosen_where_they_were_seen_to_hide() -> None:
    model = load_model("gpt-22b")
    slow = replace(FRONTIER, fabric_share=0.2)
    assert in_chunks(model, LAYOUT, slow) == LAYOUT, "nothing was measured on this machine"
    assert in_chunks(model, LAYOUT, replace(slow, chunk_overlap=0.9)).tensor_chunks > 1
    assert in_chunks(model, LAYOUT, replace(slow, chunk_overlap=0.01)).tensor_chunks == 1, (
        "pieces cost more than a hundredth hides"
    )
    assert in_chunks(model, replace(LAYOUT, tp=1), replace(slow, chunk_overlap=0.9)).tensor_chunks == 1


def test_a_plan_with_pieces_is_a_run_with_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = {"value": 0.9, "tag": "measured", "source": "a test"}
    slow = {"value": 0.2, "tag": "estimated", "source": "a test"}
    machine = tmp_path / "slow.yaml"
    run = tmp_path / "run.yaml"
    machine.write_text(
        yaml.safe_dump({"base": "frontier", "stacks": {"frontier-llm": {"chunk_overlap": seen, "fabric_share": slow}}})
    )
    arguments = ["plan", "gpt-22b", "--nodes", "4", "--machine", str(machine), "--fix", "tensor=8", "--emit", str(run)]
    assert main(arguments) == 0
    assert f"tensor chunks {load_run(str(run)).comm.tensor_chunks}" in capsys.readouterr().out
    assert load_run(str(run)).comm.tensor_chunks > 1


def test_the_share_that_hid_is_counted_against_the_shorter_half() -> None:
    nothing, half, all_of_it = (
        PiecesTime("all_gather", 4, 3.0, 2.0, 1.0, together_s) for together_s in (21.0, 18.0, 15.0)
    )
    assert [one.overlap for one in (nothing, half, all_of_it)] == [0.0, 0.5, 1.0]
    assert PiecesTime("all_gather", 4, 3.0, 2.0, 1.0, 30.0).overlap == 0.0, "slower in pieces hides nothing"
    assert chunk_overlap([nothing, half, all_of_it]) == 0.5
