"""The back-ends: which ops each has, for which devices and types, whether it is here, and how to get it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata

import torch

from frontier_llm.errors import BackendError
from frontier_llm.ops import native, reference
from frontier_llm.ops.driver import architecture_of_device
from frontier_llm.ops.face import GROUPS, Op
from frontier_llm.ops.manifest import build_command
from frontier_llm.ops.prebuilt import PrebuiltKernels

HALVES = frozenset({torch.bfloat16, torch.float16})
LOW = HALVES | {torch.float32}
ALL = LOW | {torch.float64}
CPU, GPU = frozenset({"cpu"}), frozenset({"cuda"})  # "cuda" is also ROCm's name in torch


@dataclass(frozen=True)
class Provider:
    """One back-end. `missing` says why it cannot be used ('' when it can), `load` gives its functions by op name."""

    name: str
    groups: tuple[str, ...]
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    version: Callable[[], str]
    missing: Callable[[], str]
    load: Callable[[], Mapping[str, Op]]
    build: str = ""  # what to run to get it
    group_dtypes: Mapping[str, frozenset[torch.dtype]] = field(default_factory=dict)  # where a group has fewer

    def refusal(self, group: str, device_type: str, dtype: torch.dtype) -> str:
        """Why this provider cannot serve `group` there, or ''."""
        if group not in self.groups:
            return f"{self.name} has no {group}"
        if device_type not in self.devices:
            return f"{self.name} does not run on {device_type}"
        if dtype not in self.group_dtypes.get(group, self.dtypes):
            return f"{self.name} has no {str(dtype).removeprefix('torch.')} {group}"
        return self.missing()


def functions_of(implementation: object) -> dict[str, Op]:
    """The ops that a module or object has, by name. Raises TypeError for one whose signature is not that of the same function in `reference`."""
    functions = {op: getattr(implementation, op) for ops in GROUPS.values() for op in ops if hasattr(implementation, op)}
    for op, function in functions.items():
        here, face = inspect.signature(function), inspect.signature(getattr(reference, op))
        if here != face:
            raise TypeError(f"{op}{here} of {implementation!r}: the face's is {face}")
    return functions


def _module(name: str) -> Callable[[], Mapping[str, Op]]:
    return lambda: functions_of(importlib.import_module(f"frontier_llm.ops.{name}"))


def _torch_version() -> str:
    return f"torch {torch.__version__}"


def _always() -> str:
    return ""


@cache
def _prebuilt_kernels() -> PrebuiltKernels | str:
    """The kernels of this machine's GPU, or why there are none."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    try:
        return PrebuiltKernels(architecture_of_device())
    except BackendError as error:
        return str(error)


def _triton_missing() -> str:
    found = _prebuilt_kernels()
    return found if isinstance(found, str) else ""


def _triton_version() -> str:
    found = _prebuilt_kernels()
    assert not isinstance(found, str)
    return f"prebuilt for {found.architecture} by Triton {found.tools['triton']}"


def _load_triton() -> Mapping[str, Op]:
    from frontier_llm.ops.gpu import GpuOps

    found = _prebuilt_kernels()
    assert not isinstance(found, str)
    return functions_of(GpuOps(found))


def _flash_attn_missing() -> str:
    if importlib.util.find_spec("flash_attn") is None:
        return "the flash-attn package is not installed"
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError) as error:
        return f"flash-attn does not import: {error}"
    return ""


def apex_missing() -> str:
    """NVIDIA's (or ROCm's) apex has compiled extensions beside it; the PyPI project of the same name is a web toolkit."""
    if importlib.util.find_spec("apex") is None:
        return "apex is not installed"
    if importlib.util.find_spec("apex.multi_tensor_apply") is None:
        return "the installed apex is the PyPI project of that name, which has nothing to do with NVIDIA's: pip uninstall apex"
    missing = [name for name in ("amp_C", "fused_layer_norm_cuda") if importlib.util.find_spec(name) is None]
    return f"apex was built without its extensions {', '.join(missing)}" if missing else ""


def _package_version(name: str) -> str:
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"{name}, unknown version"


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("reference", tuple(GROUPS), CPU | GPU, ALL, _torch_version, _always, _module("reference")),
        Provider("sdpa", ("attention",), CPU | GPU, ALL, _torch_version, _always, _module("sdpa")),
        Provider("torch", ("linear",), GPU, LOW, _torch_version, _always, _module("torch_linear")),
        Provider(
            "cpu",
            tuple(GROUPS),
            CPU,
            frozenset({torch.float32, torch.bfloat16}),
            lambda: f"C++, {torch.ops.frontier_llm.instruction_set()}",
            native.load_cpu_library,
            _module("cpu"),
            native.BUILD_COMMAND,
        ),
        Provider(
            "triton",
            tuple(group for group in GROUPS if group != "linear"),
            GPU,
            LOW,
            _triton_version,
            _triton_missing,
            _load_triton,
            build_command("gfx90a"),
            {"attention": HALVES},
        ),
        Provider(
            "flash_attn",
            ("attention",),
            GPU,
            HALVES,
            lambda: _package_version("flash_attn"),
            _flash_attn_missing,
            _module("flash_attn_provider"),
            "scripts/build_flash_attn_rocm.sh",
        ),
        Provider(
            "apex",
            ("norm", "adamw"),
            GPU,
            LOW,
            lambda: _package_version("apex"),
            apex_missing,
            _module("apex_provider"),
            "scripts/build_apex_rocm.sh",
        ),
    )
}
