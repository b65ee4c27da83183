"""Description of the link (fabric or network) that carries the communication of each parallel axis of a layout.

The module also computes the cost of one communication in flight (`comm.in_flight`) for a plan.
"""

from __future__ import annotations

from dataclasses import replace

from frontier_llm.machine.affinity import NODE, best_ring, bus_limit_gbps
from frontier_llm.machine.rates import Rates, fabric_bandwidth
from frontier_llm.machine.schema import Machine
from frontier_llm.planner.costs.layouts import RanksPerNode, ranks_per_node
from frontier_llm.planner.pipeline import simulate_step
from frontier_llm.planner.search import Plan
from frontier_llm.units import plural


def axis_links(plan: Plan, machine: Machine, rates: Rates) -> dict[str, str]:
    """Return axis → description of its link, for axes with more than one rank: {'tensor': …, 'pipeline': …, 'data': …}.

    Bandwidths are in GB/s per direction. Tensor parallelism is the innermost axis, so all groups of an axis are placed
    on nodes in the same way. The description is of the first group.
    """
    layout = plan.layout
    place = ranks_per_node(plan.layout, rates)
    links = {}
    if layout.tp > 1:
        links["tensor"] = _tensor(layout.tp, machine, rates)
    if layout.pp > 1:
        links["pipeline"] = _neighbours(machine, rates, place)
    if layout.cp > 1:
        links["context"] = _context(layout.cp, int(place.cp_per_node), machine, rates)
    if layout.replicas > 1:
        links["data"] = _replicas(
            layout.replicas,
            int(place.replicas_per_node),
            int(place.replicas_sharing),
            machine,
            rates,
        )
    return links


def _tensor(tp: int, machine: Machine, rates: Rates) -> str:
    if tp > rates.node_devices:
        return f"{tp} ranks over {-(-tp // rates.node_devices)} nodes: {_nics(machine, rates)} limit every layer"
    return f"{tp} ranks of a node: {_fabric(tuple(range(tp)), machine, rates)}"


def _context(cp: int, inside: int, machine: Machine, rates: Rates) -> str:
    if cp <= inside:
        return (
            f"{cp} ranks of a node hold a sequence: {float(fabric_bandwidth(rates, cp)) / 1e9:.0f} GB/s bus "
            f"bandwidth between neighbours"
        )
    sharing = rates.node_devices // inside
    return (
        f"{inside} of {cp} ranks in each node, by rail: {_share(sharing, rates)} for each of {sharing} groups "
        f"that share {_nics(machine, rates)}"
    )


def _neighbours(machine: Machine, rates: Rates, place: RanksPerNode) -> str:
    if place.pp_inside:
        return f"neighbours in one node: {_fabric((0, 1), machine, rates)}; every node's last stage sends over its NICs"
    sharing = int(place.pp_sharing)
    return (
        f"neighbours on different nodes: {_share(sharing, rates)} for each of {sharing} devices that share "
        f"{_nics(machine, rates)}"
    )


def _replicas(dp: int, inside: int, sharing: int, machine: Machine, rates: Rates) -> str:
    if dp <= inside:
        return f"{dp} replicas in one node"
    peers = ", peers on the same NIC" if machine.node.links and inside == 1 else ""
    share = _share(sharing, rates, rates.network_crowding if sharing > 1 else 1.0)
    return (
        f"{inside} of {dp} replicas in each node: {share} for each of {sharing} groups that share "
        f"{_nics(machine, rates)}{peers}"
    )


def _share(sharing: int, rates: Rates, factor: float = 1.0) -> str:
    return f"{rates.node_network_bytes_s * rates.network_efficiency * factor / sharing / 1e9:.1f} GB/s"


def _nics(machine: Machine, rates: Rates) -> str:
    return f"{plural(int(machine.node.nics.value), 'NIC')} of {machine.node.nic_gbps.value:g} GB/s"


def _fabric(devices: tuple[int, ...], machine: Machine, rates: Rates) -> str:
    """Return text with the bus bandwidth of collectives over these devices and, on MI250X, the bound of their links."""
    reached = float(fabric_bandwidth(rates, len(devices))) / 1e9
    words = f"{reached:.0f} GB/s bus bandwidth"
    if machine.node.links != "mi250x" or len(devices) > len(NODE):
        return words
    order, slowest = best_ring(devices)
    ring = "-".join(str(gcd) for gcd in order)
    return f"{words} (links allow {bus_limit_gbps(devices):.0f}; one ring {ring} crosses a link of {slowest:.0f})"


def cost_of_one(plan: Plan, rates: Rates) -> float | None:
    """Return the relative increase of the step time if a rank may have only one communication in flight.

    Both step times are simulated. Returns None if the machine allows many communications in flight, or for one device.
    """
    if not rates.one_in_flight or plan.layout.devices == 1:
        return None
    many = simulate_step(plan.model, plan.layout, replace(rates, one_in_flight=False), plan.stages)
    return plan.step_s / many.step_s - 1


def safety_words(plan: Plan, machine: Machine, rates: Rates) -> list[str]:
    """Return the report's line about one communication in flight, or an empty list if many are allowed."""
    cost = cost_of_one(plan, rates)
    if cost is None:
        return []
    rule = machine.in_flight_on(machine.device.architecture)
    why = f"{rule.tag}: {rule.source}"
    return [
        f"  one communication in flight (comm.in_flight) costs {100 * cost:.1f} % of this step, because messages "
        f"wait; {why}"
    ]
