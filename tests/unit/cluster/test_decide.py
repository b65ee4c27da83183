"""The supervisor's decisions as a table: records in, one decision out. tests/slurm tests them on a real Slurm."""

from __future__ import annotations

import ast
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.cluster import decide as decide_module
from frontier_llm.cluster.decide import (
    LOCK_STALE_S,
    RESERVE_S,
    Decision,
    Done,
    GiveUp,
    History,
    Now,
    Requeue,
    Start,
    Successor,
    decide,
)
from frontier_llm.run.job import Job
from frontier_llm.run.run_dir import Attempt

JOB = Job(run_dir="/run", words=("run.yaml",), site="local", nodes=2, spares=1, warning_s=120.0)
NODES = ("n0", "n1", "n2")
NOW = Now(unix_s=1_000_000.0, nodes=NODES, time_left_s=7200.0)
NEW = History(target_step=100)
FIRST_TWO = ("n0", "n1")
WITHOUT_N1 = ("n0", "n2")


def made(
    cause: str, start_step: int = 0, end_step: int = 0, *, hours: float = 1.0, exit_code: int = 1, **fields: Any
) -> Attempt:
    """Return a start of the ranks on n0 and n1 that ends now."""
    values = {
        "incarnation": 1,
        "job_id": "7",
        "nodes": FIRST_TWO,
        "started_unix_s": NOW.unix_s - 3600 * hours,
        "ended_unix_s": NOW.unix_s,
        **fields,
    }
    return Attempt(start_step=start_step, end_step=end_step, exit_code=exit_code, cause=cause, **values)


def after(*attempts: Attempt, own: int = 1, history: History = NEW) -> History:
    """Return the history with these starts. The last `own` of them belong to this supervisor."""
    for number, attempt in enumerate(attempts):
        history = history.after(attempt, attempt.end_step, is_own=number >= len(attempts) - own)
    return history


def failed_start(cause: str = "crash", **fields: Any) -> Attempt:
    """Return a start that ended after half an hour, before its first step."""
    return made(cause, 5, 5, hours=0.5, last_step=5, **fields)


def out_of_memory(plan: tuple[str, ...]) -> Attempt:
    """Return a start that was out of memory in the step after the newest checkpoint."""
    return made("out of memory", 5, 5, plan=plan)


NO_PROGRESS = [made("crash", 5, 5)] * 3
STOPPED_EARLY = [made("interrupted", 5, 5, exit_code=75)] * 3
NEVER = replace(JOB, continuation="never")
SUCCESSOR = replace(JOB, continuation="successor")
BUDGET = replace(JOB, max_node_hours=12.0)
OWN_PLAN = ("parallel.tensor=2",)
ROOMY_PLAN = ("parallel.tensor=8",)
TWO_PLANS = replace(JOB, plans=(OWN_PLAN, ROOMY_PLAN))

