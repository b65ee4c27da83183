"""Compares the planner with MosaicML's reported rates of MPT models on MI250 and A100. docs/benchmarks/scaling.md
contains the same figures.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from math import exp, log
from statistics import fmean

import pytest

from benchmarks.harness import MEASURED
from benchmarks.published import predict
from benchmarks.published.predict import peak_bytes
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.work import model_flops_per_token
from frontier_llm.config import load_model
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.kernels import pace
from frontier_llm.planner.costs.time import step_s
from frontier_llm.units import TERA

cluster_rates = cache(predict.cluster_rates)  # cached, because it reads a file
PAGE = (MEASURED / "scaling.md").read_text(encoding="utf-8")
MODELS = ("mpt-1b", "mpt-3b", "mpt-7b", "mpt-13b")
NODE = 8  # A100, or GCDs of four MI250
OF_40_GB = ("llm-foundry-a100-40", "llm-foundry")
OF_80_GB = ("llm-foundry-a100", "llm-foundry")
NOW = ("mi250", "fsdp")
BEFORE = ("mi250", "fsdp-rocm-5.4")
BATCH = 960  # batch of the comparisons within one node; every microbatch below divides it
BATCH_OF_SERIES = 1536  # samples per step of MPT-7B on 4 to 128 MI250: caption of figure 5 of the second post
PACKAGES = (4, 8, 16, 32, 64, 128)
PUBLISHED_DROP = 1 - 159 / 166


def tflops(
    name: str,
    rates: Rates,
    devices: int = NODE,
    batch: int = BATCH,
    recompute: tuple[str, ...] = ("none", "full"),
    heads: int | None = None,
) -> float:
    """Return model TFLOP/s per device in the fastest fully sharded layout that fits. `heads` replaces the model's."""
    model = load_model(name, {"heads": heads} if heads else None)
    speeds = []
    for micro_batch, mode in product((1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20), recompute):
        microbatches, uneven = divmod(batch, devices * micro_batch)
        layout = Layout(
            dp=devices,
            micro_batch=micro_batch,
            microbatches=microbatches,
            sharding="weights",
            recompute=mode,
        )
        if not uneven and peak_bytes(model, layout, rates) <= rates.memory_bytes:
            speeds.append(batch * model.sequence_length / float(step_s(model, layout, rates)) / devices)
    return max(speeds) * model_flops_per_token(model) / TERA


def one_head_ratio(name: str, stack: tuple[str, str], a100: Rates) -> float:
    """Return MI250 over A100 for the model with one attention head."""
    return package(name, stack, heads=1) / tflops(name, a100, heads=1)


def package(name: str, stack: tuple[str, str], **how: int) -> float:
    """Return TFLOP/s of an MI250 package, which is two devices."""
    return 2 * tflops(name, cluster_rates(*stack), **how)


def mean(ratios: list[float]) -> float:
    return exp(fmean(map(log, ratios)))


def row(*cells: object) -> str:
    return "| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"


def first_attention(rates: Rates) -> Rates:
    """Return these rates with the first FlashAttention, which is half as fast as the second."""
    return replace(rates, flash_efficiency=rates.flash_efficiency / 2)


@pytest.mark.parametrize(
    ("a100", "title", "first", "second"),
    [(OF_40_GB, "A100-40GB", 0.80, 0.85), (OF_80_GB, "A100-80GB", 0.73, 0.77)],
)
def test_mi250_over_a100(a100: tuple[str, str], title: str, first: float, second: float) -> None:
    """The first ratios are from June 2023, before FlashAttention-2. No constant was fitted on any of them."""
    now = cluster_rates(*a100)
    before = [package(name, BEFORE) / tflops(name, first_attention(now)) for name in MODELS]
    after = [package(name, NOW) / tflops(name, now) for name in MODELS]
    assert row(f"{title}, first FlashAttention", *before, mean(before), first) in PAGE
    assert row(f"{title}, FlashAttention-2", *after, mean(after), second) in PAGE
    assert mean(before) == pytest.approx(first, rel=0.06)
    assert mean(after) == pytest.approx(second, rel=0.06)


