"""A machine file from simulated micro-benchmarks gives the machine that they were made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from frontier_llm.blueprint.expert_work import EXPERTS
from frontier_llm.blueprint.items import FlashCore, Product
from frontier_llm.blueprint.layout import Layout, layout_of
from frontier_llm.blueprint.work import block_work, elementwise
from frontier_llm.config import load_model, load_run
from frontier_llm.config.schema import ParallelConfig
from frontier_llm.experiments.measure.calibration import Samples, calibrated_rates, non_negative, steps_layout
from frontier_llm.experiments.measure.link_tables import PLANNED
from frontier_llm.experiments.measure.machine_file import machine_content, report
from frontier_llm.experiments.measure.op_cases import grouped_calls, grouped_shapes
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.ops import select_run_ops
from frontier_llm.planner.costs.collectives import node_s
from frontier_llm.planner.costs.kernels import flash_s, memory_s, product_s
from frontier_llm.planner.costs.seconds import by_cause
from frontier_llm.planner.costs.time import step_s
from frontier_llm.planner.pipeline import simulate_step
from frontier_llm.topology.plan import make_plan
from frontier_llm.units import GIB
from tests.unit.experiments.recorded import assert_recorded

CONFIG = load_run("bench", ["parallel.tensor=2"])
MOE = load_model("moe-small")
TRUTH = replace(
    rates(load_machine("local")),
    peak_flops=2e11,
    gemm_efficiency=0.8,
    gemm_k_half=50.0,
    hbm_bytes_s=2e10,
    hbm_efficiency=0.5,
    kernel_s=8e-6,
    launch_s=2e-5,
    flash_efficiency=0.15,
    flash_backward=0.5,
    fabric_size=(2, 3),
    fabric_bytes_s=(2e9, 2e9),
    fabric_latency_s=1e-4,
    fabric_hop_s=0.0,
    microbatch_s=0.0,
    step_s=8e-3,
    optimizer_bytes=40.0,
    accumulate_bytes=0.0,
    node_devices=2,
    host_executes=True,
)
TENSOR = ParallelConfig(tensor=2)
SHARDED = ParallelConfig(data=2, data_mode="fsdp")
STEPS = ((4, 1), (4, 3), (1, 3))


def samples(truth: Rates = TRUTH, in_step: float = 1.0) -> Samples:
    """Return simulated samples. `in_step` is the ratio of a step's time to the sum of its kernels' times."""
    shapes = [(M, N, K) for M in (256, 1024, 2048) for N in (384, 1536) for K in (192, 384, 1536)]
    passes = elementwise(CONFIG.model, steps_layout(CONFIG, TENSOR, 4, 1), truth, CONFIG.model.ffn_hidden)[0]
    attention = [
        (B, 6, 256, 64, *(flash_s(FlashCore(B, 6, 256, 256, 64, backward), truth) for backward in (False, True)))
        for B in (4, 8)
    ]
    return Samples(
        2,
        "cpu",
        "bf16",
        4e9,
        [(*shape, product_s(Product(*shape), truth)) for shape in shapes],
        attention,
        memory_s(passes.moved_bytes, passes.kernels, truth),
        2,
        (1e9, 1e9 / truth.hbm_bytes_s),
        truth.kernel_s,
        (1e6, 1e6 * truth.optimizer_bytes / (truth.hbm_bytes_s * truth.hbm_efficiency)),
        [(name, 2, size, float(node_s(truth, 2, size, name))) for size in (1024, 2**16, 2**24) for name in PLANNED],
        [(1, 0.9), (2, 1.0)],
        [
            (B, m, in_step * float(step_s(CONFIG.model, steps_layout(CONFIG, ParallelConfig(), B, m), truth)))
            for B, m in STEPS
        ],
        [(B, m, float(step_s(CONFIG.model, steps_layout(CONFIG, TENSOR, B, m), truth))) for B, m in STEPS[1:]],
        [(B, m, float(step_s(CONFIG.model, steps_layout(CONFIG, SHARDED, B, m), truth))) for B, m in STEPS[1:]],
        surplus_bytes=0.5 * GIB,
    )


def calibrated(made: Samples) -> Rates:
    return calibrated_rates(made, CONFIG, rates(load_machine("local")))


def test_the_calibrated_machine_predicts_what_was_sampled() -> None:
    made = samples()
    found = calibrated(made)
    for M, N, K, seconds in made.gemm:
        assert product_s(Product(M, N, K), found) == pytest.approx(seconds, rel=0.02)
    assert found.hbm_efficiency == pytest.approx(0.5, rel=0.05)
    assert found.flash_backward == pytest.approx(0.5, rel=0.05)
    assert found.fabric_bytes_s[0] == pytest.approx(2e9, rel=0.02)
    assert found.fabric_latency_s == pytest.approx(1e-4, rel=0.02)
    assert found.launch_s == pytest.approx(2e-5, rel=0.1)
    for ranks, B, m in ((1, 4, 1), (1, 2, 4), (1, 1, 16), (2, 4, 4), (2, 1, 4)):
        w = steps_layout(CONFIG, ParallelConfig(tensor=ranks), B, m)
        assert float(step_s(CONFIG.model, w, found)) == pytest.approx(float(step_s(CONFIG.model, w, TRUTH)), rel=0.05)


def test_host_time_that_is_not_there_is_not_invented() -> None:
    bare = replace(TRUTH, launch_s=0.0, step_s=0.0)
    found = calibrated(samples(bare))
    assert found.launch_s < 0.1 * TRUTH.launch_s
    w = steps_layout(CONFIG, ParallelConfig(), 4, 1)
    assert float(step_s(CONFIG.model, w, found)) == pytest.approx(float(step_s(CONFIG.model, w, bare)), rel=0.03)


def test_kernels_that_are_slower_within_a_step_are_told_from_host_time() -> None:
    """All kernels take a quarter longer in a step than in a loop. The calibration must attribute this to the kernels,
    so that it does not grow with the number of microbatches.
    """
    made = samples(replace(TRUTH, launch_s=0.0, step_s=0.0), in_step=1.25)
    found = calibrated(made)
    assert found.launch_s < 0.2 * TRUTH.launch_s
    M, N, K, seconds = made.gemm[-1]
    assert product_s(Product(M, N, K), found) == pytest.approx(1.25 * seconds, rel=0.05)


def test_ranks_that_wait_for_each_other_are_told_from_slow_collectives() -> None:
    """Steps over tp separate a constant wait (`meeting_s`) from a wait that grows with the compute (`spread`). Sharded
    steps then show the cost of their own collectives.
    """
    late = replace(TRUTH, meeting_s=3e-4, spread=0.06, sharded_slowdown=4.0)
    found = calibrated(samples(late))
    assert found.sharded_slowdown > 2 * calibrated(samples()).sharded_slowdown
    for ranks, B, m in ((2, 2, 4), (2, 1, 16)):
        for sp in (False, True):
            w = replace(steps_layout(CONFIG, ParallelConfig(tensor=ranks), B, m), sequence_parallel=sp)
            assert float(step_s(CONFIG.model, w, found)) == pytest.approx(
                float(step_s(CONFIG.model, w, late)), rel=0.03
            )
            assert float(step_s(CONFIG.model, w, found)) > 1.05 * float(step_s(CONFIG.model, w, TRUTH))
    w = steps_layout(CONFIG, SHARDED, 2, 4)
    assert float(step_s(CONFIG.model, w, found)) == pytest.approx(float(step_s(CONFIG.model, w, late)), rel=0.05)
    punctual = calibrated(samples())
    assert punctual.meeting_s < 3e-5
    assert punctual.spread < 0.03


def test_collectives_are_priced_by_their_own_measurements() -> None:
    made = samples()
    slow = [
        (name, n, size, seconds * (3 if name == "all_gather" else 1)) for name, n, size, seconds in made.collectives
    ]
    made.collectives = slow
    found = calibrated(made)
    for name, ranks, size, seconds in slow:
        assert float(node_s(found, ranks, size, name)) == pytest.approx(seconds, rel=1e-6)
    plain, sequence = (replace(steps_layout(CONFIG, TENSOR, 4, 4), sequence_parallel=flag) for flag in (False, True))
    gain = float(step_s(CONFIG.model, sequence, found)) - float(step_s(CONFIG.model, sequence, calibrated(samples())))
    assert gain > 0
    assert (
        float(step_s(CONFIG.model, plain, found)) - float(step_s(CONFIG.model, plain, calibrated(samples())))
        < 0.5 * gain
    )


def test_devices_that_share_cores_run_faster_while_others_wait() -> None:
    """Two stages share one core. If both are busy, a kernel takes twice its time. During the bubble of one stage the
    other runs at full speed, so the bubble costs nothing.
    """
    made = samples()
    made.contention = [(1, 0.5), (2, 1.0)]
    found = calibrated(made)
    free = replace(found, contention=())
    config = load_run("bench", ["parallel.pipeline=2"])
    plan = make_plan(config, 2)
    layout = layout_of(config, 2)
    shared, apart = (simulate_step(config.model, layout, numbers, plan.stages) for numbers in (found, free))
    assert shared.pipeline_s == pytest.approx(sum(apart.busy_s) / 2, rel=1e-6)
    assert apart.pipeline_s > 1.1 * shared.pipeline_s


def test_products_of_experts_have_a_rate_of_their_own(tmp_path: Path) -> None:
    """The grouped kernel is slower than one product per expert. The planner uses its rate in the machine file."""
    slow = replace(TRUTH, grouped_share=0.4)
    made = samples()
    made.weight_gradients = "fp32-product"
    made.grouped = [
        (*shape, product_s(Product(*shape, grouped=True), slow))
        for shape in grouped_shapes(MOE, 4 * MOE.sequence_length, 1)
    ]
    assert [shape[3] for shape in made.grouped] == [16, 16]
    assert "products of experts: 2 shapes" in report(made, CONFIG)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(machine_content(made, CONFIG, "2026-01-02")))
    machine = load_machine(str(path))
    assert machine.stacks["frontier-llm"].grouped_share.tag == "measured"
    found = rates(machine)
    assert found.weight_gradients == "fp32-product"
    assert found.grouped_share == pytest.approx(0.4, rel=0.05)
    layout = Layout(micro_batch=4)
    items = block_work(MOE, layout, found)
    as_measured = by_cause(items, layout, found)
    as_dense = by_cause(items, layout, replace(found, grouped_share=1.0))
    for cause, (forward_s, _) in as_dense.items():
        expected_s = forward_s / found.grouped_share if cause == EXPERTS else forward_s
        assert as_measured[cause][0] == pytest.approx(expected_s, rel=0.05)


def test_a_dense_run_leaves_the_rate_of_experts_estimated(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(machine_content(samples(), CONFIG, "2026-01-02")))
    assert load_machine(str(path)).stacks["frontier-llm"].grouped_share.tag == "estimated"


def test_the_timed_products_of_experts_are_those_of_the_model() -> None:
    ops = select_run_ops(load_run("bench", ["precision.dtype=fp32"]), "cpu", attends_in_parts=False)
    calls = dict(grouped_calls(ops, (4, 8, 16, 3), torch.float32, torch.device("cpu")))
    assert list(calls) == [(4, 8, 16, 3), (4, 16, 8, 3), (8, 16, 4, 3)]
    assert calls[4, 8, 16, 3]().shape == (12, 8)
    assert calls[4, 16, 8, 3]().shape == (12, 16)


def test_the_file_loads_and_gives_back_every_calibrated_number(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(machine_content(samples(), CONFIG, "2026-01-02")))
    machine = load_machine(str(path))
    found = calibrated(samples())
    assert machine.devices_per_node == 2
    assert machine.stacks["frontier-llm"].gemm_efficiency.tag == "measured"
    assert "2 ranks at once, cpu, bf16" in machine.device.peak_tflops.source
    loaded = rates(machine)
    assert loaded.host_executes
    assert loaded.reserve_bytes == 0.5 * GIB
    assert loaded.contention == found.contention
    for ranks, B, m in ((1, 4, 2), (2, 4, 2)):
        w = steps_layout(CONFIG, ParallelConfig(tensor=ranks), B, m)
        assert float(step_s(CONFIG.model, w, loaded)) == pytest.approx(float(step_s(CONFIG.model, w, found)), rel=1e-3)
    assert (loaded.meeting_s, loaded.spread) == pytest.approx((found.meeting_s, found.spread), rel=1e-3)
    assert "all-reduce over 2 ranks" in report(samples(), CONFIG)


def test_disturbed_samples_give_the_recorded_file() -> None:
    made = samples(replace(TRUTH, meeting_s=3e-4, spread=0.06, sharded_slowdown=4.0), in_step=1.1)
    rng = np.random.default_rng(3)
    made.gemm = [(*shape, seconds * float(np.exp(rng.normal(0, 0.15)))) for *shape, seconds in made.gemm]
    assert_recorded("calibrated.yaml", machine_content(made, CONFIG, "2026-01-02"))


@pytest.mark.parametrize(
    ("b", "expected"), [([1.0, 2.0], [1.0, 2.0]), ([-1.0, 2.0], [0.0, 2.0]), ([-1.0, -1.0], [0.0, 0.0])]
)
def test_least_squares_below_zero_is_zero(b: list[float], expected: list[float]) -> None:
    assert non_negative(np.eye(2), np.array(b)) == pytest.approx(expected)
