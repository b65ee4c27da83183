"""Held-out loss with the training layout: the same stages, played forward only."""

from __future__ import annotations

import math

import torch

from frontier_llm.train.build import TrainState
from frontier_llm.train.feed import BatchSource
from frontier_llm.train.step import global_loss


@torch.no_grad()
def evaluate(state: TrainState, source: BatchSource, samples: int) -> float:
    """Mean loss in nats per token over the first samples of a held-out stream. Collective over the world.

    The number of samples is rounded up to whole global batches, so that every layout evaluates the same ones.
    """
    rounds = max(1, math.ceil(samples / state.config.batch.global_batch))
    training, feed = (state.feed, state.current_step), state.new_feed(source)
    losses = []
    try:
        state.feed = feed
        for state.current_step in range(rounds):
            state.global_tokens = feed.count_targets(state.current_step)
            losses.append(global_loss(state, state.evaluator.run()))
    finally:
        state.feed, state.current_step = training
    return sum(losses) / rounds
