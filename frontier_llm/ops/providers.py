"""List of the op back-ends: for each its ops, devices and types, whether it is available, and how to build it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.machinery import PathFinder
from typing import Literal, NamedTuple

import torch

from frontier_llm.errors import BackendError, in_one_line
from frontier_llm.libraries import BUILD_COMMAND
from frontier_llm.machine.precision import LARGEST_HEAD_DIM
from frontier_llm.ops import native, reference, sdpa
from frontier_llm.ops.kernel_table import HEAD_DIMS, MOST_CHOICES, ROPE_BLOCKS, ROUTE_BLOCKS
from frontier_llm.ops.manifest import build_command
from frontier_llm.ops.prebuilt import kernels_of_this_gpu
from frontier_llm.ops.reference import GROUPS, Op

HALVES = frozenset({torch.bfloat16, torch.float16})
LOW = HALVES | {torch.float32}
ALL = LOW | {torch.float64}
# additional ops of a back-end whose attention supports queries and keys from different parts of a sequence
PARTS = frozenset({"attention_block", "attention_block_backward"})
# torch's name for AMD GPUs (ROCm) is "cuda", too
CPU = frozenset({"cpu"})
GPU = frozenset({"cuda"})


# Whether two runs with equal inputs have bit-equal results, forward and backward. "on request": only with
# ops.deterministic. "never": no, or not known.
Determinism = Literal["always", "on request", "never"]


class AttentionNeeds(NamedTuple):
    """Options of attention that a run needs, beyond plain causal attention over one document."""

    documents: bool = False  # masks at document boundaries
    parts: bool = False  # queries and keys from different parts of a sequence, with each row's log-sum-exp
    window: bool = False  # sliding window
    alibi: bool = False  # ALiBi
    softcap: bool = False  # soft cap of the scores


class Sizes(NamedTuple):
    """Sizes of a model that back-ends limit. As sizes 0 means that they are not known, and as limits that none is."""

    head_dim: int = 0
    rotated_dims: int = 0  # dims of each head that rope rotates
    experts: int = 0
    top_k: int = 0  # experts that process a token


UNKNOWN_SIZES = Sizes()


class Refusal(NamedTuple):
    """Reason why a back-end cannot be used, and if possible the command that makes it usable."""

    why: str
    build: str = ""

    def __str__(self) -> str:
        reason = self.why.splitlines()[0]
        return f"{reason}; build: {self.build}" if self.build else reason


@dataclass(frozen=True, kw_only=True, eq=False)
class Provider:
    """An op back-end.

    `missing` returns the reason why the back-end is not available, or ''. `load` returns its functions by op name.
    """

    name: str
    groups: tuple[str, ...]
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    load: Callable[[], Mapping[str, Op]]
    version: Callable[[], str] = lambda: f"torch {torch.__version__}"
    missing: Callable[[], str | Refusal] = lambda: ""
    build: str = ""  # command that builds the back-end.
    # Returns why the back-end's attention does not support queries and keys from different parts of a sequence, or ''
    # if it does. None: it never supports them. Context parallelism with gather or ring needs them.
    parts: Callable[[str, torch.dtype, AttentionNeeds], str] | None = None
    windows: bool = True  # True if the attention supports sliding windows
    softcaps: bool = False  # True if the attention supports soft caps, also together with sliding windows
    required: bool = False  # True: if only its build is missing, `auto` reports an error and takes no slower back-end.
    # Group → its dtypes, for groups that support fewer dtypes than `dtypes`
    group_dtypes: Mapping[str, frozenset[torch.dtype]] = field(default_factory=dict)
    # Group → its largest sizes. "parts" is attention over part of a sequence.
    largest: Mapping[str, Sizes] = field(default_factory=dict)
    on_gpu: Determinism = "always"  # determinism on a GPU; on a CPU it is "always".
    # Returns the deterministic functions. None: the functions of `load` are also used for deterministic runs.
    load_deterministic: Callable[[], Mapping[str, Op]] | None = None

    def determinism(self, device_type: str) -> Determinism:
        """Return whether two runs of this back-end on this type of device have bit-equal results."""
        return "always" if device_type == "cpu" else self.on_gpu

    def _exceeded(self, limits: str, sizes: Sizes) -> str:
        """Return the limit of a row of `largest` that a size exceeds, with the size, or ''."""
        for name, size, limit in zip(Sizes._fields, sizes, self.largest.get(limits, Sizes()), strict=True):
            if limit and size > limit:
                return f"{name} up to {limit}, not {size}"
        return ""

    def refusal(
        self,
        group: str,
        device_type: str,
        dtype: torch.dtype,
        needs: AttentionNeeds | None = None,
        sizes: Sizes = UNKNOWN_SIZES,
    ) -> Refusal | None:
        """Return the reason why this provider cannot be used for `group` on this device and type, or None."""
        if group not in self.groups:
            return Refusal(f"{self.name} has no {group}")
        if device_type not in self.devices:
            return Refusal(f"{self.name} does not run on {device_type}")
        if dtype not in self.group_dtypes.get(group, self.dtypes):
            return Refusal(f"{self.name} has no {str(dtype).removeprefix('torch.')} {group}")
        needs = needs if needs and group == "attention" else AttentionNeeds()
        if exceeded := self._exceeded(group, sizes) or (needs.parts and self._exceeded("parts", sizes)):
            return Refusal(f"{self.name} supports {exceeded}")
        if needs.window and not self.windows and not (needs.softcap and self.softcaps):
            return Refusal(f"{self.name} does not support a sliding window (model.sliding_window)")
        if needs.softcap and not self.softcaps:
            return Refusal(f"{self.name} does not support a soft cap of attention's scores (model.score_softcap)")
        if needs.parts and self.parts is None:
            return Refusal(
                f"{self.name} does not support attention over part of a sequence (parallel.context), which needs each "
                f"row's log-sum-exp"
            )
        if needs.parts and self.parts and (why := self.parts(device_type, dtype, needs)):
            return Refusal(
                f"{self.name} does not support attention over part of a sequence (parallel.context) in this run: {why}"
            )
        missing = self.missing()
        if isinstance(missing, Refusal):
            return missing
        return Refusal(missing, self.build) if missing else None


def functions_of(implementation: object) -> dict[str, Op]:
    """Return the ops of a module or object, by name.

    Raises TypeError if an op's signature differs from the function of the same name in `reference`.
    """
    functions = {
        op: getattr(implementation, op) for ops in GROUPS.values() for op in ops if hasattr(implementation, op)
    }
    for op, function in functions.items():
        here = inspect.signature(function)
        face = inspect.signature(getattr(reference, op))
        if here != face:
            raise TypeError(f"{op}{here} of {implementation!r} differs from the signature of the reference, {face}")
    return functions


def _module(name: str) -> Callable[[], Mapping[str, Op]]:
    return lambda: functions_of(importlib.import_module(f"frontier_llm.ops.{name}"))


def _load_cpu() -> Mapping[str, Op]:
    from frontier_llm.ops.cpu import CpuOps

    return functions_of(CpuOps())


def _any_part(_device_type: str, _dtype: torch.dtype, _needs: AttentionNeeds) -> str:
    return ""


def _flash_parts_missing(device_type: str, dtype: torch.dtype, needs: AttentionNeeds) -> str:
    asked = {"document masks": needs.documents, "ALiBi": needs.alibi, "a sliding window": needs.window}
    if any(asked.values()):
        return f"torch's flash kernels do not support {' or '.join(name for name, wanted in asked.items() if wanted)}"
    if device_type == "cpu":
        return ""
    if dtype in HALVES:
        return sdpa.blocks_missing()
    return f"torch's flash kernels do not support {str(dtype).removeprefix('torch.')} on a GPU"


def _triton_missing() -> str | Refusal:
    try:
        kernels_of_this_gpu()
    except BackendError as error:
        first = error.problems[0]  # with damaged files there are several problems, all with the same fix
        return Refusal(f"{first.where}: {first.what}".removeprefix(": "), first.fix or build_command("gfx90a"))
    return ""


def _triton_version() -> str:
    kernels = kernels_of_this_gpu()
    return f"prebuilt for {kernels.architecture} by Triton {kernels.tools['triton']}"


def _load_triton() -> Mapping[str, Op]:
    from frontier_llm.ops.gpu import GpuOps

    return functions_of(GpuOps(kernels_of_this_gpu()))


def _load_deterministic_flash_attn() -> Mapping[str, Op]:
    from frontier_llm.ops.flash_attn_provider import FlashAttention

    return functions_of(FlashAttention(deterministic=True))


def _flash_attn_missing() -> str:
    if importlib.util.find_spec("flash_attn") is None:
        return "the flash-attn package is not installed"
    try:
        package = importlib.import_module("flash_attn")
    except Exception as error:  # the Triton build raises RuntimeError on a node without a GPU
        return f"flash-attn cannot be imported: {in_one_line(error)}"
    interface = getattr(package, "flash_attn_interface", None)  # None: another package has the same name
    if getattr(interface, "USE_TRITON_ROCM", False):
        return (
            "this is flash-attn's Triton build (FLASH_ATTENTION_TRITON_AMD_ENABLE), which compiles at run time; "
            "only the CK build is used"
        )
    return ""


def _cudnn_missing() -> str:
    if torch.version.hip:
        return "cuDNN needs an NVIDIA GPU"
    return "" if torch.backends.cudnn.is_available() else "this torch has no cuDNN"


def apex_missing() -> str:
    """Return the reason why apex cannot be used, or ''.

    NVIDIA's and ROCm's apex have compiled extensions. The PyPI project named apex is another package, a web toolkit.
    """
    found = importlib.util.find_spec("apex")
    if found is None:
        return "apex is not installed"
    # Without an import: that of PyPI's project can fail, and ROCm's apex compiles its extensions at its import.
    if PathFinder.find_spec("multi_tensor_apply", found.submodule_search_locations or []) is None:
        return "the installed apex is another project of that name from PyPI, not NVIDIA's: run pip uninstall apex"
    missing = [name for name in ("amp_C", "fused_layer_norm_cuda") if importlib.util.find_spec(name) is None]
    if missing:
        return f"apex was built without its extensions {', '.join(missing)}"
    return ""


def _package_version(name: str) -> str:
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"{name}, unknown version"


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider(
            name="reference",
            groups=tuple(GROUPS),
            devices=CPU | GPU,
            dtypes=ALL,
            load=_module("reference"),
            on_gpu="on request",  # torch's index_add_ uses atomics, unless deterministic algorithms are enabled
            parts=_any_part,
            softcaps=True,
        ),
        Provider(
            name="sdpa",
            groups=("attention",),
            devices=CPU | GPU,
            dtypes=ALL,
            load=_module("sdpa"),
            on_gpu="never",  # torch picks a kernel by shape, and most sum the query gradient with atomics
            missing=lambda: sdpa.views_missing(),
            largest={"parts": Sizes(head_dim=LARGEST_HEAD_DIM)},
            parts=_flash_parts_missing,
        ),
        Provider(
            name="cudnn",
            groups=("attention",),
            devices=GPU,
            dtypes=HALVES,
            load=_module("cudnn_provider"),
            on_gpu="never",
            version=lambda: f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
            missing=_cudnn_missing,
        ),
        Provider(
            name="torch",
            groups=("linear",),
            devices=GPU,
            dtypes=LOW,
            load=_module("torch_linear"),
            # hipBLAS may use atomics, unless torch's deterministic algorithms are enabled
            on_gpu="on request" if torch.version.hip else "always",
        ),
        Provider(
            name="cpu",
            groups=tuple(GROUPS),
            devices=CPU,
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            load=_load_cpu,
            parts=_any_part,
            softcaps=True,
            version=lambda: f"C++, {torch.ops.frontier_llm.instruction_set()}",
            missing=native.load_cpu_library,
            build=BUILD_COMMAND,
        ),
        Provider(
            name="triton",
            groups=tuple(group for group in GROUPS if group != "linear"),
            devices=GPU,
            dtypes=LOW,
            load=_load_triton,
            version=_triton_version,
            missing=_triton_missing,
            required=True,
            group_dtypes={"attention": HALVES, "experts": HALVES},
            largest={
                "attention": Sizes(head_dim=HEAD_DIMS[-1]),
                "rope": Sizes(rotated_dims=2 * ROPE_BLOCKS[-1]),
                "experts": Sizes(experts=ROUTE_BLOCKS[-1], top_k=MOST_CHOICES),
            },
            parts=_any_part,
            windows=False,
            softcaps=True,
        ),
        Provider(
            name="flash_attn",
            groups=("attention",),
            devices=GPU,
            dtypes=HALVES,
            load=_module("flash_attn_provider"),
            largest={"attention": Sizes(head_dim=LARGEST_HEAD_DIM)},
            on_gpu="on request",
            load_deterministic=_load_deterministic_flash_attn,
            version=lambda: _package_version("flash_attn"),
            missing=_flash_attn_missing,
            build="scripts/build_flash_attn_rocm.sh",
        ),
        Provider(
            name="apex",
            groups=("norm", "adamw"),
            devices=GPU,
            dtypes=LOW,
            load=_module("apex_provider"),
            on_gpu="never",  # it was not examined whether two runs of apex have equal bits
            version=lambda: _package_version("apex"),
            missing=apex_missing,
            build="scripts/build_apex_rocm.sh",
        ),
    )
}
