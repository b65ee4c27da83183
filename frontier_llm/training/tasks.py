"""Evaluates in-context tasks during training. The pipeline stages compute only the forward pass, over the answer
options of each question.

Several options are packed into one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from frontier_llm.training.build import TrainState


class PackedTexts:
    """A sample stream that packs texts of the form (context, continuation) into samples.

    Each text is a document of its own, so attention does not cross from one text to another.
    """

    masked = True  # the loss covers only the continuation of each text

    def __init__(self, pairs: Sequence[Pair], sequence_length: int, most: int | None = None) -> None:
        """`most` limits the number of texts in each sample; None means no limit.

        A text that is longer than a sample is truncated from the left.
        """
        self.sequence_length = sequence_length
        self._texts = [[*context, *continuation][-(sequence_length + 1) :] for context, continuation in pairs]
        self._counted = [len(continuation) for _, continuation in pairs]
        self._rows: list[list[int]] = []  # for each sample: the numbers of its texts, in order
        room = 0
        for number, text in enumerate(self._texts):
            if len(text) > room or len(self._rows[-1]) == most:
                self._rows.append([])
                room = sequence_length + 1
            self._rows[-1].append(number)
            room -= len(text)

    def __len__(self) -> int:
        return len(self._rows)

    def fill(
        self,
        k: int,
        tokens_S1: NDArray[np.int64],
        learnt_S1: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.int64]:
        """Write sample `k` and its loss mask, and return the lengths of its documents.

        Samples after the last text are masked completely.
        """
        assert learnt_S1 is not None
        tokens_S1[:] = 0
        learnt_S1[:] = False
        lengths = []
        end = 0
        for number in self._numbers(k):
            text = self._texts[number]
            start = end
            end = end + len(text)
            tokens_S1[start:end] = text
            learnt_S1[max(end - self._counted[number], start + 1) : end] = True
            lengths.append(len(text))
        return np.array([*lengths, len(tokens_S1) - end], np.int64)

    def origin(self, k: int, place: int) -> None:
        """Return None, because the texts come from no dataset."""

    def texts_of_targets(self, k: int) -> NDArray[np.int64]:
        """Return, for each target of sample `k`, the number of the text that it belongs to.

        For a masked target the number has no meaning.
        """
        numbers = self._numbers(k)
        texts_S1 = np.zeros(self.sequence_length + 1, np.int64)
        of_tokens = np.repeat(np.array(numbers, np.int64), [len(self._texts[number]) for number in numbers])
        texts_S1[: len(of_tokens)] = of_tokens
        return texts_S1[1:]

    def _numbers(self, k: int) -> list[int]:
        return self._rows[k] if k < len(self._rows) else []


def open_tasks(config: RunConfig) -> list[Asked]:
    """Return the run's tasks, converted to tokens.

    Raises ConfigError if an option does not fit into the model's context or vocabulary.
    """
    if not config.train.eval_tasks:
        return []
    assert config.data.tokenizer is not None  # cli.checks
    tokenizer = load_tokenizer(config.data.tokenizer)
    tasks = [
        ask(tokenizer, read_task(name, one.path, one.limit), one.shots) for name, one in config.train.eval_tasks.items()
    ]
    for task in tasks:
        check_requests(config.model, task.pairs)
    return tasks


def evaluate_tasks(
    state: TrainState,
    tasks: Sequence[Asked],
    interrupted: Callable[[], bool],
) -> dict[str, Mapping[str, float]]:
    """Return and log the accuracies of all tasks, by kind of accuracy and task. Collective over the world.

    `interrupted()` is called after each global batch. If `interrupted()` returns True, the result is empty.
    """
    scores = log_likelihoods(state, [pair for task in tasks for pair in task.pairs], interrupted)
    if scores is None:
        return {}
    results: list[TaskResult] = []
    for task in tasks:
        result = task.judge(scores[: len(task.pairs)])
        scores = scores[len(task.pairs) :]
        results.append(result)
        log.info(
            f"task {result.task} after step {state.current_step}: accuracy {result.acc:.4f} of {result.items}, per "
            f"token {result.acc_token:.4f}"
        )
    normed = {result.task: result.acc_norm for result in results if result.acc_norm is not None}
    return {
        "accuracy": {result.task: result.acc for result in results},
        "accuracy_per_token": {result.task: result.acc_token for result in results},
        **({"accuracy_per_character": normed} if normed else {}),
    }


@torch.no_grad()
def log_likelihoods(state: TrainState, pairs: Sequence[Pair], interrupted: Callable[[], bool]) -> list[float] | None:
    """Return log p(continuation | context) of each pair, on every rank. Collective over the world.

    Returns None if `interrupted()` is True after one of the global batches.
    """
    batch = state.config.batch
    mesh = state.mesh
    # With context parallelism, the selected attention op may not support a mask for documents.
    documents = state.config.data.reset_at_documents or mesh.cp.size == 1
    texts = PackedTexts(pairs, state.config.model.sequence_length, None if documents else 1)
    source = Batches(
        texts,
        batch.global_batch,
        batch.micro_batch,
        mesh.dp.rank,
        mesh.dp.size,
        reset_at_documents=documents,
        read_ahead=0,
    )
    feed = state.new_feed(source)
    sums_T = torch.zeros(len(pairs), dtype=torch.float64, device=state.device)

    def microbatch(step: int, index: int) -> Microbatch:
        texts_BS = np.stack([texts.texts_of_targets(k) for k in source.sample_ids(step, index)])
        return replace(feed.microbatch(step, index, 1), text_losses=(sums_T, feed.held(texts_BS.T)))

    for step in range(math.ceil(len(texts) / batch.global_batch)):
        state.evaluator.run(partial(microbatch, step))
        if interrupted():
            return None
    # All tp ranks of the last stage have equal sums, so only tp rank 0 counts. Each cp rank has the sums of its tokens.
    total_T = all_reduce_(sums_T * (mesh.tp.rank == 0), mesh.world)
    return [-loss for loss in total_T.tolist()]
