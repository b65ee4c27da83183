"""Ways to start the program besides `frontier-llm COMMAND`: the module, the version, `help`, and shell completion."""

from __future__ import annotations

import subprocess
import sys

import pytest

from frontier_llm import __version__
from frontier_llm.cli.main import COMMANDS, main
from frontier_llm.config import available


def test_the_package_is_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "frontier_llm", "-V"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == __version__


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_help_is_a_word_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words, flags in (
        (["help"], ["--help"]),
        (["help", "plan"], ["plan", "--help"]),
        (["help", "data", "index"], ["data", "index", "-h"]),
    ):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert main(flags) == 0 and capsys.readouterr().out == said != ""
    assert main(["help", "trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err


def completed(script: str, *typed: str) -> set[str]:
    """Return bash's completions of the last word."""
    words = " ".join(f"'{word}'" for word in ("frontier-llm", *typed))
    ask = f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _frontier_llm; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-uc", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_options_and_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert set(COMMANDS) <= completed(script, "")
    assert completed(script, "tr") == {"train"}
    assert completed(script, "data", "to") == {"tokenizer", "tokenize"}
    assert completed(script, "data", "tokenize", "text.jsonl", "--text") == {"--text-key"}
    assert completed(script, "plan", "gpt-1t", "--nod") == {"--nodes"}
    assert completed(script, "plan", "gpt-1") == {name for name in available("models") if name.startswith("gpt-1")}
    assert completed(script, "train", "quick") == {"quickstart"}
    assert completed(script, "report", "runs/a") == set()  # the argument is a path, which the shell itself completes
    assert "--system-root" not in script


def test_zsh_runs_the_same_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
