"""Tests that a thing has the same name in all commands: every argument is in the table of names, and former names
still work.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from frontier_llm.cli.arguments import Parser
from frontier_llm.cli.main import COMMANDS, main, parse, parser_of
from frontier_llm.cli.ranks import read_run
from frontier_llm.cli.vocabulary import ARGUMENTS, OLD_NAMES, OPTIONS, OldName
from frontier_llm.config import RunConfig
from frontier_llm.run.launchers import RankEnv

# options with the name of a key, in commands that take key=value
SAME_AS_KEYS = {
    "--no-jit": "batch scripts write it, because it also stands for a guarantee",
    "--machine": "a plan of a model has no run whose `machine` could be changed",
    "--seed": "of a search, not of a run",
    "--steps": "measured steps, not the length of a run",
    "--run-dir": "a directory to check without a run",
    "--model": "names the shipped run that trains it",
    "--data": "datasets that are evaluated, whatever the run trained on",
    "--tokenizer": "the text of inference, whose only settings are parallel.*",
    "--dtype": "the weights of inference, whose only settings are parallel.*",
    "--device": "the ranks of inference, whose only settings are parallel.*",
}


def leaves(parser: argparse.ArgumentParser) -> Iterator[Parser]:
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in inner:
        for choice in action.choices.values():
            yield from leaves(choice)
    if not inner:
        assert isinstance(parser, Parser)
        yield parser


LEAVES = {parser.prog.removeprefix("frontier-llm "): parser for parser in leaves(parser_of(*COMMANDS))}


def shown(parser: Parser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.help != argparse.SUPPRESS]


def flags(parser: Parser) -> set[str]:
    return {flag for action in shown(parser) for flag in action.option_strings if flag.startswith("--")}


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings(field.annotation, f"{prefix}{name}.")


KEYS = set(settings(RunConfig))


def test_every_option_is_in_the_table_and_names_one_thing() -> None:
    assert {flag for parser in LEAVES.values() for flag in flags(parser)} == set(OPTIONS)
    assert [thing for thing, count in Counter(OPTIONS.values()).items() if count > 1] == []


def test_every_positional_argument_is_in_the_table_and_names_one_thing() -> None:
    named = {
        str(action.metavar or action.dest)
        for parser in LEAVES.values()
        for action in shown(parser)
        if not action.option_strings
    }
    assert named == set(ARGUMENTS)
    assert len(set(ARGUMENTS.values())) == len(ARGUMENTS)


@pytest.mark.parametrize("command", LEAVES)
def test_a_command_that_takes_a_run_takes_its_settings(command: str) -> None:
    parser = LEAVES[command]
    takes_run = any(action.metavar == "RUN" for action in shown(parser))
    takes_settings = any(action.dest == "overrides" for action in shown(parser))
    assert takes_settings or not takes_run
    if takes_settings:
        leaf_names = {key.rpartition(".")[2] for key in KEYS}
        doubled = {flag for flag in flags(parser) if flag.strip("-").replace("-", "_") in leaf_names}
        assert doubled <= set(SAME_AS_KEYS), "the key of the run already names it"


def identity(row: OldName) -> str:
    return f"{row.command} {row.old}"


@pytest.mark.parametrize("row", OLD_NAMES, ids=identity)
def test_a_former_name_means_the_new_one(row: OldName, capsys: pytest.CaptureFixture[str]) -> None:
    parser = LEAVES[row.command]
    assert row.old not in flags(parser)
    assert row.new in KEYS if row.is_key else row.new in flags(parser)
    needed: list[str] = []
    for action in shown(parser):
        if action.required and not (action.option_strings and row.new in action.option_strings):
            needed += [*action.option_strings[-1:], "1"]
    for group in parser._mutually_exclusive_groups:
        needed += ["--model", "gpt-1t"] if group.required else []
    takes_value = row.is_key or parser._option_string_actions[row.new].nargs != 0
    typed = "3.yaml" if row.new == "--emit-machine" else "3"
    value = [typed] if takes_value else []
    new = [f"{row.new}={row.value.format(typed)}"] if row.is_key else [row.new, *value]
    words = [*row.command.split(), *needed]

    def parsed(*more: str) -> dict[str, object]:
        return {name: found for name, found in vars(parse([*words, *more])).items() if name != "parser"}

    expected = parsed(*new)
    capsys.readouterr()
    assert parsed(row.old, *value) == expected
    assert f"{row.old} is now called {row.new}" in capsys.readouterr().err
    if takes_value:
        assert parsed(f"{row.old}={typed}")["overrides" if row.is_key else "command"] == (
            expected["overrides"] if row.is_key else expected["command"]
        )
    assert main([*words, row.old, *value, *new]) == 2
    assert f"{row.old} is the former name of {row.new}" in capsys.readouterr().err


def test_an_option_is_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt-tiny", "--expl"]) == 2
    assert "--explain instead of --expl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "plan gpt-tiny --run quickstart",
            "a model and a run are given, but only one is planned: gpt-tiny and --run quickstart",
        ),
        ("plan gpt-tiny train.steps=5", "train.steps=5: would have no effect here"),
        ("plan --run quickstart parallel.tensor=2", "keep this choice with --fix tensor=2"),
        ("plan gpt-tiny --validate", "gpt-tiny: would have no effect here"),
        ("plan gpt-tiny --machine local machine=lumi", "the machine is given twice"),
        ("plan train.steps=5 --measured runs/x", "train.steps=5: would have no effect here"),
        ("tune train_small --max-node-hours 0 parallel.pipeline=2", "keep this choice with --fix pipeline=2"),
        ("calibrate parallel.tensor=2", "parallel.tensor=2: would have no effect here"),
        ("scaling weak --run train_small --nodes 1 --site local batch.global_batch=8", "fix: --batch-per-replica N"),
        ("doctor train.steps=5", "name the run that it changes: --run RUN"),
        ("checkpoint import-hf somewhere train.steps=5", "name the run that it changes, after the directory"),
        ("generate runs/x train.steps=5", "generate uses parallel.tensor, parallel.pipeline"),
        ("train train.steps=5", "RUN is missing: train.steps=5 is a setting"),
    ],
)
def test_a_word_that_is_not_used_is_an_error(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    # `plan --validate` reads the words after it as files
    typed = words.split()
    assert main(typed) == 2
    told = capsys.readouterr()
    assert said in told.err and told.out == ""


def test_a_plan_of_a_run_uses_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    for order in (["--run", "quickstart", "batch.global_batch=32"], ["batch.global_batch=32", "--run", "quickstart"]):
        assert main(["plan", *order, "machine=local", "--nodes", "1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["global_batch"] == 32


def test_a_plan_of_a_run_is_for_the_machine_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The emitted file names the machine relative to its own folder."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "machine.yaml").write_text("base: local\nname: mine\n")
    run = tmp_path / "run.yaml"
    run.write_text("base: quickstart\nmachine: mine/machine.yaml\n")
    emitted = tmp_path / "mine" / "planned.yaml"

    assert main(["plan", "--run", str(run), "--nodes", "1", "--emit", str(emitted)]) == 0
    assert "on 1 node of mine" in capsys.readouterr().out
    assert yaml.safe_load(emitted.read_text())["machine"] == "machine.yaml"
    assert main(["plan", "--run", str(run), "machine=h100", "--nodes", "1"]) == 0
    assert "on 1 node of h100" in capsys.readouterr().out


def test_notes_about_a_run_are_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The process that starts local ranks logs the notes, and so does rank 0 of another launcher."""
    for launcher, times in (("", 1), ("local", 0), ("slurm", 1)):
        place = RankEnv(0, 4, 0, 4, "here", "here", 29500, launcher) if launcher else None
        read_run("quickstart", [], place)
        told = capsys.readouterr().err
        assert told.count("precision.dtype=auto") == told.count("train.device=cpu") == times
