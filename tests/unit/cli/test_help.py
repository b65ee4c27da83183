"""Every command's --help is fast, complete and within 80 columns.

The error for a wrong word suggests the right word.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from frontier_llm.cli import main as cli
from frontier_llm.cli.arguments import count_of, natural, positive
from frontier_llm.cli.main import COMMANDS, main, parser_of
from frontier_llm.config import available
from frontier_llm.experiments.scaling.series import PUBLISHED_BATCHES


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands and of their actions."""
    todo: list[argparse.ArgumentParser] = [parser_of(*COMMANDS)]
    while todo:
        parser = todo.pop()
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += action.choices.values()


PARSERS = {parser.prog: parser for parser in parsers() if parser.prog != "frontier-llm"}


def test_the_first_page_names_every_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert sorted(name for names in cli._GROUPS.values() for name in names) == sorted(COMMANDS)
    assert all(len(re.findall(rf"^  {name} ", page, re.MULTILINE)) == 1 for name in COMMANDS)
    assert max(map(len, page.splitlines())) <= 90


def test_ctrl_c_while_a_command_is_being_imported_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["plan"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_full_disk_is_one_short_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt-tiny", "--machine", "local", "--chrome-trace", "/dev/full"]) == 2
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "frontier-llm plan: error",
        "No space left on device",
        "    fix: free space or raise the quota, then run the same command again",
    ]


