"""Uncertainty of a plan's predicted speed, and the best published rates on devices of the same family.

The prediction interval is called band. Its width depends on whether the machine file's constants were measured on this
machine with this software stack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import log
from pathlib import Path
from typing import Any

from frontier_llm.blueprint.items import ATTENTION
from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.blueprint.work import model_flops_per_token
from frontier_llm.machine.load import PLACES, provenance, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.machine.schema import Machine
from frontier_llm.planner.breakdown import BUBBLE, NEUTRAL, SOURCES, UNFUSED, breakdown
from frontier_llm.planner.costs.time import step_s
from frontier_llm.planner.search import Plan
from frontier_llm.units import GIB, TERA

SAME = "same machine and stack"
PUBLISHED = "published steps, not fitted"
ESTIMATED = "estimated"

# A prediction counts as known if at least this share of its step time depends only on constants that were measured or
# fitted on the machine with the stack.
KNOWN_SHARE = 0.8
CALIBRATED = "frontier-llm calibrate"  # beginning of the `source` of numbers that this command measured
FITTED = "fitted on"  # beginning of the `source` of a constant that was fitted to measured steps

# Basis of a prediction → relative half width of its prediction interval: nine of ten measured steps lie within a factor
# 1 + half width of the predicted step. The first two values were determined from published runs whose layout is known
# and to which no constant was fitted (benchmarks/tests/test_best_runs.py). There are no measurements for ESTIMATED, so
# its value is twice the value of PUBLISHED.
BANDS = {SAME: 0.17, PUBLISHED: 0.28, ESTIMATED: 0.56}

# The best published 16-bit training runs by family of devices and size class of the model. Their FLOPs count full
# attention. `python -m benchmarks.published.best` writes the file.
BEST_PUBLISHED = Path(__file__).with_name("best_published.json")


@dataclass(frozen=True)
class BestRun:
    """A published training run and its rate."""

    tflops: float  # model TFLOP/s per device
    run: str  # name of the run in its data set
    machine: str  # machine file and stack that price the run
    stack: str
    layout: Mapping[str, Any]  # fields of Layout that differ from their defaults


@cache
def best_published(kind: str = "fastest") -> dict[str, dict[int, BestRun]]:
    """Return family of devices → size class of the model → the best published run.

    With kind "equivalent", only runs whose layout this package can execute are considered.
    """
    content = json.loads(BEST_PUBLISHED.read_text(encoding="utf-8"))[kind]
    best: dict[str, dict[int, BestRun]] = {}
    for device, sizes in content.items():
        best[device] = {int(size): BestRun(**record) for size, record in sizes.items()}
    return best


def family(device: str) -> str:
    """Return the family of a device: 'MI250' for 'MI250X GCD', 'A100' for 'A100-SXM4-80GB'.

    A name without leading capital letters and digits is its own family.
    """
    match = re.match(r"[A-Z]+\d+", device)
    return match.group() if match else device


def size_class(parameters: float) -> int:
    """Return the size class of a model. Models of one class differ in size by less than a factor of four."""
    return int(log(parameters, 4))


def basis(machine: Machine, stack: str, breakdown_s: Mapping[str, float]) -> str:
    """Return the basis of a prediction, a key of BANDS: how well the stack's constants are known on this machine.

    Args:
        machine: the machine file.
        stack: the stack that prices the step.
        breakdown_s: cause → seconds of the step (`report.breakdown`).
    """
    measured = machine.device.gemm_shapes
    if measured is not None and measured.source.startswith(CALIBRATED):
        return SAME
    # no constant belongs to the bubble alone: its length follows from the compute for which a rank waits
    working = {cause: seconds for cause, seconds in breakdown_s.items() if cause != BUBBLE}
    known_s = sum(seconds for cause, seconds in working.items() if _is_known(machine, stack, cause))
    if known_s >= KNOWN_SHARE * sum(working.values()):
        return SAME
    return PUBLISHED if (machine.name, stack) in published_stacks() else ESTIMATED


def _is_known(machine: Machine, stack: str, cause: str) -> bool:
    """True if all constants on which a cause's seconds depend are measured or fitted on this machine with this stack.

    Data sheets and tables of collectives do not depend on the stack.
    """
    unfused = cause == ATTENTION and rates(machine, stack).attention == "unfused"
    fields = SOURCES[UNFUSED] if unfused else SOURCES[cause]
    fitted = {field for field in fields if provenance(machine, stack, field).source.startswith(FITTED)}
    for field in fields:
        number = provenance(machine, stack, field)
        # 0, or 1 for a share: the effect is not modelled, for example differences between devices
        if number.value == NEUTRAL.get(field, 0.0):
            continue
        of_stack = PLACES[field][0] == "stack"
        known_tags = ("measured",) if of_stack else ("measured", "published")
        # a fitted fabric bandwidth already includes the share that the stack reaches
        included = field == "fabric_share" and "fabric_bytes_s" in fitted
        if field not in fitted and not included and number.tag not in known_tags:
            return False
    return True


@cache
def published_stacks() -> frozenset[tuple[str, str]]:
    """Return (machine, stack) of all published runs with a stated layout."""
    pairs = json.loads(BEST_PUBLISHED.read_text(encoding="utf-8"))["stacks"]
    return frozenset((machine, stack) for machine, stack in pairs)


@dataclass(frozen=True)
class Uncertainty:
    """Uncertainty of a plan's speed, and the published rates to which it is compared."""

    basis: str  # A key of BANDS.
    tflops: float  # Simulated model TFLOP/s per device, with full attention counted.
    device: str  # The family of the device.
    best_alike: BestRun | None  # Best published run of a model of this size on such devices.
    best: BestRun | None  # Best published run of any model on such devices.
    # Step time with full recomputation, divided by the plan's step time, if the plan's memory exceeds `safe_gib`;
    # otherwise 1.
    recompute_factor: float = 1.0

    @property
    def band(self) -> float:
        """Half width of the band: in nine of ten cases the measured value is within a factor 1 + band."""
        return BANDS[self.basis]

    @property
    def band_first(self) -> bool:
        """True if reports print the band before the simulated value."""
        return self.basis != SAME

    @property
    def above_published(self) -> bool:
        """True if the simulated rate is above every rate published on such devices."""
        return self.best is not None and self.tflops > self.best.tflops

    def ends(self, value: float, slow: int) -> tuple[float, float]:
        """Return (low, high) of the band around a value. `slow` is the index of the slower end: 1 for a time.

        The slower end also contains `recompute_factor`.
        """
        ends = [value / (1 + self.band), value * (1 + self.band)]
        if slow:
            ends[1] *= self.recompute_factor
        else:
            ends[0] /= self.recompute_factor
        return ends[0], ends[1]

    def about(self, value: float, words: Callable[[float], str], slow: int) -> str:
        """Return a value with its band, for example '17.5 s (15.0 s … 20.5 s)'.

        If the stack was not fitted on this machine, the band is first: '13.7 s … 22.4 s (simulated 17.5 s)'. `slow`
        is the index of the slower end in `ends(value)`: 1 for a time, 0 for a rate.
        """
        ends = [words(end) for end in self.ends(value, slow)]
        if self.band_first:
            return f"{ends[0]} … {ends[1]} (simulated {words(value)})"
        return f"{words(value)} ({ends[0]} … {ends[1]})"

    def words(self) -> list[str]:
        """Return lines for the report: the band and its basis, and the best published rates."""
        lines = [
            f"  90 % interval: a factor of {1 + self.band:.2f} in both directions, which also applies to the times "
            f"and shares below (constants: {self.basis})"
        ]
        if self.basis == ESTIMATED:
            lines[0] += "; no step of this stack on this machine was measured, so the interval is printed first"
        if self.basis == PUBLISHED:
            lines[0] += "; steps of this stack were published, but no constant was fitted to them"
        if self.recompute_factor > 1:
            lines.append(
                f"  the slow end also assumes full recomputation ({100 * (self.recompute_factor - 1):.0f} % longer), "
                "because the plan needs more memory than is known to be safe (safe_gib of the machine file)"
            )
        if self.best is not None:
            if self.best_alike:
                alike = f"{self.best_alike.tflops:.1f} TFLOP/s for such a model ({self.best_alike.run}), "
            else:
                alike = ""
            lines.append(
                f"  best published per {self.device} device: {alike}{self.best.tflops:.1f} for any ({self.best.run})"
            )
        if self.above_published:
            lines.append(
                f"  WARNING: the simulated {self.tflops:.1f} TFLOP/s are above every rate that was published for "
                f"{self.device}"
            )
        return lines

    def as_dict(self, plan: Plan) -> dict[str, Any]:
        """Return the content for `--json`."""
        return {
            "basis": self.basis,
            "band": self.band,
            "step_s": self.ends(plan.step_s, slow=1),
            "tokens_per_s_per_device": self.ends(plan.tokens_per_s_per_device, slow=0),
            "tflops_per_device": self.tflops,
            "tflops_per_device_band": self.ends(self.tflops, slow=0),
            "best_published_alike": _rate_and_run(self.best_alike),
            "best_published": _rate_and_run(self.best),
            "above_published": self.above_published,
            "recompute_factor": self.recompute_factor,
        }


def _rate_and_run(best: BestRun | None) -> tuple[float, str] | None:
    return (best.tflops, best.run) if best else None


def uncertainty_of(plan: Plan, machine: Machine, stack: str, numbers: Rates) -> Uncertainty:
    """Return the uncertainty of a plan's speed, and the published rates to which it is compared."""
    device = family(machine.device.name)
    published = best_published().get(device, {})
    return Uncertainty(
        basis=basis(machine, stack, breakdown(plan, numbers)),
        tflops=model_flops_per_token(plan.model) * plan.tokens_per_s_per_device / TERA,
        device=device,
        best_alike=published.get(size_class(total_parameters(plan.model))),
        best=max(published.values(), key=lambda run: run.tflops, default=None),
        recompute_factor=recompute_factor(plan, machine, numbers),
    )


def recompute_factor(plan: Plan, machine: Machine, numbers: Rates) -> float:
    """Return step time with full recomputation / plan's step time, or 1 if its memory is within `safe_gib`."""
    safe = machine.device.safe_gib
    if safe is None or plan.peak_bytes <= safe.value * GIB:
        return 1.0
    recomputed = replace(plan.layout, recompute="full")
    return max(1.0, float(step_s(plan.model, recomputed, numbers)) / plan.closed_form_s)
