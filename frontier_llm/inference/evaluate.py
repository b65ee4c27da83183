"""Score a task: the option with the highest log-probability is the model's answer."""

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
    """Accuracies of one task; None where a normalisation has no meaning."""

    task: str
    format: str
    shots: int
    items: int
    acc: float  # highest summed log-probability, as lm_eval's acc
    acc_norm: float | None  # per character of the choice, as lm_eval's acc_norm
    acc_token: float  # per token, as LLM Foundry's accuracy

    @property
    def stderr(self) -> float:
        """Standard error of `acc`."""
        if self.items > 1:
            return math.sqrt(self.acc * (1 - self.acc) / (self.items - 1))
        return math.nan


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokens of a context and of its continuation, cut where the context's own tokens end.

    They are encoded together, as in lm_eval, so that the boundary is one the model has seen; spaces at the context's
    end belong to the continuation. An empty context is the end of a document.
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
    """A task as it is put to a model: each option of each question as tokens."""

    task: Task
    shots: int
    options: Sequence[TaskOption]
    pairs: Sequence[Pair]

    def judge(self, scores: Sequence[float]) -> TaskResult:
        """What a model gets right that finds the options so likely: their log-probabilities."""
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
    """The task behind `shots` solved examples of the `pool`, or of itself."""
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
    """Collective over the world; every rank returns the same."""
    asked = ask(tokenizer, task, shots, pool)
    return asked.judge([entry.log_probability for entry in score(model, asked.pairs, batch_size, on_batch)])


def _accuracy(task: Task, asked: Sequence[TaskOption], values: Sequence[float]) -> float:
    """Share of questions whose first best option is the right one."""
    right = 0
    for item, group in groupby(zip(asked, values, strict=True), key=lambda pair: pair[0].item):
        options = [value for _, value in group]
        right += options.index(max(options)) == task.prompts[item].gold
    return right / len(task.prompts)
