"""Small Python values that ranks exchange arrive complete and in axis order, whatever their lengths."""

from __future__ import annotations

from typing import Any

import torch

from frontier_llm.comm import all_gather_json, broadcast_bytes, broadcast_json, build_mesh, maximum, single
from frontier_llm.topology.grid import Grid
from tests.harness.pool import RankPool

CPU = torch.device("cpu")
VALUES = [None, "zwölf", {"rows": [[1, 2.5], []], "long": "x" * 1000}]


def _exchange(rank: int) -> tuple[Any, ...]:
    world = build_mesh(Grid(1, 1, 3), rank, timeout_s=30.0).world
    sent = [broadcast_bytes(value if rank == 0 else b"not mine", world, CPU) for value in (b"", b"\0\xff" * 500)]
    return (
        all_gather_json(VALUES[rank], world, CPU),
        sent,
        broadcast_json([rank, "ü"], world, CPU),
        maximum([rank, -rank], world, CPU),
    )


def test_every_rank_gets_the_same(ranks: RankPool) -> None:
    assert ranks.run(3, _exchange) == [(VALUES, [b"", b"\0\xff" * 500], [0, "ü"], [2, 0])] * 3


def test_a_rank_alone_keeps_what_it_has() -> None:
    alone = single("world")
    assert all_gather_json({"a": 1}, alone, CPU) == [{"a": 1}] and broadcast_bytes(b"", alone, CPU) == b""
    assert broadcast_json("x", alone, CPU) == "x" and maximum([3], alone, CPU) == [3]
