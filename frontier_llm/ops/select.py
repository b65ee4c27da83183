"""Chooses each op's back-end once, at start-up, and says in the log which, which version, and why; lists what there
is to choose from.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from frontier_llm import log
from frontier_llm.config.schema import OpsConfig, RunConfig
from frontier_llm.errors import BackendError, Problem
from frontier_llm.ops import reference
from frontier_llm.ops.attention_table import AttentionShape, load_attention, rule_for
from frontier_llm.ops.driver import architecture_of_device
from frontier_llm.ops.dtypes import working_dtype
from frontier_llm.ops.no_jit import forbid_jit
from frontier_llm.ops.providers import PROVIDERS, AttentionNeeds, Provider
from frontier_llm.ops.reference import GROUPS, Op, Ops

PLAIN = AttentionNeeds()

# What `auto` tries, best first. apex is only taken when asked for: the prebuilt kernels do the same in fewer passes.
PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu", "sdpa", "reference"),
    "cuda": ("flash_attn", "triton", "torch", "sdpa", "reference"),
}
# Where documents are masked: flash_attn reads their lengths on the host in every layer, for which the host waits for
# the GPU.
_WITH_DOCUMENTS = ("triton", "flash_attn", "torch", "sdpa", "reference")


@dataclass(frozen=True)
class ChosenBackend:
    """One flag's outcome: which provider, and why that one."""

    group: str
    provider: Provider
    why: str


def choose(
    group: str,
    wanted: str,
    device_type: str,
    dtype: torch.dtype,
    needs: AttentionNeeds = PLAIN,
    *,
    allow_fallback: bool = False,
    first: tuple[str, ...] = (),
) -> ChosenBackend | Problem:
    """The provider for one group of ops; a Problem, naming flag and build command, when an explicit choice is not
    there.

    So it is when `auto` would pass over a back-end that is built with this package, for a slower one, without
    `allow_fallback`. `auto` tries `first` before the others: what is known to be faster here.
    """
    if wanted != "auto":
        provider = PROVIDERS[wanted]
        refusal = provider.refusal(group, device_type, dtype, needs)
        if refusal is None:
            return ChosenBackend(group, provider, f"asked for by ops.{group}")
        return Problem(
            f"ops.{group}={wanted}", refusal.why, f"{refusal.build}, or ops.{group}=auto".removeprefix(", or ")
        )
    if dtype == torch.float64:
        return ChosenBackend(group, PROVIDERS["reference"], "float64 is for checking: always the reference")
    passed_over: list[str] = []
    usual = _WITH_DOCUMENTS if needs.documents and device_type == "cuda" else PREFERENCE[device_type]
    order = dict.fromkeys([*first, *usual])
    for provider in (PROVIDERS[name] for name in order):
        if group not in provider.groups:
            continue
        refusal = provider.refusal(group, device_type, dtype, needs)
        if (
            refusal is None
            and provider.name == "reference"
            and group == "attention"
            and device_type == "cuda"
            and not allow_fallback
        ):
            what = (
                f"none serves what the run asks of it but the reference, which keeps whole squares of scores: "
                f"{'; '.join(passed_over)}"
            )
            fix = (
                "set parallel.context_attention=heads where the heads suffice, or "
                if needs.parts and not needs.softcap
                else ""
            )
            fix += "go on without: ops.attention=reference"
            return Problem("ops.attention=auto", what, fix)
        if refusal is None:
            return ChosenBackend(
                group, provider, f"auto; passed over {'; '.join(passed_over)}" if passed_over else "auto"
            )
        if refusal.build and provider.required and not allow_fallback:
            instead = f"or go on without: ops.{group}=reference, or ops.allow_fallback=true for all ops"
            return Problem(
                f"ops.{group}=auto",
                f"the kernels of this GPU cannot be used: {refusal.why}",
                f"{refusal.build}; {instead}",
            )
        passed_over.append(f"{provider.name} ({refusal})")
    raise AssertionError("the reference serves everything")


