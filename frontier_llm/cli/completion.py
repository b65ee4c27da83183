"""frontier-llm completion bash|zsh: print a completion script, generated from the declared commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from frontier_llm.cli.arguments import command, option

# In the script, `path` is the command and action typed so far. Any other word is a value. Without a match the shell
# completes file names.
_BASH = """_frontier_llm() {{
    local path="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$path ${{COMP_WORDS[i]}}" in
            {paths}) path="$path ${{COMP_WORDS[i]}}" ;;
        esac
    done
    local words=""
    case "$path" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o bashdefault -o default -F _frontier_llm frontier-llm"""
_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit"  # lets zsh run bash's completions


def completions(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, Sequence[str]]]:
    """Yield (words typed before, possible next words) of a command and of its actions.

    Possible words are options, choices and names of shipped files.
    """
    from frontier_llm.config import available

    words = [flag for action in parser._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from completions(inner, f"{path} {name}")
        words += action.choices or ()
        if action.dest == "run":
            words += available("runs")
        if action.dest == "model" and path == " plan":
            words += available("models")
    yield path, words


@command(
    option("shell", choices=("bash", "zsh"), help="shell that will run the script"),
    line="print a script that completes commands and options",
    about="Print a script that completes commands, options and names of models and runs. For this shell, and in "
    "~/.bashrc for every one: "
    'eval "$(frontier-llm completion bash)"; in ~/.zshrc: eval "$(frontier-llm completion zsh)".',
    examples=("frontier-llm completion bash",),
)
def completion(args: argparse.Namespace) -> int:
    """Print the completion script."""
    from frontier_llm.cli.main import COMMANDS, parser_of

    words = dict(completions(parser_of(*COMMANDS)))
    paths = "|".join(f'"{path}"' for path in words if path)
    cases = "\n".join(f'        "{path}") words="{" ".join(choices)}" ;;' for path, choices in words.items())
    if args.shell == "zsh":
        print(_ZSH)
    print(_BASH.format(paths=paths, cases=cases))
    return 0
