"""One training step: forward and backward through the pipeline, gradient sums, clipping, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frontier_llm.comm import Mesh, all_reduce_
from frontier_llm.model.losses import LOAD
from frontier_llm.optim import learning_rate
from frontier_llm.parallel.stages import LOSS
from frontier_llm.training.build import TrainState
from frontier_llm.training.guard import Requests
from frontier_llm.training.routing import summary, tell_routers

# Besides the losses, a step sums these values over all ranks. The prefix distinguishes their keys from names of losses.
SQUARED_NORM = "step.squared_norm"
STOP = "step.stop"
SAVE = "step.save"


@dataclass(frozen=True)
class StepResult:
    """Result of one step. It is the same on every rank."""

    loss: float  # mean over the step's global batch, nats per token
    gradient_norm: float  # L2 norm before clipping, without the loss scale
    learning_rate: float
    loss_scale: float
    skipped: bool  # True if no rank has updated its weights: loss or gradient was not finite, or the step is a spike.
    # Loss and gradient are finite, but far above the values of the last steps (guard.spike_sigmas).
    spike: bool = False
    # losses besides the language-model loss, by name, before multiplication by train.loss_weights
    further_losses: Mapping[str, float] = field(default_factory=dict)
    routing: Mapping[str, Any] = field(default_factory=dict)  # load of the experts (training.routing.summary)
    requests: Requests = field(default_factory=Requests)  # requests that any rank received


@dataclass(frozen=True)
class StepSums:
    """Losses, gradient norm, requests and expert load of a step, summed over all ranks. Equal on every rank."""

    loss: float  # mean over the global batch, nats per token
    further_losses: Mapping[str, float]  # name → loss, not yet multiplied by its weight
    squared_norm: float  # squared norm of the gradient, times the squared loss scale
    requests: Requests  # requests that any rank received.
    # Rows per expert, entropy and dropped rows of each layer (model.experts.Routed.load): the sum on the device, and
    # its copy on the host
    load_LE: Tensor | None
    load_on_host_LE: NDArray[np.float64] | None


def train_step(state: TrainState, requests: Callable[[], Requests] = Requests) -> StepResult:
    """Run one optimizer step over the global batch. Collective over the world.

    `requests()` returns the requests that this rank has received.

    If loss or gradient is not finite on any rank, the sum over all ranks is not finite. All ranks therefore skip the
    same step: weights and optimizer state stay unchanged. With fp16 a skipped step halves the loss scale.
    """
    optimizer = state.optimizer
    scaler = state.scaler
    config = state.config.optimizer
    loss_scale = scaler.scale

    batch = state.feed.step(state.current_step)
    state.sync.begin()
    losses = state.pipeline.run(batch, loss_scale)
    state.sync.finish()
    sums = sum_over_world(state.mesh, losses, optimizer.squared_norm_share(), requests())

    norm = math.sqrt(sums.squared_norm) / loss_scale
    is_finite = math.isfinite(norm) and math.isfinite(sums.loss)
    is_spike = is_finite and state.spikes.is_spike(sums.loss, norm)
    is_skipped = is_spike or not is_finite
    routing = {} if sums.load_on_host_LE is None else summary(sums.load_on_host_LE, state.config.model)
    lr = learning_rate(config, state.current_step, state.config.train.steps)
    if is_skipped:
        state.skipped_steps += 1
    else:
        clip = min(1.0, config.clip_norm / (norm + 1e-6)) if config.clip_norm else 1.0
        optimizer.step(lr, grad_scale=clip / loss_scale)
        if sums.load_LE is not None:
            tell_routers(state.stages, sums.load_LE)
    scaler.update(overflowed=not is_finite)
    state.position = state.position.advance(state.config.batch.global_batch)
    state.current_step += 1
    return StepResult(
        loss=sums.loss,
        gradient_norm=norm,
        learning_rate=lr,
        loss_scale=loss_scale,
        skipped=is_skipped,
        spike=is_spike,
        further_losses=sums.further_losses,
        routing=routing,
        requests=sums.requests,
    )


def sum_over_world(mesh: Mesh, losses: Mapping[str, Tensor], squared_norm: Tensor, requests: Requests) -> StepSums:
    """Sum losses, gradient norm, requests and expert load over all ranks in one fp64 collective.

    In a step, the host waits for the device only in this function.

    Only last stages have a loss, and the tp ranks of a stage have the same loss. Only tp rank 0's loss is counted. The
    other ranks add 0 × loss, so that a NaN on any rank still reaches the sum. Each rank adds the load of the tokens
    that it routed itself.
    """
    is_counted = mesh.tp.rank == 0
    addends = {name: loss * is_counted for name, loss in losses.items() if name != LOAD}
    addends[SQUARED_NORM] = squared_norm
    # `new_full` fills the value on the device. A copy from the host would make the host wait.
    addends[STOP] = squared_norm.new_full((), float(requests.stop))
    addends[SAVE] = squared_norm.new_full((), float(requests.save))
    numbers = torch.stack(list(addends.values()))
    load_LE = losses.get(LOAD)
    if load_LE is not None:
        numbers = torch.cat((numbers, load_LE.flatten()))
    summed = all_reduce_(numbers, mesh.world)
    on_host = summed.cpu().numpy()  # one copy for all sums, because the host waits for each copy
    load_on_host_LE = None
    if load_LE is not None:
        load_LE = summed[len(addends) :].view_as(load_LE)
        load_on_host_LE = on_host[len(addends) :].reshape(load_LE.shape)
    sums = dict(zip(addends, on_host[: len(addends)].tolist(), strict=True))
    return StepSums(
        loss=sums[LOSS],
        further_losses={name: sums[name] for name in losses if name not in (LOSS, LOAD)},
        squared_norm=sums[SQUARED_NORM],
        requests=Requests(stop=sums[STOP] > 0, save=sums[SAVE] > 0),
        load_LE=load_LE,
        load_on_host_LE=load_on_host_LE,
    )
