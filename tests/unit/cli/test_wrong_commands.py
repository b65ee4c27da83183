"""Tests the messages for mistyped commands, options and values."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontier_llm.checkpoint.drift import Change
from frontier_llm.cli.arguments import Parser
from frontier_llm.cli.hints import fix_for, near_option
from frontier_llm.cli.main import main
from frontier_llm.cli.vocabulary import OLD_NAMES
from tests.unit.cli.test_vocabulary import LEAVES, flags

# wrong command → text of its error message
ANSWERS = {
    "tune train_small --machine frontier": "fix: machine=frontier instead of --machine",
    "plan gpt-tiny --tensor 8": "fix: --fix tensor=8 instead of --tensor",
    "train quickstart --steps 5": "fix: train.steps=5 instead of --steps",
    "train --steps=5": "fix: train.steps=5 instead of --steps",  # this error is reported before the missing RUN
    "train quickstart --seed 3": "fix: data.seed=3 or train.seed=3 instead of --seed",
    "train quickstart --save-intervl 3": "fix: train.save_interval=3 instead of --save-intervl",
    "evaluate runs/x --data-shard 2": "fix: parallel.data_shard=2 instead of --data-shard",
    "submit train_small --optimizer.lr 1e-3": "fix: optimizer.lr=1e-3 instead of --optimizer.lr",
    "train quickstart --num-layers 5": "fix: here: model.layers (docs/coming_from.md)",
    "train quickstart --learning-rate 1e-3": "fix: here: optimizer.lr (docs/coming_from.md)",
    "train quickstart optimizer.learning_rate=1e-3": "fix: here: optimizer.lr (docs/coming_from.md)",
    "train quickstart model.hidden_size=8": "fix: here: model.hidden (docs/coming_from.md)",
    "train quickstart optimizer.learnig_rate=1e-3": "fix: here: optimizer.lr (docs/coming_from.md)",
    "train quickstart train.micro_batch=8": "fix: did you mean 'batch.micro_batch'?",
    "train quickstart train.checkpoint_interval=8": "fix: did you mean 'save_interval'?",
    "train quickstart train.steps 40": "train.steps: is not of the form key=value\n    fix: write train.steps=40\n",
    "train {here}/mine.yml": "mine.yml\n    fix: did you mean {here}/mine.yaml?",
    "tune quickstart": "fix: add --max-node-hours H (node-hours that all trials together may use",
    "export-hf runs/x": "fix: frontier-llm checkpoint export-hf\n",
    "report": "fix: add RUN_DIR (run directory; the curves of several runs share the axes)",
    "train": "fix: add RUN (run file, or the name of one in configs/runs)",
    "plan gpt-22b --fix schedule=dualpipev": "'dualpipev' is not a schedule\n    fix: did you mean 'dualpipe-v'?",
    "status --explain": "fix: --explain is an option of frontier-llm plan",
    "train quickstart train.steps=2parsecs": "with its unit: steps, tokens or epochs",
    "train quickstart --dry-run --allow-change lr": "'lr' is not a key of a run\n    fix: did you mean 'optimizer.lr'?",
    "submit train_small --site local --nodes 1 --allow-change lr": "fix: did you mean 'optimizer.lr'?",
    "data tokenize {here}/a.jsonl --tokenizer bytes --output {here}/x": "fix: name the key of the text with --text-key",
    "train quickstart": "relative to the working directory, or create it with `frontier-llm data stdlib data/stdlib`",
    "data import x.npy --output x": "fix: add --tokenizer TOKENIZER (tokenizer that made the tokens)",
    'train quickstart data.train=[{"path":x,"name":y}]': "name: unknown key\n    fix: valid: max_epochs, path",
    "plan gpt-tiny --html x.html": "fix: --figures instead of --html",
    "plan gpt-tiny --output x.yaml": "fix: --emit instead of --output",
    "plan gpt-tiny --emit x": "'x' does not end in .yaml: write x.yaml",
    "plan gpt-tiny --nodes=16,32": "fix: --nodes N (default: the smallest power of two on which the model fits)",
    "plan gpt-tiny --tp 8": "fix: --fix tensor=8 instead of --tp",
    "plan gpt-tiny --fix tp=8": "fix: did you mean 'tensor'?",
    "plan gpt-tiny --fix tensor=8 --fix tensor=4": "tensor is fixed twice",
    "plan --model gpt-tiny": "fix: give MODEL without an option: frontier-llm plan gpt-tiny",
    "train quickstart --resume": "the same command line resumes",
    "train quickstart --epochs 3": "fix: train.steps=3epochs instead of --epochs",
    "train quickstart --tp 2": "fix: parallel.tensor=2 instead of --tp",
    "train quickstart parallel.dp=2": "fix: did you mean 'data'?",
    "train quickstart --model gpt-tiny": "fix: model=gpt-tiny instead of --model",
    "train --config x.yaml": "fix: give RUN without an option: frontier-llm train x.yaml",
    "train quickstart --ranks 2": "fix: the number of ranks is parallel.tensor x parallel.pipeline x parallel.data",
    "train quickstart --bf16": "fix: precision.dtype=bf16 instead of --bf16",
    "train quickstart train.steps = 40": "fix: write train.steps=40\n",
    "train quickstart train.steps:40": "fix: write train.steps=40\n",
    "train quickstart data.train=a,b": "fix: write several datasets as a list: data.train=[a,b]",
    "list": "fix: add kind (what to list: models, machines, runs, schedules, sites, tasks)",
    "evaluate runs/x --steps 5": "fix: --steps is an option of frontier-llm tune",
    "evaluate --checkpoint runs/x": "fix: give CHECKPOINT without an option: frontier-llm evaluate runs/x",
    "generate runs/x once upon": "fix: write --prompt 'once upon'",
    "generate runs/x --prompt": "fix: --prompt TEXT (text to continue",
    "checkpoint export-hf runs/x --output out": "fix: frontier-llm checkpoint export-hf CHECKPOINT DIR",
    "checkpoint import-hf hf quickstart --output out": "fix: --output is an option of",
    "data tokenize --input a --output-prefix b": "frontier-llm data tokenize a; --output instead of --output-prefix",
    "scaling weak --model gpt-175b --nodes 16 32": "fix: separate node counts by commas: --nodes 16,32",
    "scaling weak gpt-175b --nodes 16,32": "e.g. gpt-175b), or add --run RUN (run file",
    "tune quickstart --hours 1": "fix: --max-node-hours instead of --hours",
    "tune quickstart --max-node-hours 1 --emit best": "'best' does not end in .yaml: write best.yaml",
    "tune quickstart --max-node-hours 1 --emit-machine best": "'best' does not end in .yaml: write best.yaml",
    "calibrate --emit-machine mine": "'mine' does not end in .yaml: write mine.yaml",
    "submit train_small --site local --nodes 1 --walltime 1:00:00": "fix: --time instead of --walltime",
    "check quickstart --figures x.html": "fix: --html instead of --figures",
    "status --num-layers 3": "fix: frontier-llm status --help",
    "data tokenizer {here}/a.jsonl --output {here}/x.model": "fix: name the key of the text with --text-key",
}


@pytest.mark.parametrize("typed", ANSWERS)
def test_a_wrong_command_is_answered(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps({"content": "words"}) + "\n")
    (tmp_path / "mine.yaml").touch()
    assert main(typed.replace("{here}", str(tmp_path)).split()) == 2
    assert ANSWERS[typed].replace("{here}", str(tmp_path)) in capsys.readouterr().err


def test_an_error_of_an_action_names_the_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", "/nonexistent"]) == 2
    assert capsys.readouterr().err.startswith("frontier-llm checkpoint list: error\n")


def test_a_missing_package_names_the_action(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["checkpoint", "export-hf", "runs/x", "out", "--push-to-hub", "me/mine"]) == 2
    assert capsys.readouterr().err.startswith("frontier-llm checkpoint export-hf: error\n")


def slips(flag: str) -> Iterator[str]:
    """Yield the option with one letter missing, doubled, or swapped with the next."""
    for place in range(2, len(flag)):
        yield flag[:place] + flag[place + 1 :]
        yield flag[: place + 1] + flag[place:]
        if place + 1 < len(flag) and flag[place] != flag[place + 1]:
            yield flag[:place] + flag[place + 1] + flag[place] + flag[place + 2 :]


@pytest.mark.parametrize("command", LEAVES)
def test_every_slip_of_every_option_is_answered_with_the_option(command: str) -> None:
    parser = LEAVES[command]
    known = flags(parser) | {row.old for row in OLD_NAMES if row.command == command}
    for flag in flags(parser):
        for slip in set(slips(flag)) - known - {"--"}:
            meant = near_option(slip, parser)
            assert meant == flag or slip in set(slips(meant)), (slip, meant)


def test_other_words_are_not_taken_for_a_slip() -> None:
    pairs = {("plan", "--tensor"), ("train", "--steps"), ("tune", "--machine"), ("train", "--check-data")}
    answered = {(command, word): near_option(word, LEAVES[command]) for command, word in pairs}
    assert set(answered.values()) == {""}, answered


def test_no_answer_names_an_option_that_the_command_does_not_have() -> None:
    words = {flag for parser in LEAVES.values() for flag in flags(parser)}
    for command, parser in LEAVES.items():
        for word in words - flags(parser):
            fix = fix_for(word, [*command.split(), word], parser)
            for named in re.findall(r"^(--[\w-]+) instead", fix):
                assert named in flags(parser), (command, word, fix)


def test_a_change_shows_no_keys_that_are_not_set() -> None:
    saved = [{"steps": 5, "model": None, "data": {"train": "a", "tokenizer": None}}]
    shown = str(Change("train.phases", saved, [], mathematics=True))
    assert shown == "train.phases: [{'steps': 5, 'data': {'train': 'a'}}] → []"


def test_leaves_are_parsers_of_this_program() -> None:
    assert len(LEAVES) > 30 and all(isinstance(parser, Parser) for parser in LEAVES.values())


# wrong command → the missing file, which the error message names with its absolute path
MISSING_FILES = {
    "train quickstart data.tokenizer=bytes data.train=no/data": "no/data.bin",
    "train quickstart data.tokenizer=no.model": "no.model",
    "train quickstart plugins=[no.py]": "no.py",
    "train quickstart model=no.yaml": "no.yaml",
    "train quickstart machine=no.yaml": "no.yaml",
    "train no.yaml": "no.yaml",
    "tune quickstart --ranks 2 --max-node-hours 1": "data/stdlib/train.bin",
    "calibrate quickstart --ranks 2 --emit-machine x.yaml": "data/stdlib/train.bin",
    "bench step quickstart": "data/stdlib/train.bin",
    "plan no.yaml": "no.yaml",
    "plan --run no.yaml": "no.yaml",
    "plan gpt-tiny --plugin no.py": "no.py",
    "plan --measured no": "no is not a run directory",
    "plan --validate no.tsv": "no.tsv",
    "submit train_small --site no.yaml --nodes 1": "no.yaml",
    "scaling report no": "no: contains no runs",
    "data show no --step 1": "no: no such run directory",
    "data inspect no": "no.bin",
    "data tokenize no.txt --tokenizer bytes --output x": "no.txt",
    "generate no --prompt-file no.txt": "no.txt",
    "report no": "no is not a run directory",
    "status no": "no: no such run directory",
    "checkpoint list no": "no: contains no complete checkpoint",
    "checkpoint export-hf no out": "no: does not exist",
}


@pytest.mark.parametrize("typed", MISSING_FILES)
def test_a_missing_file_is_named_by_its_absolute_path(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(typed.split()) == 2
    assert f"{tmp_path}/{MISSING_FILES[typed]}" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # nothing was started
