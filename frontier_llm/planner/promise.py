"""How far a plan's figures may be trusted: a band by what its constants were measured on, and the best rate that
anybody has published.
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

# basis → half width: nine of ten measured steps lie within a factor 1 + this of the predicted one. The first two hold
# on the published runs whose layout is stated and that no constant was fitted on (benchmarks/tests/test_promise.py).
# Nothing is measured of the third, so it is twice the second.
BANDS = {SAME: 0.17, OTHER: 0.28, ESTIMATED: 0.56}

# {family of devices: {size class of the model: [model TFLOP/s per device, which run]}}: the best published runs in 16
# bits, with full attention counted. `python -m benchmarks.published.best` writes it.
BEST_PUBLISHED = Path(__file__).with_name("best_published.json")


@cache
def best_published() -> dict[str, dict[int, tuple[float, str]]]:
    """Family of devices → size class of the model → (model TFLOP/s per device, which run)."""
    content = json.loads(BEST_PUBLISHED.read_text(encoding="utf-8"))
    best: dict[str, dict[int, tuple[float, str]]] = {}
    for device, sizes in content.items():
        best[device] = {}
        for size, (rate, run) in sizes.items():
            best[device][int(size)] = (rate, run)
    return best


def family(device: str) -> str:
    """'MI250' of 'MI250X GCD', 'A100' of 'A100-SXM4-80GB'; the name itself where it has no such form."""
    match = re.match(r"[A-Z]+\d+", device)
    return match.group() if match else device


def size_class(parameters: float) -> int:
    """Models of one class are within a factor of four of each other."""
    return int(log(parameters, 4))


def basis(machine: Machine, stack: str) -> str:
    """What the constants of a stack were measured on, as the machine file says: a source that begins with 'fitted
    on' is a measured step.
    """
    if machine.device.gemm_shapes is not None:  # calibrated on this very computer with this program
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
class Promise:
    """What may be said of a plan's speed."""

    basis: str  # of BANDS
    tflops: float  # per device, as simulated: model FLOPs with full attention
    device: str  # family
    best_alike: tuple[float, str] | None  # published, of a model of this size on such devices
    best: tuple[float, str] | None  # of any model

    @property
    def band(self) -> float:
        """Half width: nine times in ten the truth is within a factor 1 + band."""
        return BANDS[self.basis]

    @property
    def untried(self) -> bool:
        """This stack has not run on this machine: what leads is the slow end of the band."""
        return self.basis != SAME

    @property
    def above_published(self) -> bool:
        """Nobody has published a rate like the simulated one on such devices."""
        return self.best is not None and self.tflops > self.best[0]

    def ends(self, value: float) -> tuple[float, float]:
        """(low, high) of the band about a time, a rate or a share."""
        return value / (1 + self.band), value * (1 + self.band)

    def about(self, value: float, words: Callable[[float], str], slow: int) -> str:
        """'17.5 s (15.0 s … 20.5 s)', or for an untried stack the slow end first: '22.4 s … 13.7 s (simulated 17.5 s)'.

        `slow` is the end of the band at which the run is slower: 1 of a time, 0 of a rate.
        """
        ends = [words(end) for end in self.ends(value)]
        if self.untried:
            return f"{ends[slow]} … {ends[1 - slow]} (simulated {words(value)})"
        return f"{words(value)} ({ends[0]} … {ends[1]})"

    def words(self) -> list[str]:
        """For the report: what the band rests on, and what others have reached."""
        lines = [
            f"  90 % band: a factor {1 + self.band:.2f} either way, also on the times and shares below (constants: "
            f"{self.basis})"
        ]
        if self.untried:
            lines[0] += "; this stack has never run on this machine, so the slow end leads"
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
                f"  WARNING: {self.tflops:.1f} TFLOP/s, as simulated, lie above every rate published on {self.device}"
            )
        return lines

    def as_dict(self, plan: Plan) -> dict[str, Any]:
        """For programs."""
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


def promise_of(plan: Plan, machine: Machine, stack: str) -> Promise:
    """What may be said of this plan's speed."""
    device = family(machine.device.name)
    published = best_published().get(device, {})
    return Promise(
        basis=basis(machine, stack),
        tflops=model_flops_per_token(plan.model) * plan.tokens_per_s_per_device / TERA,
        device=device,
        best_alike=published.get(size_class(total_parameters(plan.model))),
        best=max(published.values(), default=None),
    )
