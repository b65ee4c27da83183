"""Prompts of the seven tasks of the MI250 runs, from the fields of the Hugging Face hub's datasets.

The prompts follow the task files of lm-evaluation-harness 0.4.13 (arc, boolq of SuperGLUE, hellaswag, piqa, winogrande,
wsc273). A test compares texts and scores with lm-evaluation-harness.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One question, with a context and a continuation for each option."""

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class KnownTask:
    """Source of a task's data and conversion of a line to a prompt."""

    source: str  # data set on the Hugging Face hub with its evaluation split, or the program that defined the format
    fields: tuple[str, ...]  # names of the fields of a line
    convert: Callable[[dict[str, Any]], Prompt]
    is_schema: bool = False


def _choices(context: str, choices: list[str], gold: int) -> Prompt:
    return Prompt((context,) * len(choices), tuple(choices), gold)


def _schema(contexts: list[str], continuation: str, gold: int) -> Prompt:
    return Prompt(tuple(contexts), (continuation,) * len(contexts), gold)


def _foundry_choices(line: dict[str, Any]) -> Prompt:
    return _choices(str(line["query"]).strip(), [str(choice).strip() for choice in line["choices"]], int(line["gold"]))


def _foundry_schema(line: dict[str, Any]) -> Prompt:
    contexts = [str(context).strip() for context in line["context_options"]]
    return _schema(contexts, str(line["continuation"]).strip(), int(line["gold"]))


def _arc(line: dict[str, Any]) -> Prompt:
    choices = line["choices"]
    return _choices(
        f"Question: {line['question']}\nAnswer:",
        list(choices["text"]),
        list(choices["label"]).index(line["answerKey"]),
    )


def _boolq(line: dict[str, Any]) -> Prompt:
    answer = line["label"] if "label" in line else line["answer"]
    return _choices(f"{line['passage']}\nQuestion: {line['question']}?\nAnswer:", ["no", "yes"], int(answer))


def _wikihow(text: str) -> str:
    """Remove marks such as [title] and [step], which HellaSwag's WikiHow part contains."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _hellaswag(line: dict[str, Any]) -> Prompt:
    context = f"{line['activity_label']}: {line['ctx_a']} {line['ctx_b'].capitalize()}"
    return _choices(_wikihow(context), [_wikihow(ending) for ending in line["endings"]], int(line["label"]))


def _piqa(line: dict[str, Any]) -> Prompt:
    return _choices(f"Question: {line['goal']}\nAnswer:", [line["sol1"], line["sol2"]], int(line["label"]))


def _winogrande(line: dict[str, Any]) -> Prompt:
    before, after = line["sentence"].split("_", 1)
    return _schema([before + line["option1"], before + line["option2"]], after.strip(), int(line["answer"]) - 1)


_CAPITALISED = frozenset(("A", "An", "The", "She", "He", "It", "They", "My", "His", "Her", "Their"))
_POSSESSIVE = frozenset(("my", "his", "her", "our", "their"))


def _winograd(line: dict[str, Any]) -> Prompt:
    """Replace the pronoun by each candidate. The text after the pronoun is scored."""
    text = line["text"].replace("  ", " ")
    place = line["pronoun_loc"]
    pronoun = line["pronoun"]
    opens_sentence = text[place - 2] == "."

    def candidate(option: str) -> str:
        option += "'s" if pronoun.lower() in _POSSESSIVE else ""
        word = option.split()[0]
        if word in _CAPITALISED and not opens_sentence:
            return option.replace(word, word.lower())
        return option

    contexts = [text[:place] + candidate(option) for option in line["options"][:2]]
    return _schema(contexts, text[place + len(pronoun) :], int(line["label"]))


FOUNDRY_CHOICES = KnownTask("LLM Foundry", ("query", "choices", "gold"), _foundry_choices)
FOUNDRY_SCHEMA = KnownTask("LLM Foundry", ("context_options", "continuation", "gold"), _foundry_schema, is_schema=True)
LM_EVAL = {
    "arc_easy": KnownTask("allenai/ai2_arc (ARC-Easy, test)", ("question", "choices", "answerKey"), _arc),
    "arc_challenge": KnownTask("allenai/ai2_arc (ARC-Challenge, test)", ("question", "choices", "answerKey"), _arc),
    "boolq": KnownTask("aps/super_glue (boolq, validation)", ("passage", "question"), _boolq),
    "hellaswag": KnownTask(
        "Rowan/hellaswag (validation)",
        ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
        _hellaswag,
    ),
    "piqa": KnownTask("baber/piqa (validation)", ("goal", "sol1", "sol2", "label"), _piqa),
    "winogrande": KnownTask(
        "allenai/winogrande (winogrande_xl, validation)",
        ("sentence", "option1", "option2", "answer"),
        _winogrande,
        is_schema=True,
    ),
    "wsc273": KnownTask(
        "lighteval/winograd_wsc (wsc273, test)",
        ("text", "pronoun", "pronoun_loc", "options", "label"),
        _winograd,
        is_schema=True,
    ),
}
