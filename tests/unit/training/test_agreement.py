"""All ranks agree on device, torch, kernels and libraries before the first collective.

Otherwise all ranks end with the same cause, which names a host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from frontier_llm.errors import FrontierError, RankFailure
from frontier_llm.run.failure import Evidence, Failure
from frontier_llm.training.agreement import RankReport, agree, judge

ROCM7 = "torch 2.10.0 for ROCm 7.0"
ROCM6 = "torch 2.10.0 for ROCm 6.4"
DEAD = "torch sees no GPU"


def reports(hosts: dict[str, str], per_host: int = 2) -> list[RankReport]:
    """Return reports of `per_host` ranks on each host. `hosts` maps a host to its torch build or to an error."""
    made = []
    for host, found in hosts.items():
        error = found if found == DEAD else ""
        facts = {"device": "no GPU" if error else "gfx90a", "torch": ROCM7 if error else found}
        made += [RankReport(host, facts, error, "check the modules" if error else "")] * per_host
    return made


def test_ranks_that_found_the_same_agree() -> None:
    assert judge(reports(dict.fromkeys("abcd", ROCM7))) is None


@pytest.mark.parametrize(
    ("builds", "cause", "rank", "excluded"),
    [
        ([ROCM7, ROCM6, ROCM7], "node failure", 2, ("n1",)),
        ([ROCM6, ROCM7, ROCM7], "node failure", 0, ("n0",)),  # the rank that decides is on the node that differs
        ([ROCM7, ROCM6, ROCM6, ROCM7, ROCM7], "node failure", 2, ("n1", "n2")),
        ([ROCM7, ROCM6], "refused", 2, ()),  # a tie: half of the hosts is not a minority
        ([ROCM7, ROCM6, ROCM7, ROCM6], "refused", 2, ()),
        ([ROCM7, ROCM6, "torch 2.9.0 for ROCm 6.4", "torch 2.9.1 for ROCm 6.4"], "refused", 2, ()),  # no majority
        ([ROCM7, DEAD, ROCM7], "node failure", 2, ("n1",)),
        ([ROCM7, DEAD], "refused", 2, ()),
        ([DEAD, DEAD, ROCM7], "refused", 0, ()),  # most hosts have an error, so that other nodes would not help
        ([ROCM7, DEAD, DEAD], "refused", 2, ()),
        ([DEAD, DEAD], "refused", 0, ()),
        ([DEAD], "refused", 0, ()),
    ],
)
def test_a_minority_of_hosts_is_a_fault_of_the_nodes_and_anything_else_a_refusal(
    builds: list[str], cause: str, rank: int, excluded: tuple[str, ...]
) -> None:
    failure = judge(reports({f"n{number}": build for number, build in enumerate(builds)}))
    assert failure is not None
    assert (failure.cause, failure.rank, failure.host, failure.excluded_hosts) == (
        cause,
        rank,
        f"n{rank // 2}",
        excluded,
    )
    assert failure.host_suspect == (cause == "node failure")
    assert Failure.from_json(failure.to_json()) == failure


def test_a_host_whose_own_ranks_differ_is_at_fault_as_a_whole() -> None:
    """One of the node's GPUs is dead."""
    found = [*reports({"n0": ROCM7}), *reports({"n1": ROCM7}, 1), *reports({"n1": DEAD}, 1), *reports({"n2": ROCM7})]
    failure = judge(found)
    assert failure is not None and (failure.cause, failure.rank, failure.excluded_hosts) == ("node failure", 3, ("n1",))


def test_nodes_with_different_numbers_of_ranks_are_refused() -> None:
    """No node is excluded: every node works, and each rank would derive other groups of ranks."""
    failure = judge([*reports(dict.fromkeys(["n0", "n1"], ROCM7), 8), *reports({"n2": ROCM7}, 4)])
    assert failure is not None and failure.cause == "refused" and not failure.host_suspect
    assert (failure.rank, failure.host, failure.excluded_hosts) == (16, "n2", ())
    assert failure.what == "the nodes have different numbers of ranks: 4 on n2, and 8 on most nodes"


@pytest.mark.parametrize("other", [ROCM6, DEAD])
def test_ranks_of_one_host_that_differ_are_refused(other: str) -> None:
    failure = judge([*reports({"n0": ROCM7}, 3), *reports({"n0": other}, 1)])
    assert failure is not None and (failure.cause, failure.rank, failure.host) == ("refused", 3, "n0")