# (behaviour, job, history, now, class of the decision, expected fields)
TABLE: list[tuple[str, Job, History, Now, type, dict[str, Any]]] = [
    ("a new run starts on the first nodes", JOB, NEW, NOW, Start, {"nodes": FIRST_TWO, "wait_s": 0.0}),
    ("ranks end before the walltime", JOB, NEW, NOW, Start, {"deadline_s": 7200.0 - RESERVE_S}),
    ("no walltime, no deadline", JOB, NEW, replace(NOW, time_left_s=None), Start, {"deadline_s": None}),
    ("a run that is done ends", JOB, replace(NEW, saved_step=100), NOW, Done, {"reason": "finished: step 100 of 100"}),
    (
        "a run that is done needs no walltime",
        JOB,
        replace(NEW, saved_step=100),
        replace(NOW, time_left_s=1.0),
        Done,
        {"reason": "finished: step 100 of 100"},
    ),
    (
        "a run without a final checkpoint ends after its last start",
        JOB,
        after(made("finished", exit_code=0), history=replace(NEW, saves_final=False)),
        NOW,
        Done,
        {"reason": "finished, without a final checkpoint (train.save_final=false)"},
    ),
    (
        "a finished start of an earlier job ends it, too",
        JOB,
        after(made("finished", exit_code=0), own=0, history=replace(NEW, saves_final=False)),
        NOW,
        Done,
        {"reason": "finished, without a final checkpoint (train.save_final=false)"},
    ),
    (
        "STOP ends the run",
        JOB,
        NEW,
        replace(NOW, stop_requested=True),
        Done,
        {"reason": "stopped at step 0 by /run/STOP; delete the file to continue"},
    ),
    (
        "STOP ends a run whose ranks have saved because of it",
        JOB,
        after(made("interrupted", 0, 7, exit_code=75)),
        replace(NOW, stop_requested=True),
        Done,
        {"reason": "stopped at step 7 by /run/STOP; delete the file to continue"},
    ),
    (
        "a node that failed preflight gives way to the spare",
        JOB,
        NEW,
        replace(NOW, failed_preflight=("n1",)),
        Start,
        {"nodes": WITHOUT_N1, "avoid": ("n1",)},
    ),
    (
        "with too few nodes after preflight a new job excludes them, because a requeued job can get them again",
        JOB,
        NEW,
        replace(NOW, failed_preflight=("n0", "n1")),
        Successor,
        {"avoid": ("n0", "n1"), "reason": "n[0-1] failed; only 1 of the 2 needed nodes are left"},
    ),
    (
        "too few nodes after preflight end a run that is not continued",
        NEVER,
        NEW,
        replace(NOW, failed_preflight=("n0", "n1")),
        GiveUp,
        {"avoid": ("n0", "n1")},
    ),
    # budget: Slurm charges 2 nodes and a spare, so 12 node-hours last 4 h
    ("ranks save when the budget ends", BUDGET, NEW, NOW, Start, {"save_after_s": 4 * 3600 - 120.0}),
    (
        "all nodes of the allocation are charged",
        BUDGET,
        replace(NEW, allocated_nodes=4),
        NOW,
        Start,
        {"save_after_s": 3 * 3600 - 120.0},
    ),
    (
        "the node-hours of all jobs count for the budget",
        BUDGET,
        replace(after(made("interrupted", 3, 9), own=0), node_hours=9.0),
        NOW,
        Start,
        {"save_after_s": 3600 - 120.0},
    ),
    (
        "and so does the wait for a lock",
        BUDGET,
        replace(after(made("node failure", 0, 9)), node_hours=9.0),
        replace(NOW, unhealthy=("n0",)),
        Start,
        {"save_after_s": 3600 - 120.0 - LOCK_STALE_S},
    ),
    (
        "a budget that is too small for a save ends the run",
        BUDGET,
        replace(after(made("interrupted", 0, 9), own=0), node_hours=11.96),
        NOW,
        Done,
        {"reason": "12.0 of 12.0 node-hours are used"},
    ),
    ("no budget, no reminder", JOB, NEW, NOW, Start, {"save_after_s": float("inf")}),
    # walltime
    (
        "a walltime shorter than the warning is refused before any rank starts",
        replace(JOB, warning_s=2010.0),
        NEW,
        replace(NOW, time_left_s=1200.0),
        GiveUp,
        {"exit_code": 2, "problem": "only 1200 s are left, but ranks are warned to save 2010 s before its end"},
    ),
    (
        "and the repair is named",
        replace(JOB, warning_s=2011.0),
        NEW,
        replace(NOW, time_left_s=1200.0),
        GiveUp,
        {"problem": "sbatch --time=68"},
    ),
    (
        "an earlier job's end does not count as the warning of this one",
        JOB,
        after(made("interrupted", 0, 9), own=0),
        NOW,
        Start,
        {"nodes": FIRST_TWO},
    ),
    (
        "ranks that were told to end are continued by the same job",
        JOB,
        after(made("interrupted", 0, 9, exit_code=75)),
        NOW,
        Requeue,
        {},
    ),
    ("ranks that did not end in time are continued", JOB, after(made("walltime", 0, 9)), NOW, Requeue, {}),
    (
        "ranks that ended in order before the last step are continued",
        JOB,
        after(made("finished", 0, 9, exit_code=0)),
        NOW,
        Requeue,
        {},
    ),
    ("a crash is tried again here", JOB, after(made("crash", 0, 9)), NOW, Start, {"nodes": FIRST_TWO}),
    (
        "not after the warning, which may come a minute early",
        JOB,
        after(made("crash", 0, 9)),
        replace(NOW, time_left_s=179.0),
        Requeue,
        {},
    ),
    (
        "just before it",
        JOB,
        after(made("crash", 0, 9)),
        replace(NOW, time_left_s=181.0),
        Start,
        {"deadline_s": 181.0 - RESERVE_S},
    ),
    (
        "a job without a warning keeps time to requeue",
        replace(JOB, warning_s=0.0),
        after(made("crash", 0, 9)),
        replace(NOW, time_left_s=59.0),
        Requeue,
        {},
    ),
    # crash loop
    (
        "three starts without progress are given up",
        JOB,
        after(*NO_PROGRESS),
        NOW,
        GiveUp,
        {
            "exit_code": 1,
            "problem": "three attempts in a row ended at step 5, so the run is not started again",
        },
    ),
    ("two are not", JOB, after(*NO_PROGRESS[:2]), NOW, Start, {"nodes": FIRST_TWO}),
    (
        "the exit code of the ranks is passed on",
        JOB,
        after(*NO_PROGRESS[:2], made("crash", 5, 5, exit_code=137)),
        NOW,
        GiveUp,
        {"exit_code": 137},
    ),
    (
        "one step of progress begins the count again",
        JOB,
        after(*NO_PROGRESS[:2], made("crash", 5, 6)),
        NOW,
        Start,
        {"nodes": FIRST_TWO},
    ),
    (
        "a node failure between crashes does not count",
        JOB,
        after(*NO_PROGRESS[:2], made("node failure", 5, 5)),
        NOW,
        Start,
        {},
    ),
    (
        "nor does it break the count",
        JOB,
        after(*NO_PROGRESS[:2], made("node failure", 5, 5), NO_PROGRESS[2]),
        NOW,
        GiveUp,
        {"problem": "the run is not started again"},
    ),
    ("a new job tries again after a crash loop", JOB, after(*NO_PROGRESS, own=0), NOW, Start, {"nodes": FIRST_TWO}),
    (
        "a job that is warned at its start is not requeued without end",
        JOB,
        after(*STOPPED_EARLY),
        NOW,
        GiveUp,
        {"exit_code": 2, "problem": "had to stop before they saved a further step"},
    ),
    (
        "and the text names the warning time",
        JOB,
        after(*STOPPED_EARLY),
        NOW,
        GiveUp,
        {"problem": "--signal=USR1@N of the script, and job.warning_s, here 120 s"},
    ),
    (
        "a finished run is not a crash loop",
        JOB,
        after(made("crash", 100, 100), made("crash", 100, 100), made("finished", 100, 100, exit_code=0)),
        NOW,
        Done,
        {},
    ),
    # failed starts: 2 nodes and a spare may use 9 node-hours; each of these uses 2 nodes for half an hour
    (
        "starts that fail before a step are not counted by number",
        JOB,
        after(*[failed_start()] * 8),
        NOW,
        Start,
        {"nodes": FIRST_TWO},
    ),
    (
        "they are bounded in node-hours",
        JOB,
        after(*[failed_start()] * 9),
        NOW,
        GiveUp,
        {"exit_code": 1, "problem": "9 starts in a row failed before their first step and used 9.0 node-hours"},
    ),
    (
        "the job sets the limit",
        replace(JOB, failed_start_node_hours=2.0),
        after(*[failed_start()] * 2),
        NOW,
        GiveUp,
        {"problem": "the limit is 2.0, so the run is not started again"},
    ),
    (
        "one finished step begins the count again",
        JOB,
        after(*[failed_start()] * 8, made("crash", 5, 5, last_step=6), *[failed_start()] * 8),
        NOW,
        Start,
        {},
    ),
    (
        "node failures before a step use node-hours, too",
        JOB,
        after(*[failed_start("node failure")] * 9),
        NOW,
        GiveUp,
        {"problem": "failed before their first step"},
    ),
    (
        "failed starts between crashes without progress do not count as such",
        JOB,
        after(*NO_PROGRESS[:2], failed_start(), failed_start()),
        NOW,
        Start,
        {},
    ),
    (
        "a new job after the limit tries once",
        JOB,
        after(*[failed_start()] * 9, own=0),
        NOW,
        Start,
        {},
    ),
    (
        "the same error of the program three times is given up",
        JOB,
        after(*[failed_start(fault="ValueError: vocabulary of # tokens")] * 3),
        NOW,
        GiveUp,
        {"problem": "3 starts in a row failed before their first step with the same error"},
    ),
    (
        "different errors are not",
        JOB,
        after(*[failed_start(fault=fault) for fault in ("a", "b", "a")]),
        NOW,
        Start,
        {},
    ),
    # out of memory: the roomier plan
    ("the run's own plan comes first", TWO_PLANS, NEW, NOW, Start, {"plan": 0}),
    (
        "out of memory switches to the roomier plan, in the same job and from the newest checkpoint",
        TWO_PLANS,
        after(out_of_memory(OWN_PLAN)),
        NOW,
        Start,
        {"plan": 1, "nodes": FIRST_TWO},
    ),
    (
        "so do allocator retries, which save before they end the start",
        TWO_PLANS,
        after(made("out of memory", 5, 15, plan=OWN_PLAN)),
        NOW,
        Start,
        {"plan": 1, "nodes": FIRST_TWO},
    ),
    ("without a roomier plan it starts again", JOB, after(out_of_memory(())), NOW, Start, {"plan": 0}),
    ("no other cause switches", TWO_PLANS, after(made("crash", 5, 5, plan=OWN_PLAN)), NOW, Start, {"plan": 0}),
    ("nor a dead node", TWO_PLANS, after(made("node failure", 5, 5, plan=OWN_PLAN)), NOW, Start, {"plan": 0}),
    (
        "the run never goes back",
        TWO_PLANS,
        after(out_of_memory(OWN_PLAN), made("interrupted", 5, 50, plan=ROOMY_PLAN, exit_code=75), own=0),
        NOW,
        Start,
        {"plan": 1},
    ),
    (
        "not even if the roomier plan is out of memory, too",
        TWO_PLANS,
        after(out_of_memory(OWN_PLAN), out_of_memory(ROOMY_PLAN)),
        NOW,
        Start,
        {"plan": 1},
    ),
    (
        "three times out of memory with the roomier plan are given up",
        TWO_PLANS,
        after(out_of_memory(OWN_PLAN), *[out_of_memory(ROOMY_PLAN)] * 3),
        NOW,
        GiveUp,
        {"problem": "three attempts in a row ended at step 5"},
    ),
    (
        "starts of the own plan do not count for the roomier one",
        TWO_PLANS,
        after(*[made("crash", 5, 5, plan=OWN_PLAN)] * 2, out_of_memory(OWN_PLAN), out_of_memory(ROOMY_PLAN)),
        NOW,
        Start,
        {"plan": 1},
    ),
    (
        "and are not a reason to give up before the switch",
        TWO_PLANS,
        after(*[made("crash", 5, 5, plan=OWN_PLAN)] * 2, out_of_memory(OWN_PLAN)),
        NOW,
        Start,
        {"plan": 1},
    ),
    (
        "before the first step, too: failed starts of the own plan are not counted any more",
        replace(TWO_PLANS, failed_start_node_hours=1.0),
        after(failed_start("out of memory", plan=OWN_PLAN)),
        NOW,
        Start,
        {"plan": 1},
    ),
    (
        "with too little time the next job uses the roomier plan",
        TWO_PLANS,
        after(out_of_memory(OWN_PLAN)),
        replace(NOW, time_left_s=100.0),
        Requeue,
        {},
    ),
    ("and so it does", TWO_PLANS, after(out_of_memory(OWN_PLAN), own=0), NOW, Start, {"plan": 1}),
    (
        "a new submission with another plan tries that plan",
        replace(TWO_PLANS, plans=(("parallel.tensor=4",), ROOMY_PLAN)),
        after(out_of_memory(OWN_PLAN), own=0),
        NOW,
        Start,
        {"plan": 0},
    ),
    (
        "a new submission with more nodes tries the own plan",
        replace(TWO_PLANS, nodes=3),
        after(out_of_memory(OWN_PLAN), own=0),
        NOW,
        Start,
        {"plan": 0},
    ),
    # refusal
    ("skipped steps end the job", JOB, after(made("not finite", exit_code=2)), NOW, GiveUp, {"exit_code": 2}),
    ("a refusal ends the job at once", JOB, after(made("refused", exit_code=2)), NOW, GiveUp, {"exit_code": 2}),
    (
        "even if STOP exists",
        JOB,
        after(made("refused", exit_code=2)),
        replace(NOW, stop_requested=True),
        GiveUp,
        {"exit_code": 2},
    ),
    (
        "a refusal of an earlier job does not count",
        JOB,
        after(made("refused", exit_code=2), own=0),
        NOW,
        Start,
        {"nodes": FIRST_TWO},
    ),
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
    # rank 0 moves: its lock must be stale
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
    # continuation
    ("a successor, if the job says so", SUCCESSOR, after(made("interrupted", 0, 9)), NOW, Successor, {}),
    (
        "never: an orderly end is a success",
        NEVER,
        after(made("interrupted", 0, 9, exit_code=75)),
        NOW,
        Done,
        {"reason": "not continued: job.continuation is never"},
    ),
    (
        "never: a node failure is a failure",
        NEVER,
        after(made("node failure", 0, 9, exit_code=137)),
        replace(NOW, unhealthy=("n0", "n1")),
        GiveUp,
        {"exit_code": 137, "problem": "only 1 of the 2 needed nodes are left", "avoid": ("n0", "n1")},
    ),
    (
        "never: too few nodes from the beginning are a failure",
        NEVER,
        NEW,
        replace(NOW, unhealthy=("n0", "n1")),
        GiveUp,
        {"exit_code": 1},
    ),
    (
        "never: ranks that did not end in time are a failure",
        NEVER,
        after(made("walltime", 0, 9)),
        NOW,
        GiveUp,
        {"exit_code": 1},
    ),
    (
        "never: a crash after the warning is a failure",
        NEVER,
        after(made("crash", 0, 9, exit_code=70)),
        replace(NOW, time_left_s=100.0),
        GiveUp,
        {"exit_code": 70},
    ),
]