def select_ops(
    config: OpsConfig,
    device_type: str,
    dtype: torch.dtype,
    needs: AttentionNeeds = PLAIN,
    *,
    attention: AttentionShape | None = None,
) -> Ops:
    """The ops for this device and working type; logs one line per group of ops, and sets the no-JIT guard when asked.

    `needs`: of attention; `attention`: its shape, by which ops.attention_table chooses.
    Raises BackendError, naming flag and build command, for every explicit choice
    that is not available, and for a GPU's prebuilt kernels that `auto` cannot use (unless ops.allow_fallback), all at
    once.
    """
    if config.no_jit:
        forbid_jit()
    fallback = config.allow_fallback
    measurable = attention is not None and not (needs.parts or needs.window or needs.softcap)
    first = (
        {"attention": _measured_first(config.attention_table, device_type, attention)}
        if attention and measurable
        else {}
    )
    outcomes = [
        choose(
            group,
            getattr(config, group),
            device_type,
            dtype,
            needs,
            allow_fallback=fallback,
            first=first.get(group, ()),
        )
        for group in GROUPS
    ]
    problems = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    if problems:
        raise BackendError(problems)
    chosen = [outcome for outcome in outcomes if isinstance(outcome, ChosenBackend)]
    tables = {provider: provider.load() for provider in {outcome.provider for outcome in chosen}}
    functions: dict[str, Op] = {}
    groups_by_choice: dict[str, list[str]] = {}
    for outcome in chosen:
        table = tables[outcome.provider]
        # attention that serves no stretches is never asked for them
        functions |= {op: table.get(op, getattr(reference, op)) for op in GROUPS[outcome.group]}
        choice = f"{outcome.provider.name} ({outcome.provider.version()}): {outcome.why}"
        groups_by_choice.setdefault(choice, []).append(outcome.group)
    for choice, groups in groups_by_choice.items():
        log.info(f"ops {', '.join(groups)}: {choice}")
    return Ops(**functions)


def _measured_first(table: str, device_type: str, shape: AttentionShape) -> tuple[str, ...]:
    """What the table of attention says of this device and shape; nothing where it has no row."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return ()
    rule = rule_for(load_attention(table), architecture_of_device() if device_type == "cuda" else "cpu", shape)
    if rule is None:
        return ()
    log.info(f"attention: {', then '.join(rule.order)} ({rule.tag}: {rule.source})")
    return rule.order


def backends(dtype_name: str) -> list[dict[str, Any]]:
    """One row per op, device and back-end that has the op: status is the version, or why it cannot be used and what
    builds it.
    """
    dtype = working_dtype(dtype_name)
    rows = []
    for group, device in itertools.product(GROUPS, PREFERENCE):
        taken = choose(group, "auto", device, dtype, allow_fallback=True)
        assert isinstance(taken, ChosenBackend)
        for provider in PROVIDERS.values():
            if group in provider.groups and device in provider.devices:
                refusal = provider.refusal(group, device, dtype)
                row = {"op": group, "device": device, "backend": provider.name, "available": refusal is None}
                row["chosen"] = taken.provider is provider and (device == "cpu" or torch.cuda.is_available())
                rows.append({**row, "status": provider.version() if refusal is None else f"no: {refusal}"})
    return rows


def select_run_ops(config: RunConfig, device_type: str, attends_in_parts: bool) -> Ops:
    """The ops of a training run. `attends_in_parts`: a rank scores its queries against one rank's keys at a time."""
    model = config.model
    documents = config.data.reset_at_documents
    uses_alibi = model.position == "alibi"
    needs = AttentionNeeds(
        documents,
        parts=attends_in_parts,
        window=model.sliding_window is not None,
        alibi=uses_alibi,
        softcap=model.score_softcap is not None,
    )
    shape = AttentionShape(model.dim_per_head, extras=documents or uses_alibi)
    return select_ops(config.ops, device_type, working_dtype(config.precision.dtype), needs, attention=shape)
