"""In-context tasks while training: each option of each question is a row of a microbatch, and the training stages play it forward only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from frontier_llm import log
from frontier_llm.comm import all_reduce_
from frontier_llm.config import RunConfig
from frontier_llm.data.loader import Batches
from frontier_llm.data.tokenizer import load_tokenizer
from frontier_llm.inference.evaluate import Asked, TaskResult, ask
from frontier_llm.inference.score import Pair, check_requests
from frontier_llm.inference.tasks import read_task
from frontier_llm.model import Microbatch
from frontier_llm.train.build import TrainState


@dataclass
class Texts:
    """A sample stream of (context, continuation): one in each sample, behind it zeros, where causal attention never looks from within."""

    pairs: Sequence[Pair]
    sequence_length: int
    masked: bool = True  # of a sample its continuation alone counts

    def fill(self, k: int, tokens_S1: NDArray[np.int64], learnt_S1: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """See SampleStream; past the last text nothing counts. What does not fit is cut from the left."""
        tokens_S1[:] = 0
        assert learnt_S1 is not None
        learnt_S1[:] = False
        if k < len(self.pairs):
            context, continuation = self.pairs[k]
            text = [*context, *continuation][-len(tokens_S1) :]
            tokens_S1[: len(text)] = text
            learnt_S1[max(len(text) - len(continuation), 1) : len(text)] = True
        return np.array([len(tokens_S1)], np.int64)


def open_tasks(config: RunConfig) -> list[Asked]:
    """The run's tasks as tokens. Raises ConfigError for an option that the model's context or vocabulary cannot hold."""
    if not config.train.eval_tasks:
        return []
    assert config.data.tokenizer is not None  # cli.checks
    tokenizer = load_tokenizer(config.data.tokenizer)
    tasks = [ask(tokenizer, read_task(name, one.path, one.limit), one.shots) for name, one in config.train.eval_tasks.items()]
    for task in tasks:
        check_requests(config.model, task.pairs)
    return tasks


def evaluate_tasks(state: TrainState, tasks: Sequence[Asked], interrupted: Callable[[], bool]) -> dict[str, Mapping[str, float]]:
    """Accuracies by kind and task; logged. Collective over the world. Empty when `interrupted()`, asked after each global batch, said so."""
    results: list[TaskResult] = []
    for task in tasks:
        scores = log_likelihoods(state, task.pairs, interrupted)
        if scores is None:
            return {}
        result = task.judge(scores)
        results.append(result)
        log.info(
            f"task {result.task} after step {state.current_step}: accuracy {result.acc:.4f} of {result.items}, per token {result.acc_token:.4f}"
        )
    normed = {result.task: result.acc_norm for result in results if result.acc_norm is not None}
    return {
        "accuracy": {result.task: result.acc for result in results},
        "accuracy_per_token": {result.task: result.acc_token for result in results},
        **({"accuracy_per_character": normed} if normed else {}),
    }


@torch.no_grad()
def log_likelihoods(state: TrainState, pairs: Sequence[Pair], interrupted: Callable[[], bool]) -> list[float] | None:
    """log p(continuation | context) of each pair, on every rank; None when `interrupted()`. Collective over the world."""
    batch, mesh = state.config.batch, state.mesh
    texts = Texts(pairs, state.config.model.sequence_length)
    source = Batches(texts, batch.global_batch, batch.micro_batch, mesh.dp.rank, mesh.dp.size, read_ahead=0)
    feed, steps = state.new_feed(source), math.ceil(len(pairs) / batch.global_batch)
    losses_R = torch.zeros(steps * batch.global_batch, dtype=torch.float64, device=state.device)

    def microbatch(step: int, index: int) -> Microbatch:
        rows = source.sample_ids(step, index)
        return replace(feed.microbatch(step, index, 1), row_losses_B=losses_R[rows.start : rows.stop])

    for step in range(steps):
        state.evaluator.run(partial(microbatch, step))
        if interrupted():
            return None
    # the tp ranks of a last stage have the same, those of cp each their tokens' part
    total_R = all_reduce_(losses_R * (mesh.tp.rank == 0), mesh.world)
    return [-loss for loss in total_R[: len(pairs)].tolist()]
