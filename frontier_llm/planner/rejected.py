"""Lines of a report about the layouts that a search did not choose."""

from __future__ import annotations

from typing import Any

import numpy as np

from frontier_llm.blueprint.layout import Layout
from frontier_llm.machine.rates import Rates
from frontier_llm.planner.costs.layouts import Layouts
from frontier_llm.units import GIB


def rejections(layouts: Layouts, memory: np.ndarray, fits: np.ndarray, rates: Rates) -> list[str]:
    """Return text lines, one for each group of layouts that exceed the device's memory, with the number of layouts in
    the group.
    """
    lines = []
    for axis in ("tp", "cp"):
        for degree in np.unique(getattr(layouts, axis)):
            family = getattr(layouts, axis) == degree
            if not np.any(fits & family):
                needs = f"{memory[family].min() / GIB:.1f} of {rates.memory_bytes / GIB:.0f} GiB"
                lines.append(
                    f"{axis.upper()}{degree}: none of {int(family.sum())} layouts fits; the smallest needs {needs}"
                )
    families: dict[str, Any] = {
        "without recomputation": layouts.recompute == "none",
        "with selective recomputation": layouts.recompute == "selective",
    }
    if np.any(layouts.cp > 1):
        families["without context parallelism"] = layouts.cp == 1
    for name, family in families.items():
        out = int((family & ~fits).sum())
        if out:
            lines.append(f"{name} {out} of {int(family.sum())} layouts exceed {rates.memory_bytes / GIB:.0f} GiB")
    return lines


def other_contexts(fitting: Layouts, seconds: np.ndarray, choice: Layout) -> list[str]:
    """Return lines that compare the choice with the other algorithms of context-parallel attention.

    Each line is about one other algorithm, or about no context parallelism. It names the fastest such layout, and how
    much longer this layout takes than the fastest layout with the chosen algorithm. `seconds` are estimated by formula.

    The list is empty if the choice has no context parallelism.
    """
    if choice.cp == 1:
        return []
    same = (fitting.cp > 1) & (fitting.context_attention == choice.context_attention)
    lines = []
    for way in np.unique(fitting.context_attention[fitting.context_attention != choice.context_attention]):
        family = fitting.context_attention == way
        fastest = fitting.where(family).row(int(np.argmin(seconds[family])))
        words = f"TP{fastest.tp} CP{fastest.cp} PP{fastest.pp} DP{fastest.dp}, recompute {fastest.recompute}"
        name = "CP1" if fastest.cp == 1 else f"attention by {way}"
        lines.append(
            f"{name}: the fastest layout that fits, {words}, takes "
            f"{100 * (seconds[family].min() / seconds[same].min() - 1):.1f} % longer"
        )
    return lines
