"""Tests the commands in the documentation. Commands for a laptop are run. The real argument parser reads commands for a
cluster.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from frontier_llm.cli.main import COMMANDS, parse, parser_of
from frontier_llm.config import RunConfig, load_run
from tests.docs.pages import LANGUAGES, PAGES, ROOT, Fence, commands, fences
from tests.harness.marks import thorough

FENCES = [fence for page in PAGES for fence in fences(page)]
ON_SLURM = "docs/first_day.md"  # tests/slurm/test_first_day.py runs all commands of this page.
# The tutorial's commands run first, because commands of other pages use their results
RUNNABLE = sorted(
    {fence.page for fence in FENCES if fence.language == "bash"} - {ON_SLURM},
    key=lambda page: (page != "docs/tutorial.md", page),
)
TO_PARSE = [fence for fence in FENCES if fence.language == "console"]
SYNOPSIS = re.compile(r"[\[\]…|·]|\b[A-Z][A-Z_]+\b(?!=)")  # matches a synopsis, which stands for several commands


def test_every_fence_says_what_it_is() -> None:
    unknown = [f"{fence.page}:{fence.line}" for fence in FENCES if fence.language not in LANGUAGES]
    assert unknown == [], f"give these a language of {sorted(LANGUAGES)}; bash is run, console is parsed"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout's own folders in a place with a writable runs/, and `frontier-llm` on the PATH."""
    place = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "docs", "frontier_llm", "launch", "scripts", "slurm"):
        (place / name).symlink_to(ROOT / name)
    (place / "bin").mkdir()
    # a link to python would leave its virtual environment
    for name, words in (("frontier-llm", "-m frontier_llm.cli.main"), ("python", "")):
        command = place / "bin" / name
        command.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        command.chmod(0o755)
    return place


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", list(map(thorough, RUNNABLE)))
def test_commands_run(page: str, checkout: Path) -> None:
    text = "".join(fence.text for fence in FENCES if fence.page == page and fence.language == "bash")
    environment = {
        **os.environ,
        "PATH": f"{checkout}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    script = ["bash", "-euxo", "pipefail", "-c", text]
    done = subprocess.run(
        script, cwd=checkout, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, f"{page}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


def options_below(parser: argparse.ArgumentParser, words: list[str]) -> tuple[set[str], list[str]]:
    """Return the options of the subcommand that the words select, and the remaining words."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and words:
            assert set(words[0].split("|")) <= set(action.choices), f"{words[0]} is none of {sorted(action.choices)}"
            return options_below(action.choices[words[0].split("|")[0]], words[1:])
    return {option for action in parser._actions for option in action.option_strings}, words


def check_frontier_llm(line: str) -> None:
    """Check one command, or a synopsis of several commands separated by ·."""
    for part in line.split(" · "):
        words = shlex.split(part.removeprefix("frontier-llm").strip())
        assert words[0] in COMMANDS, f"no command {words[0]!r}"
        parser = parser_of(words[0])
        known, rest = options_below(parser, words)
        given = {re.sub(r"[=\]].*", "", word.lstrip("[")) for word in rest if word.lstrip("[").startswith("--")}
        assert given <= known, f"{part}: no {sorted(given - known)}"
        if not SYNOPSIS.search(part):
            _, loose = parser.parse_known_args(words)
            assert all("=" in word for word in loose), f"{part}: {loose}"


def check_batch_script(line: str) -> None:
    """Check that the script exists, and that its run or its command accepts the words."""
    words = shlex.split(line)
    script = next(word for word in words if word.endswith(".sbatch"))
    text = (ROOT / script).read_text(encoding="utf-8")
    typed = words[words.index(script) + 1 :]
    overrides = [word for word in typed if re.match(r"[\w.]+=", word)]
    tool = re.search(r'frontier_llm\.cli\.main (.+) "\$@"$', text, re.MULTILINE)
    if tool and "configs/runs/" not in text:
        parse([*tool[1].split(), *typed])
        return
    run = re.search(r"configs/runs/(\w+)\.yaml", text)
    assert run, f"{script} names no run"
    load_run(run[1], overrides)


@pytest.mark.parametrize("fence", TO_PARSE, ids=lambda fence: f"{fence.page}:{fence.line}")
def test_other_commands_are_real(fence: Fence) -> None:
    for line in commands(fence):
        # also check commands that srun or a launch script starts
        line = re.sub(r"^.*\bfrontier_llm\.cli\.main\b", "frontier-llm", line)
        if line.startswith("frontier-llm "):
            check_frontier_llm(line)
        elif ".sbatch" in line:
            check_batch_script(re.sub(r"^for .*? do (.*?); done$", r"\1", line))
        elif script := re.search(r"(?:^|\s)((?:scripts|launch)/[\w./-]+)", line):
            assert (ROOT / script[1]).is_file(), script[1]
        elif module := re.search(r"-m ((?:benchmarks|tests)(?:\.\w+)+)", line):
            assert (ROOT / module[1].replace(".", "/")).with_suffix(".py").is_file(), module[1]


def placeholders(text: str) -> list[str]:
    """Return words that a reader can neither type nor recognise as a placeholder: a bare URL, or `…` in place of an
    argument.
    """
    return re.findall(r"\bURL\b|(?<![\w=\].])[a-z][a-z-]* …(?! *[\]|])", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_can_be_typed(page: Path) -> None:
    assert [
        word for fence in fences(page) if fence.language in ("bash", "console") for word in placeholders(fence.text)
    ] == []


KEY = re.compile(r"`(model|parallel|batch|optimizer|precision|data|ops|comm|train|guard)\.([a-z_]*[a-z])(?=[`:=\s])")


def unknown_keys(text: str) -> list[str]:
    """Return configuration keys that do not exist. In a translation table, the other framework's column is ignored."""
    ours = re.sub(r"^\| .*? \|", "", text, flags=re.M)
    return [
        f"{room}.{key}"
        for room, key in KEY.findall(ours)
        if key not in RunConfig.model_fields[room].annotation.model_fields
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_configuration_keys_exist(page: Path) -> None:
    assert unknown_keys(page.read_text(encoding="utf-8")) == []


def test_the_checks_themselves() -> None:
    assert placeholders("pip install x --index-url URL\ngit clone … x\ndata tokenize TEXT… [--dtype T]") == [
        "URL",
        "clone …",
    ]
    for wrong in (
        "frontier-llm trian",
        "frontier-llm data tokenise X",
        "frontier-llm plan gpt-1t --nods 4",
        "frontier-llm evaluate MODEL [--dta X]",
    ):
        with pytest.raises((AssertionError, SystemExit)):
            check_frontier_llm(wrong)
    assert unknown_keys("| `model.n_layers` | `model.layers`, `model.layer`, `train.steps: 3`, `train.stps=3` |") == [
        "model.layer",
        "train.stps",
    ]
    with pytest.raises(Exception, match="stps"):
        check_batch_script("sbatch -A X slurm/train_1t.sbatch train.stps=3")
