"""Runs the training step of one rank with the ops of a GPU, on tensors without memory (torch's meta device).

Every collective and message goes to torch.distributed, whose Python functions check its arguments. torch's process
group `fake` transfers nothing, so one process stands for all ranks. The kernels of this project are not launched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from frontier_llm.certificate.axis_types.small import SmallSource, plan_of
from frontier_llm.certificate.axis_types.trace import innermost, stack, step_line, text_of, visible
from frontier_llm.certificate.device_step.waits import HostWaits, waits_for_values
from frontier_llm.comm import Mesh, build_mesh, serial_mesh
from frontier_llm.config import RunConfig
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.model.experts import Routed, Router
from frontier_llm.ops import Ops, attention_needs, reference, sizes_of, working_dtype
from frontier_llm.ops.driver import Argument, Grid
from frontier_llm.ops.gpu import GpuOps
from frontier_llm.ops.kernel_table import all_kernels, variants
from frontier_llm.ops.prebuilt import Kernels
from frontier_llm.ops.providers import PROVIDERS, Provider, functions_of
from frontier_llm.ops.reference import GROUPS, Op
from frontier_llm.ops.select import Conditions
from frontier_llm.parallel.expert import Choices
from frontier_llm.schedule import Action, Kind
from frontier_llm.topology.engine_rules import in_flight
from frontier_llm.topology.expert_nodes import run_layout
from frontier_llm.topology.plan import ParallelPlan
from frontier_llm.training.build import TrainState, build_state
from frontier_llm.training.step import train_step

META = torch.device("meta")
# Back-ends of a GPU that need no other package, in the order in which `auto` tries them.
BACKENDS = ("triton", "torch", "sdpa", "reference")
# Operations of torch that launch no kernel.
_NO_KERNELS = (
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "resize_",
)


class MixedDevices(Exception):
    """An operation, kernel or communication received a tensor on the host, but needs it on the device."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} needs all tensors on the device, and one of them is on the CPU")
        lines = stack()
        self.line = text_of(visible(lines) or step_line(lines) or innermost(lines))


class NotCountable(Exception):
    """The step cannot run without memory: it needs a back-end that is not installed, or the values of a tensor."""


class Launch(NamedTuple):
    """A kernel launch: the phase of the step, one of this project's kernels or an operation of torch, and its line."""

    phase: str  # "forward", "backward", or "" outside of the microbatches
    name: str
    line: str
    is_ours: bool


class Copy(NamedTuple):
    """A copy between host and device."""

    phase: str
    to_device: bool
    line: str
    waits: bool


