"""THE training step: forward and backward through the pipeline, sum the gradients, clip, update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from frontier_llm.comm import all_reduce_
from frontier_llm.failpoints import hit
from frontier_llm.optim import GradientSync, learning_rate
from frontier_llm.train.build import TrainState
from frontier_llm.train.feed import Feed


@dataclass(frozen=True)
class StepResult:
    """What happened in one step; the same on every rank."""

    loss: float  # mean over the step's global batch, nats per token
    gradient_norm: float  # before clipping, unscaled
    learning_rate: float
    loss_scale: float
    skipped: bool  # nothing was updated, anywhere: loss or gradient was not finite, or a spike
    spike: bool = False  # both were finite, but far from those of the steps before (guard.spike_sigmas)
    further_losses: Mapping[str, float] = field(default_factory=dict)  # by name, without their weights (train.loss_weights)


def train_step(state: TrainState) -> StepResult:
    """One optimizer step over the global batch. Collective over the world.

    A loss or gradient that is not finite on any rank reaches every rank through the two sums below, so all take the same
    decision: weights and optimizer state stay as they are, the step counts as skipped, and fp16's loss scale is halved.
    """
    optimizer, scaler, config, train = state.optimizer, state.scaler, state.config.optimizer, state.config.train

    batch = state.feed.step(state.current_step)
    state.sync.begin()
    local_losses = state.pipeline.run(batch, scaler.scale)
    state.sync.finish()

    # the only time in a step that the host waits for the device
    squared_norm = all_reduce_(optimizer.squared_norm_share(), state.mesh.world)
    loss, *further, scaled_norm = torch.cat((global_losses(state, local_losses), squared_norm.sqrt()[None])).tolist()
    norm = scaled_norm / scaler.scale
    lr = learning_rate(config, state.current_step, train.steps)
    overflowed = not (math.isfinite(norm) and math.isfinite(loss))
    spike = not overflowed and state.spikes.is_spike(loss, norm)
    terms = dict(zip(train.loss_weights, further, strict=True))
    result = StepResult(loss, norm, lr, scaler.scale, skipped=overflowed or spike, spike=spike, further_losses=terms)

    if result.skipped:
        state.skipped_steps += 1
    else:
        clip = min(1.0, config.clip_norm / (norm + 1e-6)) if config.clip_norm else 1.0
        optimizer.step(lr, grad_scale=clip / scaler.scale)
    scaler.update(overflowed=overflowed)
    state.current_step += 1
    return result


def local_gradients(state: TrainState, feed: Feed) -> dict[str, torch.Tensor]:
    """Forward and backward of the current step over `feed`: this rank's unsummed gradients by parameter.

    Changes nothing but the gradient buffers; for the native engine alone.
    """
    sync = state.sync
    assert isinstance(sync, GradientSync)
    sync.begin(reduce=False)
    state.pipeline.run(feed.step(state.current_step), state.scaler.scale)
    gradients = sync.gradients
    hit("train.recomputed", next(iter(gradients.values())).view(-1))
    return gradients


def global_losses(state: TrainState, local_losses: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Sums over the world, the loss first: a stage may have some of them, and the tp ranks of one have the same.

    So only tp rank 0 counts; the others add zero times theirs, which is heard where it is not finite.
    """
    return all_reduce_(torch.stack(tuple(local_losses.values())) * (state.mesh.tp.rank == 0), state.mesh.world)
