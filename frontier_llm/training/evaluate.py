"""Evaluates the loss on held-out data. The run's own pipeline stages compute it in their layout, forward only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch

from frontier_llm import log
from frontier_llm.config import DataSource, RunConfig
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.meta import read_meta
from frontier_llm.failpoints import hit
from frontier_llm.parallel.stages import LOSS
from frontier_llm.training.build import TrainState
from frontier_llm.training.feed import BatchSource
from frontier_llm.training.guard import Requests
from frontier_llm.training.step import sum_over_world


def evaluate(
    state: TrainState,
    sources: Mapping[str, BatchSource],
    samples: int,
    interrupted: Callable[[], bool],
) -> dict[str, float]:
    """Return and log the loss of each held-out set by name, in nats per token. Collective over the world.

    The loss of the first held-out set is also returned under the key `loss`, and its perplexity under `perplexity`.
    `bits_per_byte` is added if the number of bytes of the set's text is known. `interrupted()` is called after each
    global batch. If `interrupted()` returns True, the result is empty.
    """
    values: dict[str, float] = {}
    for split, source in sources.items():
        loss = held_out_loss(state, source, samples, interrupted)
        if loss is None:
            return {}
        bytes_per_token = _bytes_per_token(state.config.data.splits[split])
        bits_per_byte = loss / math.log(2) / bytes_per_token if bytes_per_token else None
        if not values:
            values = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
            values |= {"bits_per_byte": bits_per_byte} if bits_per_byte is not None else {}
        if split != "validation":
            values[split] = loss
        name = f" {split.removeprefix('validation/')}" if split != "validation" else ""
        bits = f"  {bits_per_byte:.4f} bits per byte" if bits_per_byte is not None else ""
        scored = evaluation_batches(state.config, samples) * state.config.batch.global_batch
        log.info(f"held-out{name} after step {state.current_step}: loss {loss:.4f}{bits} ({scored:,} samples)")
    return values


def evaluation_batches(config: RunConfig, samples: int) -> int:
    """Return the number of global batches of an evaluation of at least `samples` samples."""
    return max(1, math.ceil(samples / config.batch.global_batch))


@torch.no_grad()
def held_out_loss(
    state: TrainState,
    source: BatchSource,
    samples: int,
    interrupted: Callable[[], bool],
) -> float | None:
    """Return the mean loss in nats per token over the first samples of a held-out stream. Collective over the world.

    Every target that the loss mask does not exclude has the same weight. The loss is NaN if the mask excludes every
    target. The number of samples is rounded up to complete global batches, so that every layout evaluates the same
    samples. Returns None if `interrupted()` is True after one of the batches.
    """
    rounds = evaluation_batches(state.config, samples)
    feed = state.new_feed(source)
    loss_sum = 0.0
    targets = 0
    for step in range(rounds):
        hit("train.evaluate")
        counted = int(feed.count_targets(step))
        losses = state.evaluator.run(partial(feed.microbatch, step, global_targets=counted))
        sums = sum_over_world(state.mesh, losses, squared_norm=torch.zeros_like(losses[LOSS]), requests=Requests())
        if counted:  # the loss of a batch without targets is 0 / 0
            loss_sum += sums.loss * counted
        targets += counted
        if interrupted():
            return None
    return loss_sum / targets if targets else math.nan


def _bytes_per_token(blend: tuple[DataSource, ...] | str) -> float | None:
    """Return the mean bytes per token of a held-out blend.

    None if the size of the text is not recorded, or if some of its tokens do not count in the loss.
    """
    if isinstance(blend, str) or any(IndexedDataset(source.path, scan=False).modes is not None for source in blend):
        return None
    metas = [read_meta(source.path) for source in blend]
    known = [meta for meta in metas if meta is not None and meta.text_bytes]
    if len(known) < len(metas):
        return None
    return sum(meta.text_bytes for meta in known) / sum(meta.tokens for meta in known)
