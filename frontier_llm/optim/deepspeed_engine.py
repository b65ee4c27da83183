"""A DeepSpeed engine over our stages and groups, with nothing in it that compiles."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from frontier_llm.cluster.rank_env import adopt, environ
from frontier_llm.comm import Axis, process_group
from frontier_llm.config import OptimizerConfig
from frontier_llm.config.deepspeed import INSTALL, deepspeed_settings
from frontier_llm.errors import BackendError
from frontier_llm.ops import AdamWUpdate, Ops
from frontier_llm.optim.engines import EngineInputs
from frontier_llm.tensor_parallel import ShardedParameter


class FusedAdamW(torch.optim.Optimizer):
    """What DeepSpeed calls with its flat fp32 partitions: our kernel. Its groups' values are set before every update."""

    def __init__(self, parameters: Sequence[ShardedParameter], config: OptimizerConfig, ops: Ops) -> None:
        groups = [
            {"params": [p for p in parameters if p.spec.decay is decay], "weight_decay": config.weight_decay * decay}
            for decay in (True, False)
        ]
        super().__init__([group for group in groups if group["params"]], {"lr": config.lr, "step": 0, "grad_scale": 1.0})
        self._config, self._ops = config, ops

    def allocate(self, partitions: Sequence[torch.Tensor]) -> None:
        """Moments for the partitions that DeepSpeed has put in place of the parameters."""
        for flat in partitions:
            self.state[flat] = {"exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all groups that have gradients. DeepSpeed's rehearsal at start-up, step 0, changes nothing."""
        betas, eps = self._config.betas, self._config.eps
        for group in self.param_groups:
            update = AdamWUpdate(group["lr"], *betas, eps, group["weight_decay"], group["step"], group["grad_scale"])
            for flat in group["params"]:
                if flat.grad is not None and update.step > 0:
                    self._ops.adamw_(flat, flat.grad, self.state[flat]["exp_avg"], self.state[flat]["exp_avg_sq"], flat, update)


class _Groups:
    """Our mesh as DeepSpeed asks for it ("mpu"): model parallel is everything that differs between ranks of one dp coordinate."""

    def __init__(self, inputs: EngineInputs) -> None:
        mesh, grid, timeout_s = inputs.mesh, inputs.plan.grid, inputs.config.train.timeout_s
        rank = mesh.world.ranks[mesh.world.rank]
        replica = grid.coordinates(rank)["dp"]
        ranks = tuple(other for other in range(grid.world_size) if grid.coordinates(other)["dp"] == replica)
        self._axes = {"data": mesh.dp, "model": Axis("model", ranks.index(rank), len(ranks), ranks, None, mesh.ledger)}
        self._groups = {name: process_group(axis, timeout_s) for name, axis in self._axes.items()}

    def get_data_parallel_group(self) -> Any:
        return self._groups["data"]

    def get_data_parallel_rank(self) -> int:
        return self._axes["data"].rank

    def get_data_parallel_world_size(self) -> int:
        return self._axes["data"].size

    def get_model_parallel_group(self) -> Any:
        return self._groups["model"]

    def get_model_parallel_rank(self) -> int:
        return self._axes["model"].rank

    def get_model_parallel_world_size(self) -> int:
        return self._axes["model"].size


def _import(device: torch.device) -> Any:
    """deepspeed, with what it would compile unasked switched off. Raises BackendError when it is not installed."""
    # DeepSpeed reads the first and insists on the second, which must be mpirun's where that is the launcher
    adopt({"DS_ACCELERATOR": device.type, "LOCAL_RANK": environ("OMPI_COMM_WORLD_LOCAL_RANK") or "0"})
    try:
        with contextlib.redirect_stdout(sys.stderr):  # its log handlers keep the stream that they find; ours is for data
            import deepspeed
            from deepspeed.ops import __compatible_ops__
    except ImportError as error:
        raise BackendError(f"optimizer.engine=deepspeed needs DeepSpeed: {error}", INSTALL, "optimizer.engine") from error
    # the shared-memory collective that its communication builds on CPUs at start-up, on every rank
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("WARNING")
    return deepspeed


def build_engine(inputs: EngineInputs, parameters: Sequence[ShardedParameter], model: nn.Module) -> Any:
    """The engine over a model whose parameters are on the device and initialised. Collective over the world."""
    deepspeed = _import(inputs.device)
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine

    class Engine(DeepSpeedEngine):
        def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
            """The ZeRO optimizer also for bf16 at stage 1, where DeepSpeed would take one that all-reduces whole gradients."""
            return ZERO_OPTIMIZATION

    config = inputs.config
    for parameter in parameters:  # how DeepSpeed knows what to count once in the gradient norm
        parameter.model_parallel = inputs.mesh.tp.size == 1 or parameter.spec.splits_over("tp")  # type: ignore[attr-defined]
        parameter.ds_pipe_replicated = not parameter.spec.counted  # type: ignore[attr-defined]
    mpu = _Groups(inputs)
    settings = {
        **deepspeed_settings(config, inputs.plan.microbatches),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    deepspeed.init_distributed()
    optimizer = FusedAdamW(parameters, config.optimizer, inputs.ops)
    place = SimpleNamespace(device_rank=inputs.device.index or 0)  # else it takes LOCAL_RANK, also where one device is visible
    return Engine(args=place, model=model, optimizer=optimizer, mpu=mpu, config=settings, config_class=DeepSpeedConfig(settings, mpu))
