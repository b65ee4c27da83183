"""Evaluates a multiple-choice task. The model's answer is the option with the highest log-probability."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.inference.model import InferenceModel
from frontier_llm.inference.score import Pair, score
from frontier_llm.inference.tasks import Task, TaskOption, requests


@dataclass(frozen=True)
class TaskResult:
    """Accuracies of one task. `acc_norm` is None for a task whose options are contexts."""

    task: str
    format: str
    shots: int
    items: int
    acc: float  # accuracy by summed log-probability, as lm_eval's acc
    acc_norm: float | None  # accuracy by log-probability per character of the choice, as lm_eval's acc_norm
    acc_token: float  # accuracy by log-probability per token, as LLM Foundry's accuracy

    @property
    def stderr(self) -> float:
        """Standard error of `acc`."""
        if self.items > 1:
            return math.sqrt(self.acc * (1 - self.acc) / (self.items - 1))
        return math.nan


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a context and of its continuation, split at the length of the context's own tokens.

    Both are encoded together, as in lm_eval, so that the text at the boundary is tokenized as in training. Spaces at
    the context's end belong to the continuation. An empty context is replaced by the end-of-document token.
    """
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
    if not context:
        return [tokenizer.eod], tokenizer.encode(continuation)
    whole = tokenizer.encode(context + continuation)
    head = tokenizer.encode(context)
    return head, whole[len(head) :]


@dataclass(frozen=True)
class Asked:
    """Task as tokens, which a model can score: each option of each question."""

    task: Task
    shots: int
    options: Sequence[TaskOption]
    pairs: Sequence[Pair]

    def judge(self, scores: Sequence[float]) -> TaskResult:
        """Return the accuracies of a model from the log-probabilities of the options."""
        task = self.task

        def accuracy(sizes: Iterable[int]) -> float:
            return _accuracy(task, self.options, [value / size for value, size in zip(scores, sizes, strict=True)])

        by_sum = accuracy([1] * len(scores))
        by_token = accuracy(len(continuation) for _, continuation in self.pairs)
        by_character = accuracy(max(len(option.continuation) - len(task.delimiter), 1) for option in self.options)
        return TaskResult(
            task=task.name,
            format=task.format,
            shots=self.shots,
            items=len(task.prompts),
            acc=by_sum,
            acc_norm=None if task.is_schema else by_character,
            acc_token=by_token,
        )


def ask(tokenizer: Tokenizer, task: Task, shots: int = 0, pool: Task | None = None) -> Asked:
    """Return the task with `shots` solved examples before each question, drawn from `pool` or from the task itself."""
    options = requests(task, shots, pool)
    return Asked(
        task,
        shots,
        options,
        [encode_pair(tokenizer, option.context, option.continuation) for option in options],
    )


def evaluate_task(
    model: InferenceModel,
    tokenizer: Tokenizer,
    task: Task,
    shots: int = 0,
    pool: Task | None = None,
    batch_size: int = 8,
    on_batch: Callable[[int], object] = lambda done: None,
) -> TaskResult:
    """Score a task. Collective over the world. Every rank returns the same result."""
    asked = ask(tokenizer, task, shots, pool)
    return asked.judge([entry.log_probability for entry in score(model, asked.pairs, batch_size, on_batch)])


def _accuracy(task: Task, asked: Sequence[TaskOption], values: Sequence[float]) -> float:
    """Return the fraction of questions for which the option with the highest value is correct. If several options have
    this value, the first one is used.
    """
    right = 0
    for item, group in groupby(zip(asked, values, strict=True), key=lambda pair: pair[0].item):
        options = [value for _, value in group]
        right += options.index(max(options)) == task.prompts[item].gold
    return right / len(task.prompts)