class DeviceStep(HostWaits):
    """Counts launches, copies and waits of a step on the meta device, and refuses mixed devices.

    Values that the host reads are replaced: numbers by 1, truth values by True, and numbers of rows by equal parts.
    """

    def __init__(self) -> None:
        super().__init__("meta")
        self.launches = Counter[Launch]()
        self.copies = Counter[Copy]()
        self.rows = 0  # rows of the newest router: tokens times experts of a token, on this rank
        self._pinned: list[Tensor] = []

    def clear(self) -> None:
        """Reset all counts."""
        self.launches.clear()
        self.copies.clear()
        self.waits.clear()

    def launch(self, name: str, is_ours: bool) -> None:
        """Count a launch at the current line."""
        lines = stack()
        line = text_of(visible(lines) or innermost(lines))
        self.launches[Launch(self.phase, name, line, is_ours)] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation and run it."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name == "_pin_memory":
            self._pinned.append(args[0])
            return args[0]
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
            if source.device.type != target.type:
                return self._copy(func, args, kwargs, source, target)
        on_host = [x for x in tensors if x.device.type == "cpu"]
        on_device = len(on_host) < len(tensors)
        communicates = func.namespace == "c10d" and name != "barrier"
        if any(x.dim() for x in on_host) and (on_device or communicates):
            raise MixedDevices(f"{func.namespace}.{name}")
        reads = on_device and waits_for_values(func, args, kwargs)
        if reads:
            self.wait(name)
            if name == "_local_scalar_dense":
                return torch.ones((), dtype=args[0].dtype).item()
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not reads:
                raise
            raise NotCountable(f"{self.waits[-1].line}: {name} needs the values of a tensor") from error
        where = next((x.device for x in (*args, *kwargs.values(), out) if isinstance(x, Tensor)), None)
        launches = not func.is_view and name not in _NO_KERNELS and not name.startswith("sym_")
        if launches and where == META:
            self.launch(name, is_ours=False)
        return out

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any], source: Tensor, target: torch.device) -> Tensor:
        """Count a copy between host and device and return its result."""
        host = args[0] if target.type == "cpu" and func.overloadpacket.__name__ == "copy_" else source
        is_pinned = any(host.untyped_storage()._cdata == x.untyped_storage()._cdata for x in self._pinned)
        waits = not (is_pinned and _is_asynchronous(func, args, kwargs))
        line = text_of(innermost(stack()))
        self.copies[Copy(self.phase, target == META, line, waits)] += 1
        if waits:
            self.wait(func.overloadpacket.__name__)
        if target == META:
            return func(*args, **kwargs)
        return args[0] if host is not source else self._on_host(source, kwargs.get("dtype") or source.dtype)

    def _on_host(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if x.is_floating_point() or x.dim() < 2:
            return torch.ones(x.shape, dtype=dtype)
        parts = x[0].numel()  # an integer matrix contains numbers of token rows: each number gets an even share
        even = [self.rows // parts + (part < self.rows % parts) for part in range(parts)]
        return torch.tensor(even, dtype=dtype).view(x.shape[1:]).expand(x.shape)


def _is_asynchronous(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if func.overloadpacket.__name__ == "copy_" and len(args) > 2:
        return bool(args[2])
    return bool(kwargs.get("non_blocking", False))


class UnloadedKernels:
    """The kernels of an architecture without a device. A launch only checks its kernel and variant."""

    def __init__(self, architecture: str) -> None:
        self._variants = {name: variants(name, architecture) for name in all_kernels()}

    def block(self, kernel: str, variant: str, name: str) -> int:
        """Return a compile-time constant of a variant."""
        return self._variants[kernel][variant].constants[name]

    def launch(self, kernel: str, dtype: torch.dtype, variant: str, grid: Grid, /, **arguments: Argument) -> None:
        """Raise KeyError for an unknown variant."""
        self._variants[kernel][variant]


class _CountedKernels:
    """Kernels whose launches a `DeviceStep` counts."""

    def __init__(self, kernels: Kernels, step: DeviceStep) -> None:
        self._kernels = kernels
        self._step = step
        self.block = kernels.block

    def launch(self, kernel: str, dtype: torch.dtype, variant: str, grid: Grid, /, **arguments: Argument) -> None:
        """Count the launch. Raises MixedDevices for a tensor on the host."""
        if any(isinstance(value, Tensor) and value.device != META for value in arguments.values()):
            raise MixedDevices(kernel)
        self._step.launch(kernel, is_ours=True)
        self._kernels.launch(kernel, dtype, variant, grid, **arguments)


def device_ops(config: RunConfig, kernels: Kernels, step: DeviceStep, in_parts: bool) -> Ops:
    """Return the ops that the run uses on a GPU. With `auto` this project's kernels come first.

    `in_parts`: attention is computed over parts of the keys. Raises NotCountable.
    """
    dtype = working_dtype(config.precision.dtype)
    conditions = Conditions("cuda", dtype, attention_needs(config, in_parts), sizes=sizes_of(config.model))
    tables = {"triton": functions_of(GpuOps(_CountedKernels(kernels, step)))}
    functions: dict[str, Op] = {}
    for group, names in GROUPS.items():
        provider = _provider(group, getattr(config.ops, group), conditions)
        table = tables.setdefault(provider.name, {}) or provider.load()
        functions |= {op: table.get(op, getattr(reference, op)) for op in names}
    return Ops(**functions)


def _provider(group: str, wanted: str, conditions: Conditions) -> Provider:
    refusals = []
    for name in BACKENDS if wanted == "auto" else (wanted,):
        provider = PROVIDERS[name]
        if name == "triton":
            # the kernels need not be built, because this step does not load them
            provider = replace(provider, missing=lambda: "")
        refusal = conditions.refusal(provider, group)
        if refusal is None:
            return provider
        refusals.append(f"{name}: {refusal}")
    raise NotCountable(f"ops.{group}={wanted} is not available here: {'; '.join(refusals)}")


@contextmanager
def _mesh_of_one_process(config: RunConfig, plan: ParallelPlan, rank: int) -> Iterator[Mesh]:
    """Yield the mesh of a rank. Its groups transfer nothing."""
    if plan.grid.world_size == 1:
        yield serial_mesh()
        return
    devices = dist.Backend.backend_capability["fake"]
    if "meta" not in devices:
        devices.append("meta")
    machine = load_machine(config.machine)
    by_node = config.model.moe is not None and run_layout(config, plan.grid.world_size, rates(machine)).expert_nodes > 1
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.grid.world_size)
    try:
        yield build_mesh(
            plan.grid,
            rank,
            plan.placement,
            tied_embeddings=config.model.tied_embeddings,
            comm=config.comm.model_copy(update={"in_flight": in_flight(config), "transport": "torch"}),
            ranks_per_node=min(machine.devices_per_node, plan.grid.world_size),
            experts=config.model.moe is not None,
            by_node=by_node,
        )
    finally:
        dist.destroy_process_group()


def run_device_step(config: RunConfig, stage: int, kernels: Kernels) -> DeviceStep:
    """Run two steps of the first rank of a pipeline stage and return the counts of the second one.

    Some back-ends wait once, at their first use. Raises MixedDevices or NotCountable.
    """
    plan = plan_of(config)
    rank = plan.grid.group("pp", 0)[stage]
    step = DeviceStep()
    with _mesh_of_one_process(config, plan, rank) as mesh:
        way = config.parallel.context_attention
        ops = device_ops(config, kernels, step, in_parts=mesh.cp.size > 1 and way != "heads")
        source = SmallSource(config, mesh.dp.rank)
        state = build_state(config, plan, mesh, META, source, draws=False, ops=ops)
        _observe(state, step)
        with step:
            train_step(state)
            state.optimizer.wait_for_gather()
            step.clear()
            train_step(state)
            state.optimizer.wait_for_gather()
    return step


def _observe(state: TrainState, step: DeviceStep) -> None:
    """Report the phases of the training step and the rows of the routers to `step`."""

    def begin(action: Action | None) -> None:
        if action is None:
            step.phase = ""
        elif action.kind.computes:
            step.phase = "forward" if action.kind is Kind.FORWARD else "backward"

    def routed(router: Router, _: Any, output: tuple[Choices, Tensor, Routed]) -> None:
        step.rows = output[0].experts_Nk.numel() * router.context.etp

    state.pipeline.on_action = begin
    for stage in state.stages:
        for module in stage.modules():
            if isinstance(module, Router):
                module.register_forward_hook(routed)
