"""frontier-llm generate MODEL --prompt TEXT: generate text that continues prompts. The text is printed while it is
generated.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import JSON, as_typed, command, natural, option, positive
from frontier_llm.cli.ranks import MODEL_OPTIONS, degrees, inference_model, on_ranks, verification
from frontier_llm.errors import ConfigError, LayoutError, unreadable
from frontier_llm.units import printable, strict_json

if TYPE_CHECKING:
    from frontier_llm.inference.sampling import Sampling


@command(
    *MODEL_OPTIONS,
    JSON,
    option(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; may be given several times. Without a prompt the model begins a new document",
    ),
    option("--prompt-file", metavar="FILE", help="a text file, one prompt per line"),
    option(
        "--max-new-tokens",
        type=positive,
        default=128,
        metavar="N",
        help="largest number of new tokens per prompt (default: 128)",
    ),
    option(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 = always the most likely token (default: 0.8)",
    ),
    option(
        "--top-k",
        type=natural,
        default=0,
        metavar="K",
        help="keep the K most likely tokens; 0 = all (default)",
    ),
    option(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="keep the fewest most likely tokens whose probabilities sum to at least P (default: 0.95)",
    ),
    option(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="keep tokens at least P times as likely as the likeliest; 0 = all (default)",
    ),
    option(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1: tokens that already occur become less likely (default: 1)",
    ),
    option(
        "--seed",
        type=natural,
        default=0,
        metavar="N",
        help="seed of the random draws (default: 0)",
    ),
    option(
        "--stop",
        action="append",
        metavar="TEXT",
        help="text that ends a continuation; may be given several times",
    ),
    option(
        "--batch-size",
        type=positive,
        default=8,
        metavar="N",
        help="prompts continued at once (default: 8)",
    ),
    option("--no-cache", action="store_true", help="recompute every position for every token, to check the cache"),
    about="Continue one or several prompts. Text is printed to stdout while it is generated, messages to stderr.",
    examples=(
        'frontier-llm generate runs/quickstart --prompt "def main("',
        "frontier-llm generate runs/train_22b parallel.tensor=8 --prompt-file prompts.txt",
    ),
)
def generate(args: argparse.Namespace) -> int:
    """Return exit code 0 if every prompt was continued."""
    _sampling(args), _prompts(args)  # invalid values are refused here, in one process, before ranks start
    if loose := [word for word in args.overrides if "=" not in word]:
        raise ConfigError(f"{loose[0]!r} has no option", f"write --prompt {' '.join(loose)!r}")
    return on_ranks(args, _generate)


def _sampling(args: argparse.Namespace) -> Sampling:
    from frontier_llm.inference.sampling import Sampling

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    with as_typed({name: f"--{name.replace('_', '-')}" for name in names}):
        return Sampling(**{name: getattr(args, name) for name in names})


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt or [])
    if args.prompt_file:
        try:
            prompts += [
                line for line in Path(args.prompt_file).read_text(encoding="utf-8").splitlines() if line.strip()
            ]
        except OSError as error:
            raise unreadable(args.prompt_file, error) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"is not UTF-8: {error}", "give a UTF-8 text file", args.prompt_file) from error
    return prompts or [""]


def _generate(args: argparse.Namespace) -> int:
    from frontier_llm.inference.open import open_model, open_tokenizer
    from frontier_llm.inference.text import complete

    prompts = _prompts(args)
    sampling = _sampling(args)
    opened = open_model(args.model, plugins=args.plugin)
    # open the tokenizer before reading the weights, because it can be missing
    tokenizer = open_tokenizer(opened, args.tokenizer)
    with inference_model(args, opened) as (model, prints):
        if model.mesh.dp.size > 1:
            layout = degrees(args)
            raise LayoutError(
                f"{model.mesh.world.size} ranks are more than tensor {layout.tensor} x pipeline {layout.pipeline}",
                fix="start exactly tensor x pipeline ranks",
            )
        live = prints and not args.json and len(prompts) == 1
        if live:
            _write(prompts[0])
        show = (lambda row, piece: _write(piece)) if live else (lambda row, piece: None)
        completions = complete(
            model=model,
            tokenizer=tokenizer,
            prompts=prompts,
            sampling=sampling,
            stops=args.stop or (),
            on_text=show,
            use_cache=not args.no_cache,
            batch_size=args.batch_size,
        )
    if prints and args.json:
        state = verification(args, opened)
        print(
            strict_json(
                [{**asdict(completion), "verification": state} for completion in completions],
                ensure_ascii=False,
            )
        )
    elif live:
        _write("\n")
    elif prints:
        _write(
            "\n\n".join(f"── {number + 1}\n{entry.prompt}{entry.text}" for number, entry in enumerate(completions))
            + "\n"
        )
    return 0


def _write(text: str) -> None:
    """Write text to stdout. On a terminal, escape control characters, which a model can generate."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
