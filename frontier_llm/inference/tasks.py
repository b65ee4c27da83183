"""In-context tasks from local JSONL files. A model answers by the option that it finds most likely.

Two formats are read. LLM Foundry's format is {"query", "choices", "gold"}, or {"context_options", "continuation",
"gold"} if the options are contexts. lm-evaluation-harness's format has the fields of the data sets on the Hugging Face
hub, with the prompts of its task files (0.4.13). Each option becomes a context, a delimiter and a continuation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from frontier_llm.data.documents import json_object
from frontier_llm.errors import DataError, Problem, first_of, suggest
from frontier_llm.inference.task_prompts import FOUNDRY_CHOICES, FOUNDRY_SCHEMA, LM_EVAL, KnownTask, Prompt

# LLM Foundry's scripts/eval/yamls/tasks.yaml: these tasks put the answer on its own line, other tasks after a space
_FOUNDRY_ANSWER_LINE = ("arc_easy", "arc_challenge", "boolq", "piqa")

EXAMPLES_SEED = 1234  # seed of lm_eval


@dataclass(frozen=True)
class Task:
    """Content of a task file."""

    name: str
    path: str
    format: str  # "llm-foundry" or "lm-eval"
    prompts: tuple[Prompt, ...]  # questions to evaluate
    examples: tuple[Prompt, ...]  # all questions of the file, from which solved examples are drawn
    delimiter: str  # text between context and continuation
    joiner: str  # text between solved examples
    is_schema: bool  # True: the options are contexts with the same continuation, so its length does not matter


@dataclass(frozen=True)
class TaskOption:
    """One option of one question."""

    item: int  # index of the question in the task
    option: int  # index of the option in the question
    context: str
    continuation: str  # text of the answer option, with the delimiter before it


def read_task(name: str, path: str | Path, limit: int = 0) -> Task:
    """Read a task file. `limit` is the number of questions to evaluate (0: all).

    Raises DataError if the file does not exist, a line is not JSON, a field is missing, or the gold answer is not an
    option. The message names the download or the expected fields.
    """
    path = Path(path)
    if not path.is_file():
        download = f"download {LM_EVAL[name].source} and save its evaluation split as JSONL" if name in LM_EVAL else ""
        raise DataError(
            f"no such task file for {name!r}",
            where=str(path),
            fix=download or "give the path of a JSONL file",
        )
    documents = _read_jsonl(path)
    if not documents:
        raise DataError("contains no line", where=str(path), fix="give a JSONL file with one question per line")
    first = documents[0][1]
    foundry = next((known for known in (FOUNDRY_SCHEMA, FOUNDRY_CHOICES) if known.fields[0] in first), None)
    known = foundry or LM_EVAL.get(name)
    if known is None:
        formats = f"neither the fields {', '.join(FOUNDRY_CHOICES.fields)} nor {', '.join(FOUNDRY_SCHEMA.fields)}"
        raise DataError(
            f"{name!r} is not a known task, and the file has {formats}",
            where=str(path),
            fix=suggest(name, LM_EVAL),
        )
    examples = _convert(documents, path, known)
    prompts = examples[: limit or None]
    if not foundry:
        return Task(
            name=name,
            path=str(path),
            format="lm-eval",
            prompts=prompts,
            examples=examples,
            delimiter=" ",
            joiner="\n\n",
            is_schema=known.is_schema,
        )
    return Task(
        name=name,
        path=str(path),
        format="llm-foundry",
        prompts=prompts,
        examples=examples,
        delimiter="\nAnswer: " if name in _FOUNDRY_ANSWER_LINE else " ",
        joiner="\n",
        is_schema=known.is_schema,
    )


def requests(task: Task, shots: int = 0, pool: Task | None = None) -> list[TaskOption]:
    """Return every option of every question, after `shots` solved examples.

    The examples come from `pool`, or from the task itself without the current question. Examples are drawn as in
    lm_eval: one random generator for the complete task, and one additional example if the question itself must be left
    out. If the file repeats the question, new examples are drawn from the other questions. Equal files therefore give
    equal prompts. Raises DataError if there are too few examples.
    """
    examples = (pool or task).examples
    if shots and len(examples) < shots + (pool is None):
        raise _too_few(pool or task, len(examples), shots, beside=pool is None)
    random = Random(EXAMPLES_SEED)  # noqa: S311  # which examples are shown is no secret
    result = []
    for number, prompt in enumerate(task.prompts):
        drawn = random.sample(examples, shots + (pool is None)) if shots else []
        shown = [example for example in drawn if pool is not None or example != prompt][:shots]
        if len(shown) < shots:
            others = [example for example in examples if example != prompt]
            if len(others) < shots:
                raise _too_few(task, len(others) + 1, shots, beside=True)
            shown = random.sample(others, shots)
        text = "".join(solved(task, example) + task.joiner for example in shown)
        for option, (context, continuation) in enumerate(zip(prompt.contexts, prompt.continuations, strict=True)):
            result.append(TaskOption(number, option, text + context, task.delimiter + continuation))
    return result


def _too_few(task: Task, questions: int, shots: int, beside: bool) -> DataError:
    text = " beside the question itself" if beside else ""
    return DataError(
        f"has {questions} different questions, too few for {shots} examples{text}",
        where=task.path,
        fix="lower --shots",
    )


def solved(task: Task, prompt: Prompt) -> str:
    """Return a question with its answer."""
    return prompt.contexts[prompt.gold] + task.delimiter + prompt.continuations[prompt.gold]


def _read_jsonl(path: Path) -> list[tuple[int, dict[str, Any]]]:
    documents = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            if (document := json_object(line)) is not None:
                documents.append((number, document))
        except DataError as error:
            what = error.problems[0].what
            fix = "give one JSON object per line"
            raise DataError(what, where=f"{path}:{number}", fix=fix) from error
    return documents


def _convert(documents: list[tuple[int, dict[str, Any]]], path: Path, known: KnownTask) -> tuple[Prompt, ...]:
    """Return all lines as prompts. Raises DataError with the first lines that cannot be converted."""
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    for number, document in documents:
        try:
            prompts.append(_prompt(document, known))
        except DataError as error:
            problems.append(replace(error.problems[0], where=f"{path}:{number}"))
    if problems:
        raise DataError(first_of(problems))
    return tuple(prompts)


def _prompt(document: dict[str, Any], known: KnownTask) -> Prompt:
    missing = [field for field in known.fields if field not in document]
    if missing:
        raise DataError(f"has no field {', '.join(map(repr, missing))}; expected {', '.join(known.fields)}")
    try:
        prompt = known.convert(document)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(f"has a field of an unexpected form: {error!r}") from error
    if not 0 <= prompt.gold < len(prompt.contexts):
        raise DataError(
            f"its answer is option {prompt.gold}, counted from 0, of {len(prompt.contexts)}; a test split without "
            f"answers "
            f"cannot be used"
        )
    return prompt
