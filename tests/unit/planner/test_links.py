"""The link that limits each axis, as `plan` reports it."""

from __future__ import annotations

from typing import Any

from frontier_llm.blueprint.layout import Layout
from frontier_llm.config.load import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.links import axis_links
from frontier_llm.planner.search import simulate_layout


def links(machine_name: str, **layout: Any) -> dict[str, str]:
    machine = load_machine(machine_name)
    numbers = rates(machine)
    model = load_model("gpt-22b")
    spread = Layout(**{"tp": 8, "pp": 4, "dp": 4, "microbatches": 8, "sequence_parallel": True, **layout})
    return axis_links(simulate_layout(model, spread, numbers), machine, numbers)


def test_tensor_names_its_ring_where_the_node_s_links_are_known() -> None:
    assert "links allow 250" in links("frontier")["tensor"] and "crosses a link of 50" in links("frontier")["tensor"]
    assert "one ring 0-1 crosses a link of 200" in links("lumi", tp=2)["tensor"]
    assert "ring" not in links("a100")["tensor"]


def test_shares_of_the_nics() -> None:
    # 4 NICs x 25 GB/s x 0.85 over 8 devices; crowding lowers the replicas' share by a factor of 0.8
    found = links("frontier")
    assert "10.6 GB/s for each of 8 devices" in found["pipeline"]
    assert "8.5 GB/s for each of 8 groups" in found["data"] and "peers on the same NIC" in found["data"]
    assert "34.0 GB/s for each of 2 groups" in links("frontier", tp=2, dp=8)["data"]


def test_axes_of_one_rank_have_no_link_and_wide_ones_are_found_out() -> None:
    assert list(links("frontier", pp=1, dp=1)) == ["tensor"]
    assert "over 2 nodes" in links("frontier", tp=16)["tensor"]
    assert "in one node" in links("frontier", tp=2, pp=2, dp=2)["data"]
    assert "neighbours in one node" in links("frontier", tp=2, pp=2, dp=2)["pipeline"]
