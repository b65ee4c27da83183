"""The supervisor's choice of nodes after lost nodes, and before rank 0 moves."""

from __future__ import annotations

from dataclasses import replace

from frontier_llm.cluster.decide import LOCK_STALE_S, RESERVE_S, Requeue, Start, Successor
from tests.harness.decisions import FIRST_TWO, JOB, NEW, NOW, WITHOUT_N1, Row, after, made, table_test

TABLE: list[Row] = [
    # nodes
    (
        "a dead node is replaced by the spare",
        JOB,
        after(made("node failure", 0, 9)),
        replace(NOW, unhealthy=("n1",)),
        Start,
        {"nodes": WITHOUT_N1, "avoid": ("n1",), "wait_s": 0.0},
    ),
    (
        "a host that has failed before is used last",
        JOB,
        replace(NEW, bad_hosts=frozenset({"n0"})),
        NOW,
        Start,
        {"nodes": ("n1", "n2")},
    ),
    (
        "but before none",
        JOB,
        replace(NEW, bad_hosts=frozenset({"n0"})),
        replace(NOW, unhealthy=("n1",)),
        Start,
        {"nodes": WITHOUT_N1},
    ),
    (
        "a slow host is used last and avoided",
        JOB,
        NEW,
        replace(NOW, slow_hosts=("n0",)),
        Start,
        {"nodes": ("n1", "n2"), "avoid": ("n0",)},
    ),
    (
        "a host with two crashes is used last",
        JOB,
        after(*[made("crash", step, step + 1, failed_host="n0") for step in (1, 2)]),
        NOW,
        Start,
        {"nodes": ("n1", "n2")},
    ),
    (
        "a host with one crash is used again",
        JOB,
        after(made("crash", 1, 2, failed_host="n0")),
        NOW,
        Start,
        {"nodes": FIRST_TWO},
    ),
    (
        "a host that computed wrongly is never used",
        JOB,
        after(made("wrong results", 0, 1), history=replace(NEW, untrusted_hosts=frozenset({"n1"}))),
        NOW,
        Start,
        {"nodes": WITHOUT_N1},
    ),
    (
        "too few nodes: the same job again",
        JOB,
        after(made("node failure", 0, 9)),
        replace(NOW, unhealthy=("n0", "n1")),
        Requeue,
        {"reason": "n[0-1] failed; only 1 of the 2 needed nodes are left", "avoid": ("n0", "n1")},
    ),
    (
        "a draining node is not used, but also not avoided later",
        JOB,
        after(made("crash", 0, 9)),
        replace(NOW, draining=("n1",)),
        Start,
        {"nodes": WITHOUT_N1, "avoid": ()},
    ),
    (
        "too few nodes because they drain",
        JOB,
        after(made("crash", 0, 9)),
        replace(NOW, draining=("n0", "n1"), unhealthy=("n2",)),
        Requeue,
        {"reason": "n[0-2] failed or are draining; only 0 of the 2 needed nodes are left", "avoid": ("n2",)},
    ),
    (
        "with an untrusted host: not the same job, which may get the same nodes",
        JOB,
        replace(NEW, untrusted_hosts=frozenset({"n1", "n2"})),
        NOW,
        Successor,
        {"reason": "n[1-2] failed; only 1 of the 2 needed nodes are left"},
    ),
    (
        "an untrusted host elsewhere does not matter",
        JOB,
        after(made("interrupted", 0, 9), history=replace(NEW, untrusted_hosts=frozenset({"n9"}))),
        NOW,
        Requeue,
        {},
    ),
    (
        "a slow host is avoided by the next job",
        JOB,
        after(made("interrupted", 0, 9)),
        replace(NOW, slow_hosts=("n1",)),
        Requeue,
        {"avoid": ("n1",)},
    ),
    # rank 0 moves to another node: its lock must be stale
    (
        "rank 0's new node waits until the old lock is stale",
        JOB,
        after(made("node failure", 0, 9)),
        replace(NOW, unhealthy=("n0",), unix_s=NOW.unix_s + 10),
        Start,
        {"nodes": ("n1", "n2"), "wait_s": LOCK_STALE_S - 10, "deadline_s": 7200 - LOCK_STALE_S + 10 - RESERVE_S},
    ),
    (
        "not after an orderly end",
        JOB,
        after(made("interrupted", 0, 9), own=0),
        replace(NOW, unhealthy=("n0",)),
        Start,
        {"wait_s": 0.0},
    ),
    (
        "also after a crash of an earlier job",
        JOB,
        after(made("crash", 0, 9), own=0),
        replace(NOW, unhealthy=("n0",)),
        Start,
        {"wait_s": LOCK_STALE_S},
    ),
    (
        "at most so long, if the clock was set back",
        JOB,
        after(made("crash", 0, 9)),
        replace(NOW, unhealthy=("n0",), unix_s=NOW.unix_s - 9000),
        Start,
        {"wait_s": LOCK_STALE_S},
    ),
]


test_decision = table_test(TABLE)