@pytest.mark.parametrize(("a100", "title", "published"), [(OF_40_GB, "A100-40GB", 0.94), (OF_80_GB, "A100-80GB", 0.85)])
def test_the_proxy_with_one_head_is_missed(a100: tuple[str, str], title: str, published: float) -> None:
    """The first post does not name the proxy's size. The page shows the miss: our ratio does not rise enough."""
    a100s = first_attention(cluster_rates(*a100))
    ratios = [one_head_ratio(name, BEFORE, a100s) for name in MODELS]
    assert row(f"{title}, one head, first FlashAttention", *ratios, mean(ratios), published) in PAGE
    assert mean(ratios) < published


def test_what_does_not_fit_makes_the_outlier() -> None:
    """13B on eight A100-40GB with full recomputation, as LLM-Foundry ran it."""
    a100 = cluster_rates(*OF_40_GB)
    of_package = package("mpt-13b", NOW)
    recomputed, fastest = (
        of_package / tflops("mpt-13b", a100, recompute=modes) for modes in (("full",), ("none", "full"))
    )
    assert f"{recomputed:.2f} instead of {fastest:.2f}" in PAGE
    assert recomputed > 1.1 * fastest


def test_rocm_5_4_to_5_7_is_the_attention_kernel() -> None:
    """The published factor is 1.13. The stacks differ only in the rate of attention, by FlashAttention-2's published
    factor of two.
    """
    now = cluster_rates(*NOW)
    before = cluster_rates(*BEFORE)
    assert replace(before, flash_efficiency=now.flash_efficiency) == now
    assert now.flash_efficiency == pytest.approx(2 * before.flash_efficiency)
    gains = [package(name, NOW) / package(name, BEFORE) for name in MODELS]
    assert row("ROCm 5.4 to 5.7", *gains, mean(gains), 1.13) in PAGE
    assert mean(gains) == pytest.approx(1.13, abs=0.02)


def series(rates: Rates) -> list[float]:
    """Return TFLOP/s per package of MPT-7B on PACKAGES, at one batch for all sizes."""
    speeds = []
    for number in PACKAGES:
        speeds.append(2 * tflops("mpt-7b", rates, devices=2 * number, batch=BATCH_OF_SERIES))
    return speeds


def drop(speeds: list[float]) -> float:
    return 1 - speeds[-1] / speeds[0]


def test_from_4_to_128_mi250() -> None:
    """The rate falls from 166 to 159 TFLOP/s with one batch for all sizes. The planner explains a part of this loss."""
    now = cluster_rates(*NOW)
    even = replace(now, speed_variation=0.0)
    speeds = series(now)
    for title, values in (("planner", speeds), ("planner, all devices alike", series(even))):
        assert row(title, *(f"{value:.1f}" for value in values)) in PAGE
    assert all(before > after for before, after in pairwise(speeds))
    explained = f"explains {100 * drop(speeds):.1f} of the measured {100 * PUBLISHED_DROP:.1f} %"
    assert explained in PAGE
    assert speeds[0] == pytest.approx(166, rel=0.04) and speeds[-1] == pytest.approx(159, rel=0.02)


def test_each_candidate_cause_of_the_missing_drop() -> None:
    """One constant is changed at a time. The page shows the drop that results; none of these values is adopted."""
    now = cluster_rates(*NOW)
    candidates = {
        "devices vary twice as much (`speed_variation` 0.03)": replace(now, speed_variation=2 * now.speed_variation),
        "half the bandwidth between nodes": replace(now, network_efficiency=now.network_efficiency / 2),
        "a quarter of the bandwidth between nodes": replace(now, network_efficiency=now.network_efficiency / 4),
        "twice the latency of a ring's hop": replace(now, network_hop_s=2 * now.network_hop_s),
        "80 instead of 90 % of the transfers overlap": replace(now, dp_overlap=0.8),
    }
    for cause, rates in candidates.items():
        assert row(cause, f"{100 * drop(series(rates)):.1f} %") in PAGE


def test_the_slowest_of_more_devices_is_slower() -> None:
    """Compared with the expected largest of n normal numbers from tables: 1.42 of 8, 1.87 of 20, 2.51 of 100."""
    rates = replace(cluster_rates(*NOW), speed_variation=0.01)
    assert pace(8, rates) == 1.0 == pace(4, rates)
    assert pace(20, rates) == pytest.approx(1 + 0.01 * (1.867 - 1.424), abs=1e-4)
    assert pace(100, rates) == pytest.approx(1 + 0.01 * (2.508 - 1.424), abs=3e-4)
    assert pace(10**6, replace(rates, speed_variation=0.0)) == 1.0
