"""Comparison of the chosen plan with the best plans that have the values given by the user (`plan --what-if`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frontier_llm.machine.rates import Rates
from frontier_llm.planner.candidates import choices_of, parse_fixed
from frontier_llm.planner.refusal import broken_rules
from frontier_llm.planner.report import WIDTH, layout_words, step_words, table, wrapped
from frontier_llm.planner.search import Plan, Search, search
from frontier_llm.units import GIB


def what_if(outcome: Search, numbers: Rates, fixed: Mapping[str, Any], words: Sequence[str], width: int = WIDTH) -> str:
    """Return a report that compares the chosen plan with two other plans, which have the values in `words` (KEY=VALUE).

    In the first plan, all other fields have the values of the chosen plan. The report states whether this first plan is
    illegal or does not fit into memory. In the second plan, the search chooses all other fields again.
    """
    changes = parse_fixed(list(words))
    best = outcome.best
    chosen = choices_of(best.layout)
    if changes.items() <= chosen.items():
        return f"what if {' '.join(words)}: the chosen layout already has this value"
    # fields that follow from the changed fields and may therefore differ too
    follows = {"dp"}
    if {"tp", "pp"} & changes.keys():
        follows.add("chunks")
    if "sharding" in changes:
        follows.add("data_shard")
    same = {name: value for name, value in chosen.items() if name not in follows}
    exact, free = (
        search(outcome.model, numbers, outcome.nodes, outcome.global_batch, values, **outcome.shared)
        for values in ({**fixed, **same, **changes}, {**fixed, **changes})
    )
    lines = [f"what if {' '.join(words)}"]
    for title, other in (("all other values as in the chosen layout", exact), ("all other values chosen again", free)):
        if not other.legal:
            reasons = [f"{problem.where}: {problem.what}" for problem in broken_rules(other, numbers.node_devices)]
            lines.append(f"  {title}: {'; '.join(['no legal layout', *reasons])}")
        elif not other.plans:
            lines.append(
                f"  {title}: does not fit: needs {other.smallest_bytes / GIB:.1f} of "
                f"{numbers.memory_bytes / GIB:.0f} GiB"
            )
        else:
            lines.append(f"  {title}: {_against(best, other.best)}: {layout_words(other.best)}")
    shown = [best, *(other.best for other in (exact, free) if other.plans)]
    if exact.plans and free.plans and exact.best.layout == free.best.layout:
        shown.pop()
    return wrapped("\n".join([*lines, table(shown, width)]), width)


def _against(best: Plan, other: Plan) -> str:
    """Return the step time, memory and bubble of `other`. Step time and memory are also compared with `best`."""
    time = f"{step_words(other.step_s)} per step ({100 * (other.step_s / best.step_s - 1):+.1f} %)"
    memory = f"{other.peak_bytes / GIB:.1f} GiB ({(other.peak_bytes - best.peak_bytes) / GIB:+.1f})"
    return f"{time}, {memory}, bubble {100 * other.simulated.bubble:.1f} %"
