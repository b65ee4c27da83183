"""A machine file made of micro-benchmarks gives back the machine that made them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from frontier_llm.config import load_run
from frontier_llm.costs.collectives import node_ring_s
from frontier_llm.costs.kernels import flash_s, gemm_s
from frontier_llm.costs.layer import elementwise
from frontier_llm.costs.time import step_s
from frontier_llm.machine import Rates, load_machine, rates
from frontier_llm.planner.calibration import _workload, calibrated_rates, machine_content, report

CONFIG = load_run("bench", ["parallel.tensor=2"])
TRUTH = replace(
    rates(load_machine("local")),
    peak_flops=2e11, gemm_efficiency=0.8, gemm_k_half=50.0, hbm_bytes_s=2e10, hbm_efficiency=0.5, kernel_s=8e-6, launch_s=0.0,
    flash_efficiency=0.15, flash_backward=0.5, fabric_size=(2, 3), fabric_bytes_s=(2e9, 2e9), fabric_latency_s=1e-4, fabric_hop_s=0.0,
    microbatch_s=3e-3, step_s=8e-3, optimizer_bytes=40.0, node_devices=2,
)  # fmt: skip


@dataclass
class Made:
    """Samples that TRUTH would give."""

    ranks: int
    device: str
    dtype: str
    memory_bytes: float
    gemm: list
    attention: list
    elementwise_s: float
    copy: tuple
    dispatch_s: float
    adamw: tuple
    all_reduce: list
    steps: list


def samples(truth: Rates = TRUTH) -> Made:
    shapes = [(M, N, K) for M in (256, 1024, 2048) for N in (384, 1536) for K in (192, 384, 1536)]
    attention = [(B, 6, 256, 64, *(float(side) for side in flash_s(B, 6, 256, 64, truth))) for B in (4, 8)]
    return Made(
        2, "cpu", "bf16", 4e9,
        [(*shape, float(gemm_s(*shape, truth))) for shape in shapes],
        attention,
        float(elementwise(_workload(CONFIG, 2, 1), truth)[0]),
        (1e9, 1e9 / truth.hbm_bytes_s),
        truth.kernel_s,
        (1e6, 1e6 * truth.optimizer_bytes / (truth.hbm_bytes_s * truth.hbm_efficiency)),
        [(size, float(node_ring_s(truth, 2, size, 2))) for size in (8, 2**16, 2**24)],
        [(m, float(step_s(_workload(CONFIG, 2, m), truth))) for m in (1, 4)],
    )  # fmt: skip


def test_the_calibrated_machine_predicts_what_was_sampled() -> None:
    made = samples()
    found = calibrated_rates(made, CONFIG, rates(load_machine("local")))
    for M, N, K, seconds in made.gemm:
        assert float(gemm_s(M, N, K, found)) == pytest.approx(seconds, rel=0.12)
    assert found.hbm_efficiency == pytest.approx(0.5, rel=0.05)
    assert found.flash_backward == pytest.approx(0.5, rel=0.05)
    assert found.fabric_bytes_s[0] == pytest.approx(2e9, rel=0.02)
    assert found.fabric_latency_s == pytest.approx(1e-4, rel=0.02)
    for m in (1, 2, 4, 16):
        assert float(step_s(_workload(CONFIG, 2, m), found)) == pytest.approx(float(step_s(_workload(CONFIG, 2, m), TRUTH)), rel=0.05)


def test_host_time_that_is_not_there_is_not_invented() -> None:
    found = calibrated_rates(samples(replace(TRUTH, microbatch_s=0.0, step_s=0.0)), CONFIG, rates(load_machine("local")))
    assert found.microbatch_s < 0.05 * float(step_s(_workload(CONFIG, 2, 1), found))


def test_the_file_loads_and_every_calibrated_number_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(machine_content(samples(), CONFIG, "2026-01-02")))
    machine = load_machine(str(path))
    assert machine.devices_per_node == 2
    assert machine.stacks["frontier-llm"].gemm_efficiency.tag == "measured"
    assert "2 ranks at once, cpu, bf16" in machine.device.peak_tflops.source
    assert rates(machine).hbm_bytes_s == pytest.approx(2e10)
    assert "all-reduce over 2 ranks" in report(samples(), CONFIG)