@pytest.mark.parametrize("prog", PARSERS)
def test_every_argument_is_explained(prog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = PARSERS[prog]
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action
        if action.option_strings and action.nargs != 0 and action.help != argparse.SUPPRESS:
            # LONG_NAME of --long-name only repeats the flag. The metavar must tell the user what to type.
            assert action.metavar or action.choices or "-" not in action.option_strings[-1].removeprefix("--"), action
    assert parser.description and parser.description[0].isupper() and parser.description.endswith(".")
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        assert max(map(len, parser.format_help().splitlines())) <= int(columns) + 2


@pytest.mark.parametrize("prog", PARSERS)
def test_examples_are_commands_of_this_program(prog: str) -> None:
    for line in str(PARSERS[prog].epilog).splitlines()[1:]:
        words = shlex.split(line.partition(" >")[0])  # without a redirection of the shell
        words = words[words.index("frontier-llm") + 1 :]
        assert parser_of(words[0]).parse_args(words).command == words[0]


def test_the_models_and_runs_of_the_examples_are_shipped() -> None:
    lines = [line for parser in PARSERS.values() for line in str(parser.epilog or "").splitlines()[1:]]
    named = {
        kind: [m[1] for line in lines if (m := re.search(pattern, line))]
        for kind, pattern in (
            ("models", r"frontier-llm plan ([\w-]+) |--model (?=[a-z])"),
            ("runs", r"frontier-llm (?:train|submit|calibrate) ([\w-]+) "),
        )
    }
    assert all(len(names) > 2 for names in named.values()), named
    assert [name for kind, names in named.items() for name in names if name and name not in available(kind)] == []


def test_the_models_of_the_scaling_examples_have_a_published_batch() -> None:
    """Without a published batch, the example would fail, because it states neither --batch-per-replica nor
    batch.global_batch.
    """
    lines = [line for parser in PARSERS.values() for line in str(parser.epilog or "").splitlines()]
    models = {m[1] for line in lines if (m := re.search(r"scaling (?:weak|strong) .*--model ([\w-]+)", line))}
    assert models and models <= PUBLISHED_BATCHES.keys()


def test_every_command_and_action_has_an_example_of_itself() -> None:
    without = [prog for prog, parser in PARSERS.items() if prog not in str(parser.epilog)]
    assert without == []


def test_what_several_commands_take_has_one_name_and_one_metavar() -> None:
    seen: dict[str, set[str]] = {}
    for parser in PARSERS.values():
        for action in parser._actions:
            for flag in action.option_strings:
                # these flags may differ: one value or a list, a file or a directory
                if flag not in ("--data", "--model", "--nodes", "--output", "--time"):
                    seen.setdefault(flag, set()).add(f"{type(action).__name__} {action.metavar} {action.nargs}")
    assert {flag: kinds for flag, kinds in seen.items() if len(kinds) > 1} == {}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "did you mean 'train'"),
        (["submit", "x", "--site", "local", "--nodes", "1", "--dryrun"], "--dry-run instead of --dryrun"),
        (["checkpoint", "verfy"], "verify instead of verfy"),
        (["plan", "gpt-1t", "--nodes", "0"], "'0' is not a whole number above 0"),
        (["plan", "gpt-1t", "--nodes", "many"], "'many' is not a whole number above 0"),
        (["data", "tokenize"], "the following arguments are required"),
        (["data", "tokenise", "x"], "invalid choice: 'tokenise'"),
        (["generate"], "required: CHECKPOINT\n"),
        (["train"], "required: RUN\n"),
        (["train", "x", "--optimizer.lr=1e-3"], "fix: optimizer.lr=1e-3 instead of --optimizer.lr"),
        (["train", "x", "--dry-run", "optimizer.lr", "1e-3"], "of the form key=value, e.g. optimizer.lr=VALUE"),
        (["train", "--tensor-model-parallel-size", "8"], "fix: here: parallel.tensor: 8 (docs/coming_from.md)"),
        (["plan", "gpt-1t", "--fix", "tensor=8", "pipeline=8"], "keep this choice with --fix pipeline=8"),
        (["evaluate", "runs/a", "--data", "x", "y"], "repeat it: --data x --data y"),
        (["evaluate", "runs/a", "y"], "evaluate uses parallel.tensor"),
        (["checkpoint", "export-hf", "a", "b", "--dtype", "float32"], "fp32 instead of float32"),
    ],
)
def test_wrong_words_end_with_2_and_a_way_out(
    words: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and expected in said.err and "fix:" in said.err and len(said.err.splitlines()) <= 6


def test_help_imports_no_library() -> None:
    """These imports take 0.2 to 2 s, on a shared file system many times as long."""
    program = (
        "import sys\n"
        "from frontier_llm.cli.main import COMMANDS, main\n"
        "for words in ([], *([name] for name in COMMANDS)):\n"
        "    assert main([*words, '--help']) == 0\n"
        "    loaded = sorted({'numpy', 'pydantic', 'torch', 'yaml'} & sys.modules.keys())\n"
        "    assert not loaded, f'{words} loads {loaded}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "count"),
    [("300B", 3e11), ("1.5T", 1.5e12), ("2e9", 2e9), ("20_000", 20_000.0), ("7M", 7e6)],
)
def test_counts(text: str, count: float) -> None:
    assert count_of(text) == count


@pytest.mark.parametrize("text", ["", "B", "-3B", "0", "3 apples", "1e999", "nan"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        count_of(text)


def test_whole_numbers() -> None:
    assert (positive("7"), natural("0")) == (7, 0)
    for wrong in ("0", "-1", "1.5", "x", "9" * 30):
        with pytest.raises(argparse.ArgumentTypeError):
            positive(wrong)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bench", "ops", "--device", "cuda"], "torch sees no GPU"),
        (["bench", "ops", "--model", "nope"], "no model file 'nope'"),
        (["plan", "gpt-22b", "--nodes", "16", "--figures", "/proc/x.html"], "/proc/x.html: No such file or directory"),
        (["report", "/nonexistent"], "is not a run directory"),
        (["scaling", "report", "/nonexistent"], "contains no runs of a scaling series"),
        (["checkpoint", "list", "/nonexistent"], "contains no complete checkpoint"),
        (["generate", "/nonexistent"], "does not exist"),
        (["data", "inspect", "/nonexistent"], "no such file"),
    ],
)
def test_what_cannot_work_is_one_short_error(
    words: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert expected in said and "fix:" in said and "Traceback" not in said
