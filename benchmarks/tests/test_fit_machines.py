"""The fit of other clusters recovers the constants that generated the data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.planner.fit_machines import KNEE, fit_rows, starting_point, update_machine
from benchmarks.published.datasets import FITTED, shipped
from benchmarks.published.predict import cluster, cluster_rates, predict
from frontier_llm.config import configs_dir
from frontier_llm.experiments.measure.ceilings import ceilings_of
from frontier_llm.experiments.measure.fit import soften
from frontier_llm.experiments.measure.machine_file import value_of
from frontier_llm.machine.load import load_machine, rates


def test_the_fit_recovers_constants_that_made_the_data() -> None:
    rows = [row for row in shipped() if row.dataset == "Megatron SC'21 table 1"]
    keys = ("gemm_efficiency", "fabric_latency_s")
    start = starting_point("a100", cluster_rates("a100", "megatron-lm"), keys)
    truth = replace(start, gemm_efficiency=0.6, fabric_latency_s=60e-6)
    made = [replace(row, seconds=one.seconds) for row, one in zip(rows, predict(rows, truth), strict=True)]
    best = fit_rows(made, start, keys)
    assert best.gemm_efficiency == pytest.approx(0.6, rel=0.01)
    assert max(abs(one.error) for one in predict(made, best)) < 0.01


def test_a_fit_never_exceeds_a_ceiling() -> None:
    """The data are made with constants above their ceilings, as if another part of the formula were too slow."""
    rows = [row for row in shipped() if row.dataset == "Megatron SC'21 table 1"]
    keys = (
        "gemm_efficiency",
        "hbm_efficiency",
        "fabric_bytes_s",
        "network_efficiency",
    )
    shipped_rates = cluster_rates("a100", "megatron-lm")
    start = starting_point("a100", shipped_rates, keys)
    above = replace(
        start,
        gemm_efficiency=0.99,
        hbm_efficiency=0.99,
        fabric_bytes_s=(290e9, 290e9, 290e9),
        network_efficiency=1.0,
    )
    made = []
    for one in predict(rows, above):
        row = replace(one.row, seconds=one.seconds)
        made.append(row)
    best = fit_rows(made, start, keys)
    limits = ceilings_of("sm_80")
    for key in keys:
        value = value_of(best, key)
        assert value <= limits[key].value
    assert best.gemm_efficiency == limits["gemm_efficiency"].value


@pytest.mark.parametrize(("machine", "stack"), FITTED)
def test_each_fitted_rate_has_a_ceiling(machine: str, stack: str) -> None:
    architecture = cluster(machine).device.architecture
    limits = ceilings_of(architecture)
    neither_rates_nor_shares = {
        "gemm_k_half",
        "unaligned_penalty",
        "fabric_latency_s",
        "fabric_hop_s",
        "network_latency_s",
        "kernel_s",
        "launch_s",
        "microbatch_s",
        "step_s",
    }
    for constant in FITTED[machine, stack]:
        name, _, _ = constant.partition("/")
        assert name in limits or name in neither_rates_nor_shares


def test_stalled_runs_count_by_their_size_and_not_by_its_square() -> None:
    assert soften(np.array([0.01]), KNEE) == pytest.approx([0.01])
    assert float(soften(np.array([1.0]), KNEE)[0]) < 0.3


def test_the_fitted_constants_stand_in_the_file_and_nothing_else_changes(tmp_path: Path) -> None:
    """The values equal the result of an earlier fit by separate code."""
    keys = ("unaligned_penalty", "fabric_share")
    rows = [row for row in shipped() if (row.machine, row.stack) == ("frontier", "gpt-neox") and row.may_be_fitted]
    best = fit_rows(rows, starting_point("frontier", rates(load_machine("frontier"), "gpt-neox"), keys), keys)
    before = (configs_dir() / "machines" / "frontier.yaml").read_text(encoding="utf-8")
    path = tmp_path / "frontier.yaml"
    path.write_text(before, encoding="utf-8")
    update_machine(
        path,
        "gpt-neox",
        best,
        keys,
        "a test",
    )
    changed = set(path.read_text(encoding="utf-8").splitlines()) - set(before.splitlines())
    assert changed == {
        '    unaligned_penalty: {value: 2.086, tag: estimated, source: "a test"}',
        '    fabric_share: {value: 0.05531, tag: estimated, source: "a test"}',
    }


def test_a_number_is_written_for_its_stack_and_its_group_size(tmp_path: Path) -> None:
    path = tmp_path / "frontier.yaml"
    path.write_text((configs_dir() / "machines" / "frontier.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    numbers = rates(load_machine("frontier"))
    size = numbers.fabric_size[1]
    speeds = tuple(1e9 * place for place in range(1, len(numbers.fabric_bytes_s) + 1))
    made = replace(numbers, fabric_bytes_s=speeds, gemm_efficiency=0.123)
    update_machine(
        path,
        "megatron-deepspeed",
        made,
        [f"fabric_bytes_s/{size}", "gemm_efficiency"],
        "a test",
    )
    written = load_machine(str(path))
    assert rates(written, "megatron-deepspeed").gemm_efficiency == 0.123
    own = rates(written)
    assert own.gemm_efficiency == numbers.gemm_efficiency
    assert own.fabric_bytes_s == (numbers.fabric_bytes_s[0], 2e9, *numbers.fabric_bytes_s[2:])
