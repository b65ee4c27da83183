"""Measures every node before the first step, and ends the start if a node is slow.

Each rank times a matrix product, a copy, a ring inside its node and an exchange with the neighbouring nodes. All ranks
do the same work, so their times are comparable, and a node's time is the time of its slowest rank. A node is slow if
its rate is below SLOW_BELOW of the median of all nodes in two measurements.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from frontier_llm import log
from frontier_llm.comm import Mesh, all_gather_json, barrier
from frontier_llm.comm.composed import start_exchange
from frontier_llm.config import GuardConfig
from frontier_llm.failpoints import hit
from frontier_llm.run import hostlist
from frontier_llm.run.failure import Evidence, Failure
from frontier_llm.run.job import EXAMINED_NODES
from frontier_llm.run.launchers import RankEnv
from frontier_llm.run.rank_env import node_name
from frontier_llm.topology.rank_variables import node_count
from frontier_llm.training.agreement import raise_failure
from frontier_llm.units import MIB, format_seconds, plural

SLOW_BELOW = 0.9  # share of the median rate; the products of healthy MI250X differ by less
REPEATS = 5  # the fastest repeat is used, so an interruption by another program has no effect
MEASURES = ("matrix product", "copy", "ring inside the node", "exchange with the next node")


@dataclass(frozen=True)
class Work:
    """Size of the measured work. Five repeats of all measures take less than 2 s on an MI250X (computed)."""

    product_width: int  # side of square matrices
    dtype: torch.dtype  # type of the matrices
    copy_bytes: int
    message_bytes: int


GPU_WORK = Work(product_width=8192, dtype=torch.bfloat16, copy_bytes=1024 * MIB, message_bytes=64 * MIB)
# A quota of CPU time stops a process once in every period of 10 to 100 ms. With a product of 3 ms, the fastest repeat
# often ran between two stops and did not show the quota. This product takes 20 ms on one core.
CPU_WORK = Work(product_width=1024, dtype=torch.float32, copy_bytes=16 * MIB, message_bytes=MIB)


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank for each of MEASURES. None if the rank has no partner for a measure."""

    host: str
    seconds: tuple[float | None, ...]


@dataclass(frozen=True)
class SlowNode:
    """A node whose rate is below SLOW_BELOW of the median."""

    host: str
    rank: int  # slowest rank of the host
    measure: str  # member of MEASURES with the lowest rate
    seconds: float
    usual_s: float  # median over the nodes

    @property
    def rate(self) -> float:
        """Rate as a share of the median rate."""
        return self.usual_s / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.host} reaches {self.rate:.2f} of the median rate: its {self.measure} takes "
            f"{format_seconds(self.seconds)} (rank {self.rank}), and {format_seconds(self.usual_s)} on the median node"
        )


def check_rates(
    guard: GuardConfig, place: RankEnv | None, mesh: Mesh, device: torch.device, record: Callable[[Failure], None]
) -> None:
    """Measure all nodes if `guard.start_rates` requires it. Collective over the world.

    Every rank raises RankFailure if some nodes are slow. Rank 0 calls `record` with the failure first.
    """
    if place is None or mesh.world.size == 1 or not _is_wanted(guard, node_count(place)):
        return
    began_s = time.monotonic()
    times = _measure(place, mesh, device)
    slow = slow_nodes(times)
    if slow:  # all ranks have the same times, so every rank enters this branch
        again = slow_nodes(_measure(place, mesh, device))
        slow = {host: node for host, node in again.items() if host in slow}
    log.info(
        f"rates of {plural(len({one.host for one in times}), 'node')} measured in {time.monotonic() - began_s:.1f} s"
    )
    for line in summary(times):
        log.info(f"  {line}")
    failure = judge_rates(slow, {one.host for one in times})
    if failure is None:
        return
    if mesh.world.rank == 0:
        record(failure)
    barrier(mesh.world)  # no rank exits before the record is written
    raise_failure(failure)


def _is_wanted(guard: GuardConfig, nodes: int) -> bool:
    return nodes >= EXAMINED_NODES if guard.start_rates == "auto" else guard.start_rates


def judge_rates(slow: Mapping[str, SlowNode], hosts: set[str]) -> Failure | None:
    """Return the failure that names the slow nodes. None if there are none.

    If half of all hosts or more are slow, the median is no reference, and only a warning is logged.
    """
    if not slow:
        return None
    worst = min(slow.values(), key=lambda node: node.rate)
    lines = [str(node) for node in slow.values()]
    if 2 * len(slow) >= len(hosts):
        log.warn(f"{len(slow)} of {len(hosts)} nodes are slower than the others: {'; '.join(lines)}")
        return None
    what = str(worst)
    if len(slow) > 1:
        what += f" ({len(slow)} of {len(hosts)} nodes are slow:  {hostlist.compress(sorted(slow))})"
    fix = "the nodes are excluded; report them to the site, or set guard.start_rates=false to use them"
    return Failure(
        what,
        Evidence.COMPARISON,
        fix=fix,
        cause="node failure",
        rank=worst.rank,
        host=worst.host,
        section="start",
        host_suspect=True,
        message=(*lines, f"    fix: {fix}"),
        excluded_hosts=tuple(sorted(slow)),
    )