def test_the_message_names_rank_host_fact_and_how_many_share_it() -> None:
    failure = judge(reports({"n0": ROCM7, "n1": ROCM6, "n2": ROCM6, "n3": ROCM7, "n4": ROCM7}))
    assert failure is not None and failure.evidence is Evidence.COMPARISON
    expected = (
        f"rank 2 on n1 differs from most ranks: torch is {ROCM6} instead of {ROCM7} "
        "(the same problem on 2 of 5 hosts: n[1-2])"
    )
    assert failure.what == expected and failure.message[0] == expected and failure.message[1].startswith("    fix: ")
    failure = judge(reports(dict.fromkeys([f"n{number:03}" for number in range(384)], DEAD)))
    assert failure is not None and failure.evidence is Evidence.EXCEPTION
    assert failure.message == (
        "torch sees no GPU (the same problem on 384 of 384 hosts: n[000-383])",
        "    fix: check the modules",
    )


class CountingStore:
    """A store that counts the requests of its rank."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.requests = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.requests += 1
            return getattr(self.store, name)(*arguments)

        return call


def ends(
    found: list[RankReport | None], timeout_s: float = 20.0, over_tcp: bool = False
) -> tuple[list[BaseException | None], list[Failure], list[int]]:
    """Return how each rank's call of `agree` ends, the failures that rank 0 records, and each rank's number of
    requests.

    A report of None means that the rank does not join.
    """
    recorded = list[Failure]()
    outcomes: list[BaseException | None] = [None] * len(found)
    server = dist.TCPStore("127.0.0.1", 0, None, True) if over_tcp else dist.HashStore()
    views = [dist.TCPStore("127.0.0.1", server.port) if isinstance(server, dist.TCPStore) else server for _ in found]
    stores = [CountingStore(view) for view in views]

    def rank(number: int, report: RankReport) -> None:
        try:
            agree(stores[number], number, len(found), report, recorded.append, timeout_s)  # type: ignore[arg-type]
        except BaseException as error:
            outcomes[number] = error

    threads = [
        threading.Thread(target=rank, args=(number, report))
        for number, report in enumerate(found)
        if report is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes, recorded, [store.requests for store in stores]


def test_ranks_that_agree_go_on_after_a_few_requests() -> None:
    outcomes, recorded, requests = ends(list(reports(dict.fromkeys("abcd", ROCM7), 4)))
    assert outcomes == [None] * 16 and recorded == []
    assert requests == [6] + [3] * 15  # rank 0: set, wait, multi_get, set, wait, get; other ranks: set, wait, get


@pytest.mark.parametrize("over_tcp", [False, True], ids=["HashStore", "TCPStore"])
@pytest.mark.parametrize(
    ("hosts", "error", "code"),
    [(["a", "b", "c"], RankFailure, 1), (["a", "b"], FrontierError, 2)],
    ids=["node fault", "refusal"],
)
def test_all_ranks_end_at_once_with_the_same_cause(
    hosts: list[str], error: type[FrontierError], code: int, over_tcp: bool
) -> None:
    """A rank with a dead GPU reports and waits like the others, so that no rank waits for a timeout."""
    began_s = time.monotonic()
    outcomes, recorded, _ = ends(
        list(reports({host: DEAD if host == "b" else ROCM7 for host in hosts})), 600.0, over_tcp
    )
    assert time.monotonic() - began_s < 60.0
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert all(type(outcome) is error and outcome.exit_code == code for outcome in outcomes)  # type: ignore[attr-defined]
    assert "torch sees no GPU" in str(outcomes[0]) and "fix: check the modules" in str(outcomes[0])
    assert [failure.host for failure in recorded] == ["b"]


@pytest.mark.parametrize("over_tcp", [False, True], ids=["HashStore", "TCPStore"])
def test_ranks_that_do_not_come_are_named_on_all_others(over_tcp: bool) -> None:
    found: list[RankReport | None] = list(reports(dict.fromkeys("abc", ROCM7)))
    found[3] = found[4] = None
    outcomes, recorded, _ = ends(found, 0.5, over_tcp)
    assert [type(outcome) for outcome in outcomes] == [RankFailure] * 3 + [type(None)] * 2 + [RankFailure]
    assert all("2 of 6 ranks did not start within 0.5 s: [3-4]" in str(outcomes[rank]) for rank in (0, 1, 2, 5))
    assert [(failure.cause, failure.rank) for failure in recorded] == [("crash", 3)]
