"""Chooses each op's back-end once, at start-up, and says in the log which, which version, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from frontier_llm import log
from frontier_llm.config.schema import OpsConfig
from frontier_llm.errors import BackendError, Problem
from frontier_llm.ops.face import GROUPS, Op, Ops
from frontier_llm.ops.no_jit import forbid_jit
from frontier_llm.ops.providers import PROVIDERS, Provider

# What `auto` tries, best first. apex is only taken when asked for: the prebuilt kernels do the same in fewer passes.
PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu", "sdpa", "reference"),
    "cuda": ("flash_attn", "triton", "torch", "sdpa", "reference"),
}


@dataclass(frozen=True)
class Choice:
    """One flag's outcome: which provider, and why that one."""

    group: str
    provider: Provider
    why: str


def choose(group: str, wanted: str, device_type: str, dtype: torch.dtype) -> Choice | Problem:
    """The provider for one group of ops; a Problem, naming flag and build command, when an explicit choice is not there."""
    if wanted != "auto":
        provider = PROVIDERS[wanted]
        refusal = provider.refusal(group, device_type, dtype)
        if not refusal:
            return Choice(group, provider, f"asked for by ops.{group}")
        build = f"{provider.build}, or " if provider.build and refusal == provider.missing() else ""
        return Problem(f"ops.{group}={wanted}", refusal, f"{build}ops.{group}=auto")
    if dtype == torch.float64:
        return Choice(group, PROVIDERS["reference"], "float64 is for checking: always the reference")
    passed_over: list[str] = []
    for name in PREFERENCE[device_type]:
        provider = PROVIDERS[name]
        if group not in provider.groups:
            continue
        refusal = provider.refusal(group, device_type, dtype)
        if not refusal:
            return Choice(group, provider, f"auto; passed over {'; '.join(passed_over)}" if passed_over else "auto")
        build = f"; build: {provider.build}" if provider.build else ""
        passed_over.append(f"{name} ({refusal.splitlines()[0]}{build})")
    raise AssertionError("the reference serves everything")


def select_ops(config: OpsConfig, device_type: str, dtype: torch.dtype) -> Ops:
    """The ops for this device and working type; logs one line per group of ops, and sets the no-JIT guard when asked.

    Raises BackendError, naming flag and build command, for every explicit choice that is not available, all at once.
    """
    if config.no_jit:
        forbid_jit()
    outcomes = [choose(group, getattr(config, group), device_type, dtype) for group in GROUPS]
    problems = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    if problems:
        raise BackendError(problems)
    functions: dict[str, Op] = {}
    said: dict[str, list[str]] = {}
    for outcome in outcomes:
        assert isinstance(outcome, Choice)
        table = outcome.provider.load()
        functions |= {op: table[op] for op in GROUPS[outcome.group]}
        choice = f"{outcome.provider.name} ({outcome.provider.version()}): {outcome.why}"
        said.setdefault(choice, []).append(outcome.group)
    for choice, groups in said.items():
        log.info(f"ops {', '.join(groups)}: {choice}")
    return Ops(**functions)