def slow_nodes(times: Sequence[RankTimes]) -> dict[str, SlowNode]:
    """Return the slow nodes by host. `times` are the times of all ranks, in rank order."""
    slow: dict[str, SlowNode] = {}
    for number, measure in enumerate(MEASURES):
        slowest = _slowest_ranks(times, number)
        if not slowest:
            continue
        usual_s = median(seconds for seconds, _ in slowest.values())
        for host, (seconds, rank) in slowest.items():
            node = SlowNode(host, rank, measure, seconds, usual_s)
            if node.rate < SLOW_BELOW and (host not in slow or node.rate < slow[host].rate):
                slow[host] = node
    return slow


def summary(times: Sequence[RankTimes]) -> list[str]:
    """Return one line per measure, with the rate of the median node and of the slowest node."""
    lines = []
    for number, measure in enumerate(MEASURES):
        slowest = _slowest_ranks(times, number)
        if slowest:
            usual_s = median(seconds for seconds, _ in slowest.values())
            host = max(slowest, key=lambda name: slowest[name][0])
            share = usual_s / slowest[host][0]
            lines.append(f"{measure}: {format_seconds(usual_s)} on the median node; {host} has {share:.2f} of its rate")
    return lines


def _slowest_ranks(times: Sequence[RankTimes], number: int) -> dict[str, tuple[float, int]]:
    """Return (seconds, rank) of the slowest rank of each host for one measure."""
    slowest: dict[str, tuple[float, int]] = {}
    for rank, one in enumerate(times):
        seconds = one.seconds[number]
        if seconds is not None and seconds > slowest.get(one.host, (0.0, 0))[0]:
            slowest[one.host] = (seconds, rank)
    return slowest


def _measure(place: RankEnv, mesh: Mesh, device: torch.device) -> list[RankTimes]:
    """Return the times of all ranks, in rank order."""
    work = GPU_WORK if device.type == "cuda" else CPU_WORK
    seconds = [_product_s(work, device), _copy_s(work, device), *_network_s(place, mesh, device, work)]
    hit("start.rates", seconds)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    content = all_gather_json([node_name(), seconds], mesh.world, device)
    return [RankTimes(host, tuple(row)) for host, row in content]


def _product_s(work: Work, device: torch.device) -> float:
    left = torch.ones(work.product_width, work.product_width, dtype=work.dtype, device=device)
    out = torch.empty_like(left)
    return _fastest_s(lambda: torch.mm(left, left, out=out), device)


def _copy_s(work: Work, device: torch.device) -> float:
    source = torch.ones(work.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _fastest_s(lambda: target.copy_(source), device)


def _network_s(place: RankEnv, mesh: Mesh, device: torch.device, work: Work) -> list[float | None]:
    """Return the times of the ring inside this rank's node, and of the exchange with the neighbouring nodes.

    A node exchanges messages with the node before it and with the node after it, one after the other, and the shorter
    time counts. A node with a slow network is slow in both exchanges, and each of its neighbours is slow in only one
    exchange.
    """
    ranks_per_node = place.local_world_size
    rank = mesh.world.rank
    if mesh.world.size % ranks_per_node:
        return [None, None]
    nodes = mesh.world.size // ranks_per_node
    node, local = divmod(rank, ranks_per_node)
    outgoing = torch.ones(work.message_bytes, dtype=torch.uint8, device=device)
    incoming = torch.empty_like(outgoing)

    def exchange(to: int, source: int) -> None:
        start_exchange(outgoing, to, incoming, source, mesh.world).wait()

    ring_s = None
    barrier(mesh.world)
    if ranks_per_node > 1:
        first = node * ranks_per_node
        after = first + (local + 1) % ranks_per_node
        before = first + (local - 1) % ranks_per_node
        ring_s = _fastest_s(lambda: exchange(after, before), device)
    exchange_s = None
    for pairs in pair_rounds(nodes):
        barrier(mesh.world)
        partner = pairs.get(node)
        if partner is not None:
            peer = partner * ranks_per_node + local
            seconds = _fastest_s(lambda: exchange(peer, peer), device)  # noqa: B023 called before the next round
            exchange_s = min(seconds, math.inf if exchange_s is None else exchange_s)
    return [ring_s, exchange_s]


def pair_rounds(nodes: int) -> list[dict[int, int]]:
    """Return the rounds in which nodes exchange messages in pairs. Each round maps a node to its partner.

    Each node exchanges messages with the node before it and the node after it. An odd number of nodes needs a third
    round.
    """
    if nodes < 2:
        return []
    links = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else 1)]
    rounds: list[dict[int, int]] = []
    for left, right in links:
        free = next((one for one in rounds if left not in one and right not in one), None)
        if free is None:
            free = {}
            rounds.append(free)
        free[left] = right
        free[right] = left
    return rounds


def _fastest_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of REPEATS calls, after one call that is not measured."""
    work()
    fastest_s = math.inf
    for _ in range(REPEATS):
        _synchronize(device)
        began_s = time.perf_counter()
        work()
        _synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - began_s)
    return fastest_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
