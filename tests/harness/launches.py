"""Counts the launches of a training step on a GPU, with tensors on the meta device: this project's kernels and torch's
operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from frontier_llm.comm import build_mesh, serial_mesh
from frontier_llm.comm.group import DONE, TorchGroup
from frontier_llm.config import ModelConfig, RunConfig
from frontier_llm.config.load import build as build_config
from frontier_llm.data.loader import SampleBatch
from frontier_llm.ops import Ops, reference, torch_linear
from frontier_llm.ops.gpu import GpuOps
from frontier_llm.ops.providers import functions_of
from frontier_llm.optim import engines
from frontier_llm.parallel.expert.dispatch import _RowCounts
from frontier_llm.schedule import Action, Kind
from frontier_llm.topology.plan import make_plan
from frontier_llm.training import build
from frontier_llm.training.feed import Feed

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


ONE_RANK: Mapping[str, int | str] = MappingProxyType({})


class Launch(NamedTuple):
    """A kernel launch: the phase of the step, and the name of one of this project's kernels or of an aten operation."""

    phase: str
    name: str


class Source:
    """Data source with microbatches of one token value and, with `documents`, of one document."""

    microbatches = 1

    def __init__(self, rows: int, sequence: int, documents: bool) -> None:
        self._rows = rows
        self._sequence = sequence
        self.reset_at_documents = documents
        self.masks_targets = documents

    def microbatch(self, _step: int, _index: int) -> SampleBatch:
        tokens = np.zeros((self._rows, self._sequence + 1), np.int64)
        documents = np.zeros((self._rows, self._sequence), np.int32)
        return SampleBatch(tokens, documents, documents == 0) if self.reset_at_documents else SampleBatch(tokens)

    def sample_ids(self, _step: int, _index: int) -> range:
        return range(self._rows)


def skip_without_fp32_products_on_meta() -> None:
    """Skip the test on torch 2.10, which ignores out_dtype on the meta device. These tests use meta in place of a GPU.
    torch's GPU kernels honour it.
    """
    total = torch.empty(16, 16, device="meta")
    half = total.to(torch.bfloat16)
    try:
        torch_linear._in_the_product(total, half, half)
    except TypeError:
        pytest.skip(f"torch {torch.__version__} has no addmm with out_dtype on the meta device")


@contextmanager
def with_ops_of(kernels: Any) -> Iterator[None]:
    """Let training use the ops of `kernels`, as `select_run_ops` does on a GPU."""
    functions = functions_of(reference) | functions_of(torch_linear) | functions_of(GpuOps(kernels))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "select_run_ops", lambda *_, **__: Ops(**functions))
        yield


@contextmanager
def without_numbers(kernels: Any) -> Iterator[None]:
    """Let training use the ops of `kernels`, and replace code that needs the values of tensors (meta tensors have
    none).
    """
    skip_without_fp32_products_on_meta()
    with with_ops_of(kernels), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_linear, "weight_gradient_method", lambda *_: "in-product")
        patch.setattr(engines, "initialize", lambda *_, **__: None)
        patch.setattr(
            Feed, "_tensor", lambda feed, array: torch.from_numpy(np.ascontiguousarray(array)).to(feed._device)
        )
        yield


@contextmanager
def ranks_without_transfers(world: int, rows: int = 0) -> Iterator[None]:
    """Let this process be rank 0 of `world` ranks. Messages transfer nothing. Each rank has `rows` rows for experts and
    sends equally many of them to each rank.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchGroup, "exchange", lambda *_: DONE)  # torch has no messages on the meta device
            patch.setattr(_RowCounts, "read", lambda _: [[rows // world] * world] * 2)
            yield
    finally:
        dist.destroy_process_group()


def step_of(
    model: ModelConfig, micro_batch: int, documents: bool, parallel: Mapping[str, int | str] = ONE_RANK
) -> build.TrainState:
    """Return the state of one rank with one microbatch per step.

    Without `parallel` the rank holds the complete model. Gradients of different ranks are summed at the step's end.
    """
    degrees = [degree for degree in parallel.values() if isinstance(degree, int)]
    world = max(degrees, default=1)  # the case has at most one axis with several ranks
    replicas = parallel.get("data", 1)
    content = {
        "model": model.model_dump(),
        "batch": {"global_batch": micro_batch * int(replicas), "micro_batch": micro_batch},
        "precision": {"dtype": "bf16"},
        "train": {"steps": 10},
        "parallel": dict(parallel),
        "comm": {"overlap_gradients": False},
    }
    config = build_config(RunConfig, content)
    plan = make_plan(config, world)
    experts = model.moe is not None
    mesh = build_mesh(plan.grid, 0, plan.placement, experts=experts) if world > 1 else serial_mesh()
    source = Source(micro_batch, model.sequence_length, documents)
    return build.build_state(config, plan, mesh, torch.device("meta"), source)


class _Counting(TorchDispatchMode):
    """Counts operations that are dispatched below autograd, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.counts = Counter[Launch]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        where = next((x.device for x in (*args, *(kwargs or {}).values(), out) if isinstance(x, torch.Tensor)), None)
        moves = not func.is_view and name not in _NO_KERNELS and not name.startswith(("sym_", "_local_scalar"))
        if moves and where is not None and where.type == "meta":
            self.counts[Launch(self.phase, name)] += 1
        return out


def launches(
    kernels: Any,
    model: ModelConfig,
    micro_batch: int = 1,
    documents: bool = False,
    parallel: Mapping[str, int | str] = ONE_RANK,
) -> Counter[Launch]:
    """Count the launches of forward and backward of one microbatch, without the step's begin and end. Call it inside
    `without_numbers`.
    """
    with pytest.MonkeyPatch.context() as patch:
        state = step_of(model, micro_batch, documents, parallel)
        counting = _Counting()
        launch = kernels.launch

        def count(kernel: str, *rest: Any, **arguments: Any) -> None:
            counting.counts[Launch(counting.phase, kernel)] += 1
            launch(kernel, *rest, **arguments)

        def begin(action: Action | None) -> None:
            counting.phase = "" if action is None else "forward" if action.kind is Kind.FORWARD else "backward"

        patch.setattr(kernels, "launch", count)
        patch.setattr(state.pipeline, "on_action", begin)
        state.sync.begin()
        with counting:
            state.pipeline.run(state.feed.step(0), 1.0)
    return Counter({launch: count for launch, count in counting.counts.items() if launch.phase})


def of_a_layer(
    kernels: Any,
    model: ModelConfig,
    micro_batch: int = 1,
    documents: bool = False,
    parallel: Mapping[str, int | str] = ONE_RANK,
) -> Counter[Launch]:
    """Count the launches that one more layer adds."""
    few, more = (
        launches(kernels, model.model_copy(update={"layers": layers}), micro_batch, documents, parallel)
        for layers in (2, 3)
    )
    return more - few
