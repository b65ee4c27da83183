"""Uncertainty of a plan's predicted speed, and the best published rates on such devices.

The width of the prediction interval (band) depends on the systems on which the machine file's constants were measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Any

from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.blueprint.work import model_flops_per_token
from frontier_llm.machine.schema import Machine, Number
from frontier_llm.planner.search import Plan
from frontier_llm.units import TERA

SAME = "same machine and stack"
OTHER = "other stack"
ESTIMATED = "estimated"

# Basis → half width: nine of ten measured steps lie within a factor 1 + half width of the predicted step. The first two
# hold for published runs with a stated layout on which no constant was fitted (benchmarks/tests/test_best_runs.py).
# The third has no measurements, so it is twice the second.
BANDS = {SAME: 0.17, OTHER: 0.28, ESTIMATED: 0.56}

# The best published runs in 16 bits, with full attention counted. The file maps a family of devices and a size class of
# the model to [model TFLOP/s per device, name of the run]. `python -m benchmarks.published.best` writes it.
BEST_PUBLISHED = Path(__file__).with_name("best_published.json")


@cache
def best_published() -> dict[str, dict[int, tuple[float, str]]]:
    """Return family of devices → size class of the model → (model TFLOP/s per device, name of the run)."""
    content = json.loads(BEST_PUBLISHED.read_text(encoding="utf-8"))
    best: dict[str, dict[int, tuple[float, str]]] = {}
    for device, sizes in content.items():
        best[device] = {}
        for size, (rate, run) in sizes.items():
            best[device][int(size)] = (rate, run)
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


def basis(machine: Machine, stack: str) -> str:
    """Return the key of BANDS for the systems on which a stack's constants were measured.

    A constant of the machine file whose source begins with 'fitted on' was fitted to measured steps.
    """
    if machine.device.gemm_shapes is not None:  # `calibrate` measured this computer with this package
        return SAME
    fitted = {
        name
        for name, numbers in machine.stacks.items()
        if any(isinstance(value, Number) and value.source.startswith("fitted on") for _, value in numbers)
    }
    if stack in fitted:
        return SAME
    return OTHER if fitted else ESTIMATED


@dataclass(frozen=True)
class Uncertainty:
    """Uncertainty of a plan's speed, and the published rates to which it is compared."""

    basis: str  # A key of BANDS.
    tflops: float  # Simulated, per device: model FLOPs with full attention.
    device: str  # The family of the device.
    best_alike: tuple[float, str] | None  # Best published (TFLOP/s, run) for a model of this size on such devices.
    best: tuple[float, str] | None  # Best published (TFLOP/s, run) for any model on such devices.

    @property
    def band(self) -> float:
        """Half width of the band: in nine of ten cases the measured value is within a factor 1 + band."""
        return BANDS[self.basis]

    @property
    def untried(self) -> bool:
        """True if this stack has not run on this machine. Reports then print the slow end of the band first."""
        return self.basis != SAME

    @property
    def above_published(self) -> bool:
        """True if the simulated rate is above every rate published on such devices."""
        return self.best is not None and self.tflops > self.best[0]

    def ends(self, value: float) -> tuple[float, float]:
        """Return (low, high) of the band around a time, a rate or a share."""
        return value / (1 + self.band), value * (1 + self.band)

    def about(self, value: float, words: Callable[[float], str], slow: int) -> str:
        """Return a value with its band, for example '17.5 s (15.0 s … 20.5 s)'.

        For an untried stack the slow end is first: '22.4 s … 13.7 s (simulated 17.5 s)'. `slow` is the index of the
        slower end in `ends(value)`: 1 for a time, 0 for a rate.
        """
        ends = [words(end) for end in self.ends(value)]
        if self.untried:
            return f"{ends[slow]} … {ends[1 - slow]} (simulated {words(value)})"
        return f"{words(value)} ({ends[0]} … {ends[1]})"

    def words(self) -> list[str]:
        """Return lines for the report: the band and its basis, and the best published rates."""
        lines = [
            f"  90 % interval: a factor of {1 + self.band:.2f} in both directions, which also applies to the times "
            f"and shares below (constants: {self.basis})"
        ]
        if self.untried:
            lines[0] += "; this stack has never run on this machine, so the slow end is printed first"
        if self.best is not None:
            if self.best_alike:
                alike = f"{self.best_alike[0]:.1f} TFLOP/s for such a model ({self.best_alike[1]}), "
            else:
                alike = ""
            lines.append(
                f"  best published per {self.device} device: {alike}{self.best[0]:.1f} for any ({self.best[1]})"
            )
        if self.above_published:
            lines.append(
                f"  WARNING: the simulated {self.tflops:.1f} TFLOP/s are above every rate published on {self.device}"
            )
        return lines

    def as_dict(self, plan: Plan) -> dict[str, Any]:
        """Return the content for `--json`."""
        return {
            "basis": self.basis,
            "band": self.band,
            "step_s": self.ends(plan.step_s),
            "tokens_per_s_per_device": self.ends(plan.tokens_per_s_per_device),
            "tflops_per_device": self.tflops,
            "tflops_per_device_band": self.ends(self.tflops),
            "best_published_alike": self.best_alike,
            "best_published": self.best,
            "above_published": self.above_published,
        }


def uncertainty_of(plan: Plan, machine: Machine, stack: str) -> Uncertainty:
    """Return the uncertainty of this plan's speed."""
    device = family(machine.device.name)
    published = best_published().get(device, {})
    return Uncertainty(
        basis=basis(machine, stack),
        tflops=model_flops_per_token(plan.model) * plan.tokens_per_s_per_device / TERA,
        device=device,
        best_alike=published.get(size_class(total_parameters(plan.model))),
        best=max(published.values(), default=None),
    )
