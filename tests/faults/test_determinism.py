"""Two runs with the same seed are equal, bit for bit. Replicas that compute the same step agree, and a replica that
differs is named.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from frontier_llm.run import run_dir
from tests.faults.test_policies import decisions
from tests.harness.marks import but_first
from tests.harness.runs import Run

LAYOUT = ("parallel.data=2", "parallel.tensor=2", "parallel.sequence_parallel=true")


@pytest.mark.parametrize("dtype", but_first(["bf16", "fp32"], in_ci=1))
@pytest.mark.thorough
def test_same_seed_twice_is_bit_equal(dtype: str, tmp_path: Path) -> None:
    once, again = (Run(tmp_path / name, overrides=(*LAYOUT, f"precision.dtype={dtype}")) for name in ("once", "again"))
    assert once.finish()[0] == again.finish()[0] == 0
    assert once.losses() == again.losses() and once.shards() == again.shards()
    other = Run(tmp_path / "other", overrides=(*LAYOUT, f"precision.dtype={dtype}", "train.seed=5"))
    assert other.finish()[0] == 0 and other.losses() != once.losses()


@pytest.mark.thorough
def test_recomputing_changes_nothing_and_is_silent_in_a_clean_run(tmp_path: Path) -> None:
    without, checked = (
        Run(tmp_path / name, overrides=(*LAYOUT, *more))
        for name, more in (("a", ()), ("b", ("guard.recompute_interval=1",)))
    )
    assert without.finish()[0] == checked.finish()[0] == 0
    assert checked.losses() == without.losses() and checked.shards() == without.shards()
    assert not (checked.run_dir / "decisions.jsonl").exists()


@pytest.mark.thorough
def test_a_perturbed_result_is_classified_with_its_rank(tmp_path: Path) -> None:
    run = Run(tmp_path, overrides=("parallel.data=3", "batch.global_batch=6", "guard.recompute_interval=4"))
    code, output, _ = run.finish("train.recomputed@1#2=perturb")
    assert code == 0 and "step 4: transient error on rank 1 on" in output
    assert [(entry["step"], entry["rank"], entry["kind"]) for entry in decisions(run)] == [(4, 1, "transient")]
    lasting = Run(tmp_path / "lasting", overrides=run.overrides)
    code, output, _ = lasting.finish("train.recomputed@2#1%=perturb")
    assert code == 1 and "persistent error on rank 2 on" in output and "start again without these hosts" in output
    failure = lasting.failure()
    host = os.uname().nodename
    assert (failure["rank"], failure["host"], failure["step"]) == (2, host, 4) and "weight" in str(failure["suspects"])
    assert run_dir.bad_hosts(lasting.run_dir) == [host]
    assert "rank 1 on" not in output.split("persistent error")[1].splitlines()[0]
