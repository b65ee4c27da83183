"""The supervisor's decisions as a table: records in, one decision out. tests/slurm tests them on a real Slurm."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

from frontier_llm.cluster import decide as decide_module
from frontier_llm.cluster.decide import LOCK_STALE_S, RESERVE_S, Done, GiveUp, Requeue, Start, Successor
from tests.harness.decisions import (
    BUDGET,
    FIRST_TWO,
    JOB,
    NEVER,
    NEW,
    NOW,
    SUCCESSOR,
    WITHOUT_N1,
    Row,
    after,
    made,
    table_test,
)

TABLE: list[Row] = [
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
    # budget: Slurm charges 2 nodes and a spare node, so 12 node-hours last 4 h
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
    (
        "ranks keep half of a short warning to save",
        replace(JOB, warning_s=60.0),
        NEW,
        NOW,
        Start,
        {"deadline_s": 7200.0 - 30.0},
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


test_decision = table_test(TABLE)


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
