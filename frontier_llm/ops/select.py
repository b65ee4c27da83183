"""Chooses each op's back-end once, at start-up, and says in the log which, which version, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from frontier_llm import log
from frontier_llm.config.schema import OpsConfig
from frontier_llm.errors import BackendError, Problem

from . import native, reference, sdpa
from .face import GROUPS, Op, Ops

_LOW = frozenset({torch.bfloat16, torch.float16, torch.float32})
_ALL = _LOW | {torch.float64}


@dataclass(frozen=True)
class Provider:
    """A back-end: which ops it has, where it runs, how to get it.

    `missing` returns '' when it can be used, else the reason; `load` returns the functions by op name.
    """

    name: str
    groups: tuple[str, ...]
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    version: Callable[[], str]
    missing: Callable[[], str]
    load: Callable[[], Mapping[str, Op]]
    build: str

    def refusal(self, group: str, device_type: str, dtype: torch.dtype) -> str:
        """Why this provider cannot serve `group` there, or ''."""
        if group not in self.groups:
            return f"{self.name} has no {group}"
        if device_type not in self.devices:
            return f"{self.name} does not run on {device_type}"
        if dtype not in self.dtypes:
            return f"{self.name} has no {str(dtype).removeprefix('torch.')}"
        return self.missing()


def _torch_version() -> str:
    return f"torch {torch.__version__}"


def _functions(module: object) -> dict[str, Op]:
    return {op: getattr(module, op) for ops in GROUPS.values() for op in ops if hasattr(module, op)}


def _load_cpu() -> dict[str, Op]:
    from . import cpu  # after its library: the module binds torch.ops.frontier_llm

    return _functions(cpu)


PROVIDERS: dict[str, Provider] = {
    "reference": Provider(
        name="reference",
        groups=tuple(GROUPS),
        devices=frozenset({"cpu", "cuda"}),
        dtypes=_ALL,
        version=_torch_version,
        missing=lambda: "",
        load=lambda: _functions(reference),
        build="",
    ),
    "sdpa": Provider(
        name="sdpa",
        groups=("attention",),
        devices=frozenset({"cpu", "cuda"}),
        dtypes=_ALL,
        version=_torch_version,
        missing=lambda: "",
        load=lambda: _functions(sdpa),
        build="",
    ),
}

PROVIDERS["cpu"] = Provider(
    name="cpu",
    groups=tuple(GROUPS),
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32, torch.bfloat16}),
    version=lambda: f"C++, {torch.ops.frontier_llm.instruction_set()}",
    missing=native.load_cpu_library,
    load=_load_cpu,
    build=native.BUILD_COMMAND,
)

# What `auto` tries, best first, by device.
_PREFERENCE: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu", "sdpa", "reference"),
    "cuda": ("flash_attn", "triton", "sdpa", "apex", "reference"),
}


@dataclass(frozen=True)
class Choice:
    """One flag's outcome: which provider, and why that one."""

    group: str
    provider: Provider
    why: str


def choose(group: str, wanted: str, device_type: str, dtype: torch.dtype) -> Choice | Problem:
    """The provider for one group of ops; a Problem when an explicit choice is not there."""
    if wanted != "auto":
        refusal = PROVIDERS[wanted].refusal(group, device_type, dtype)
        if not refusal:
            return Choice(group, PROVIDERS[wanted], f"asked for by ops.{group}")
        build = PROVIDERS[wanted].build
        other = f"or take ops.{group}=auto"
        return Problem(f"ops.{group}={wanted}", refusal, f"build it: {build}\n         {other}" if build else other)
    if dtype == torch.float64:
        return Choice(group, PROVIDERS["reference"], "float64 is for checking: always the reference")
    passed_over: list[str] = []
    for name in _PREFERENCE[device_type]:
        provider = PROVIDERS.get(name)
        if provider is None or group not in provider.groups:
            continue
        refusal = provider.refusal(group, device_type, dtype)
        if not refusal:
            return Choice(group, provider, f"auto; passed over {'; '.join(passed_over)}" if passed_over else "auto")
        passed_over.append(f"{name} ({refusal}; build: {provider.build})" if provider.build else f"{name} ({refusal})")
    raise AssertionError("the reference serves everything")


def select_ops(config: OpsConfig, device_type: str, dtype: torch.dtype) -> Ops:
    """The ops for this device and working type; logs one line per group of ops.

    Raises BackendError, naming flag and build command, for every explicit choice that is not available, all at once.
    """
    outcomes = [choose(group, getattr(config, group), device_type, dtype) for group in GROUPS]
    problems = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    if problems:
        raise BackendError(problems)
    functions: dict[str, Op] = {}
    for outcome in outcomes:
        assert isinstance(outcome, Choice)
        table = outcome.provider.load()
        functions |= {op: table[op] for op in GROUPS[outcome.group]}
        log.info(f"ops.{outcome.group}: {outcome.provider.name} ({outcome.provider.version()}): {outcome.why}")
    return Ops(**functions)
