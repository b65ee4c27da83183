"""Builds a DeepSpeed engine that uses the pipeline stages and process groups of this package.

Features of DeepSpeed that compile code at run time are disabled.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from frontier_llm.blueprint.optimizers import OptimizerRule
from frontier_llm.comm import Axis, process_group
from frontier_llm.config.deepspeed import INSTALL, deepspeed_settings
from frontier_llm.errors import BackendError
from frontier_llm.optim.engines import EngineInputs
from frontier_llm.optim.registry import Slice, SliceUpdate, slice_update
from frontier_llm.parallel.tensor import ShardedParameter
from frontier_llm.run.rank_env import adopt, environ


class PartitionOptimizer(torch.optim.Optimizer):
    """The optimizer that DeepSpeed calls on its flat fp32 partitions. It applies this package's formula.

    The caller sets lr, step and grad_scale of the parameter groups before every update.
    """

    def __init__(self, parameters: Sequence[ShardedParameter], rule: OptimizerRule, formula: SliceUpdate) -> None:
        """Group the parameters by weight decay and states. DeepSpeed makes one partition of each group."""

        def alike(parameter: ShardedParameter) -> tuple[bool, tuple[str, ...]]:
            return not parameter.spec.parameter.decay, rule.states(parameter.spec.parameter)

        groups = [
            {"params": list(group), "decay": not plain, "states": states}
            for (plain, states), group in groupby(sorted(parameters, key=alike), key=alike)
        ]
        super().__init__(groups, {"lr": 0.0, "step": 0, "grad_scale": 1.0})
        self._formula = formula

    def allocate(self) -> None:
        """Allocate the optimizer states.

        Before this call, DeepSpeed must have replaced the parameters by its flat partitions.
        """
        for group in self.param_groups:
            for flat in group["params"]:
                self.state[flat] = {name: torch.zeros_like(flat) for name in group["states"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all groups that have gradients. DeepSpeed's test call at start-up has step 0 and changes nothing."""
        for group in self.param_groups:
            for flat in group["params"]:
                if flat.grad is not None and group["step"] > 0:
                    part = Slice(flat, flat.grad, self.state[flat], flat, group["decay"])
                    self._formula.update(part, group["lr"], group["step"], group["grad_scale"])


def _groups(inputs: EngineInputs) -> SimpleNamespace:
    """Return the mesh in the form of DeepSpeed's interface `mpu`.

    The "model parallel" group has all ranks with this rank's dp coordinate.
    """
    mesh = inputs.mesh
    grid = inputs.plan.grid
    rank = mesh.world.ranks[mesh.world.rank]
    replica = grid.coordinates(rank)["dp"]
    ranks = tuple(other for other in range(grid.world_size) if grid.coordinates(other)["dp"] == replica)
    answers: dict[str, Callable[[], Any]] = {}
    for name, axis in {
        "data": mesh.dp,
        "model": Axis("model", ranks.index(rank), len(ranks), ranks, None, mesh.ledger),
    }.items():
        facts = {
            "group": process_group(axis, inputs.config.train.timeout_s),
            "rank": axis.rank,
            "world_size": axis.size,
        }
        answers |= {f"get_{name}_parallel_{fact}": partial(lambda value: value, value) for fact, value in facts.items()}
    return SimpleNamespace(**answers)


def _import(device: torch.device) -> Any:
    """Import deepspeed and disable its compilation at start-up. Raises BackendError if it is not installed."""
    # DeepSpeed reads DS_ACCELERATOR and requires LOCAL_RANK, which must be mpirun's value if mpirun started the rank.
    adopt({"DS_ACCELERATOR": device.type, "LOCAL_RANK": environ("OMPI_COMM_WORLD_LOCAL_RANK") or "0"})
    try:
        # DeepSpeed's log handlers keep the stream that they find at import. stdout is reserved for data.
        with contextlib.redirect_stdout(sys.stderr):
            import deepspeed
            from deepspeed.ops import __compatible_ops__
    except ImportError as error:
        raise BackendError(
            f"optimizer.engine=deepspeed needs DeepSpeed: {error}", INSTALL, "optimizer.engine"
        ) from error
    # On a CPU device DeepSpeed would compile its shared-memory collective on every rank at start-up.
    # The next line prevents this.
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("WARNING")
    return deepspeed


def build_engine(inputs: EngineInputs, parameters: Sequence[ShardedParameter], model: nn.Module) -> Any:
    """Build the engine for a model whose parameters are on the device and initialised. Collective over the world."""
    deepspeed = _import(inputs.device)
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine

    class Engine(DeepSpeedEngine):
        def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
            """Select DeepSpeed's ZeRO optimizer, also for bf16 with stage 1.

            DeepSpeed itself would select an optimizer that all-reduces complete gradients.
            """
            return ZERO_OPTIMIZATION

    config = inputs.config
    # DeepSpeed counts "model parallel" parameters in the gradient norm on every rank, unless they are marked as
    # replicated.
    for parameter in parameters:
        parameter.model_parallel = True  # type: ignore[attr-defined]
        parameter.ds_pipe_replicated = not parameter.spec.counted  # type: ignore[attr-defined]
    mpu = _groups(inputs)
    settings = {
        **deepspeed_settings(config, inputs.plan.microbatches),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    deepspeed.init_distributed()
    optimizer = PartitionOptimizer(parameters, inputs.rule, slice_update(config.optimizer, inputs.ops))
    # Without `device_rank` DeepSpeed would use LOCAL_RANK as the device index, even if only one device is visible.
    place = SimpleNamespace(device_rank=inputs.device.index or 0)
    return Engine(
        args=place,
        model=model,
        optimizer=optimizer,
        mpu=mpu,
        config=settings,
        config_class=DeepSpeedConfig(settings, mpu),
    )