@pytest.mark.parametrize(("shows", "job", "history", "now", "kind", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_decision(shows: str, job: Job, history: History, now: Now, kind: type, expected: dict[str, Any]) -> None:
    decision = decide(job, history, now)
    assert type(decision) is kind, decision
    for name, value in expected.items():
        found = getattr(decision, name)
        if isinstance(value, str):
            assert value in str(found)
        else:
            assert found == (pytest.approx(value) if isinstance(value, float) else value), name


def test_the_module_reaches_neither_disk_nor_clock_nor_processes() -> None:
    allowed = {
        "__future__",
        "math",
        "dataclasses",
        "frontier_llm.errors",
        "frontier_llm.run",
        "frontier_llm.run.failure",
        "frontier_llm.run.holder",
        "frontier_llm.run.job",
        "frontier_llm.run.run_dir",
    }
    names = {
        "hostlist",
        "FILE",
        "STALE_AFTER_S",
        "Job",
        "STOP_FILE",
        "Attempt",
        "crashed_twice",
        "is_finished",
    }
    tree = ast.parse(Path(decide_module.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert plain | {node.module for node in imports} == allowed
    of_run = {alias.name for node in imports if str(node.module).startswith("frontier_llm.run") for alias in node.names}
    assert of_run == names


def test_months_of_a_run_are_simulated_in_a_moment() -> None:
    """The decisions alone lead a run with failures to its end. Two simulations give the same result."""

    def simulate() -> tuple[int, list[str]]:
        history = replace(NEW, target_step=3000)
        clock = NOW.unix_s
        left_s = 0.0
        jobs = 0
        kinds: list[str] = []
        while not isinstance(decision := decide(JOB, history, Now(clock, NODES, time_left_s=left_s or 43200.0)), Done):
            kinds.append(type(decision).__name__)
            if isinstance(decision, Start):
                clock += decision.wait_s + 7200.0
                left_s = max(0.0, (left_s or 43200.0) - decision.wait_s - 7200.0)
                over = left_s < 7200.0
                cause = "interrupted" if over else "crash" if len(kinds) % 5 else "node failure"
                ended = made(
                    cause,
                    history.saved_step,
                    history.saved_step + 3,
                    nodes=decision.nodes,
                    failed_host="" if over else decision.nodes[-1],
                    started_unix_s=clock - 7200.0,
                    ended_unix_s=clock,
                )
                history = history.after(ended, ended.end_step)
            else:
                assert isinstance(decision, Requeue), decision
                history = replace(history, is_own=False)
                left_s = 0.0
                jobs += 1
        return jobs, kinds

    jobs, kinds = simulate()
    assert jobs > 100 and kinds.count("Start") == 1000
    assert simulate() == (jobs, kinds)


def chain_of_starts(seed: int, good_share: float) -> Decision:
    """Return the end of a chain on 384 nodes of which only `good_share` of the starts reach a step.

    A good start trains until the walltime of 12 h. Another start fails after ten minutes.
    """
    drawn = random.Random(seed)
    job = replace(JOB, nodes=384, spares=4, failed_start_node_hours=None)
    nodes = tuple(f"n{number}" for number in range(job.all_nodes))
    history = replace(NEW, target_step=30)
    clock = NOW.unix_s
    left_s = 43200.0
    while True:
        decision = decide(job, history, Now(clock, nodes, time_left_s=left_s))
        if isinstance(decision, Requeue):
            history = replace(history, is_own=False)
            left_s = 43200.0
        elif isinstance(decision, Start):
            is_good = drawn.random() < good_share
            seconds = left_s - 120.0 if is_good else 600.0
            step = history.saved_step + is_good
            ended = Attempt(
                incarnation=1,
                job_id="7",
                nodes=decision.nodes,
                start_step=history.saved_step,
                end_step=step,
                exit_code=75 if is_good else 1,
                cause="interrupted" if is_good else "crash",
                started_unix_s=clock,
                ended_unix_s=clock + seconds,
                last_step=step,
            )
            clock += seconds
            left_s -= seconds
            history = history.after(ended, step)
        else:
            return decision


def test_chains_with_less_than_half_good_starts_reach_their_end() -> None:
    """With a limit of three starts in a row, nearly every one of these chains died."""
    ends = [chain_of_starts(seed, good_share=0.45) for seed in range(100)]
    assert [type(end) for end in ends] == [Done] * len(ends)


def test_a_chain_without_a_good_start_ends_within_its_node_hours() -> None:
    end = chain_of_starts(seed=0, good_share=0.0)
    assert isinstance(end, GiveUp)
    assert "19 starts in a row failed before their first step and used 1,216.0 node-hours" in str(end.problem)
    assert "the limit is 1,164.0" in str(end.problem)
