"""THE training step: forward and backward through the pipeline, sum the gradients, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from frontier_llm.comm import all_reduce_
from frontier_llm.failpoints import hit
from frontier_llm.model.losses import LOAD
from frontier_llm.optim import GradientSync, learning_rate
from frontier_llm.parallel.pipeline import LOSS
from frontier_llm.training.build import TrainState
from frontier_llm.training.feed import Feed
from frontier_llm.training.guard import Wish
from frontier_llm.training.routing import summary, tell_routers


@dataclass(frozen=True)
class StepResult:
    """What happened in one step; the same on every rank."""

    loss: float  # mean over the step's global batch, nats per token
    gradient_norm: float  # before clipping, unscaled
    learning_rate: float
    loss_scale: float
    skipped: bool  # nothing was updated, anywhere: loss or gradient was not finite, or a spike
    spike: bool = False  # both were finite, but far from those of the steps before (guard.spike_sigmas)
    # by name, without their weights (train.loss_weights)
    further_losses: Mapping[str, float] = field(default_factory=dict)
    routing: Mapping[str, Any] = field(default_factory=dict)  # what the experts had to do (train.routing)
    wish: Wish = field(default_factory=Wish)  # what any rank has been asked for


def train_step(state: TrainState, wish: Callable[[], Wish] = Wish) -> StepResult:
    """One optimizer step over the global batch. Collective over the world; `wish()`: what this rank has been asked for
    meanwhile.

    A loss or gradient that is not finite on any rank reaches every rank through the one sum below, so all take the same
    decision: weights and optimizer state stay as they are, the step counts as skipped, and fp16's loss scale is halved.
    """
    optimizer = state.optimizer
    scaler = state.scaler
    config = state.config.optimizer

    batch = state.feed.step(state.current_step)
    state.sync.begin()
    losses = state.pipeline.run(batch, scaler.scale)
    state.sync.finish()

    lr = learning_rate(config, state.current_step, state.config.train.steps)
    norm_share = optimizer.squared_norm_share()
    sums = global_sums(state, losses, norm_share, wish())
    load = sums[len(sums) - losses[LOAD].numel() :].view_as(losses[LOAD]) if LOAD in losses else None
    # the only time in a step that the host waits for the device
    loss, *further, squared_norm, stop, save = (sums if load is None else sums[: -load.numel()]).tolist()
    norm = math.sqrt(squared_norm) / scaler.scale
    overflowed = not (math.isfinite(norm) and math.isfinite(loss))
    spike = not overflowed and state.spikes.is_spike(loss, norm)
    further_losses = dict(zip([name for name in losses if name not in (LOSS, LOAD)], further, strict=True))
    routing = {} if load is None else summary(load, state.config.model)
    result = StepResult(
        loss, norm, lr, scaler.scale, overflowed or spike, spike, further_losses, routing, Wish(stop > 0, save > 0)
    )

    clip = min(1.0, config.clip_norm / (norm + 1e-6)) if config.clip_norm else 1.0
    if result.skipped:
        state.skipped_steps += 1
    else:
        optimizer.step(lr, grad_scale=clip / scaler.scale)
    if load is not None and not result.skipped:
        tell_routers(state.stages, load)
    scaler.update(overflowed=overflowed)
    state.position = state.position.advance(state.config.batch.global_batch)
    state.current_step += 1
    return result


def global_sums(state: TrainState, losses: Mapping[str, Tensor], squared_norm: Tensor, wish: Wish) -> Tensor:
    """All that every rank must know of a step, in one sum over the world: [losses …, squared gradient norm, stop, save,
    load …], fp64.

    Only last stages have a loss, and the tp ranks of one have the same: the first counts, the others add zero times
    theirs, which is heard where it is not finite. The experts' load is each rank's own.
    """
    counted = [loss * (state.mesh.tp.rank == 0) for name, loss in losses.items() if name != LOAD]
    # filled on the device: a copy would wait
    wishes = [squared_norm.new_full((), float(asked)) for asked in (wish.stop, wish.save)]
    numbers = torch.stack((*counted, squared_norm, *wishes))
    if LOAD in losses:
        numbers = torch.cat((numbers, losses[LOAD].flatten()))
    return all_reduce_(numbers, state.mesh.world)


def local_gradients(state: TrainState, feed: Feed) -> dict[str, Tensor]:
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
