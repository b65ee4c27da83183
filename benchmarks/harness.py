"""Functions that all benchmarks use: arguments with a short run, alternating rounds, ranks, results in JSON and pages.

`parse_arguments` adds `--smoke` to a program. With this option the program makes a short run of some seconds, with
arguments that the program itself gives. A short run changes no page and no result. A test makes a short run of every
program.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
from atexit import register
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from frontier_llm.run.launchers import free_port

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MEASURED = DOCS / "benchmarks"
RESULTS = MEASURED / "results"
FOLDER = "{folder}"  # replaced by a temporary folder in the arguments of a short run
COMMAND = (sys.executable, "-m", "frontier_llm.cli.main")

# Overrides that make the step of a short run cheap.
TINY = (
    "model.layers=2",
    "model.hidden=64",
    "model.heads=2",
    "model.ffn_hidden=128",
    "model.vocab_size=512",
    "model.sequence_length=32",
    "batch.global_batch=4",
    "batch.micro_batch=2",
)

Key = TypeVar("Key")
Value = TypeVar("Value")


def parse_arguments(
    parser: argparse.ArgumentParser, smoke: Sequence[str], words: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse `words` (default: the command line).

    `--smoke` puts the words of `smoke` before them. `{folder}` in these words becomes a folder that is deleted at the
    end.
    """
    given = list(sys.argv[1:] if words is None else words)
    parser.add_argument(
        "--smoke", action="store_true", help="run for only some seconds, and change no page and no result file"
    )
    is_smoke = "--smoke" in given
    if is_smoke:
        given.remove("--smoke")
        folder = tempfile.mkdtemp(prefix="frontier-llm-smoke-")
        register(shutil.rmtree, folder, ignore_errors=True)
        given = [*(word.replace(FOLDER, folder) for word in smoke), *given]
    options = parser.parse_args(given)
    options.smoke = is_smoke
    return options


def interleave(work: Mapping[Key, Callable[[], Value]], rounds: int, warm_up: int = 0) -> dict[Key, list[Value]]:
    """Call each function of `work` once per round, so that other load on the machine affects all of them equally.
    Returns the results by key.

    The results of the first `warm_up` rounds are dropped. Progress goes to stderr.
    """
    results: dict[Key, list[Value]] = {key: [] for key in work}
    for number in range(warm_up + rounds):
        for key, measure in work.items():
            print(f"round {number + 1} of {warm_up + rounds}: {key}", file=sys.stderr, flush=True)
            value = measure()
            if number >= warm_up:
                results[key].append(value)
    return results


def run_ranks(
    ranks: int,
    serve: Callable[..., None],
    *arguments: Any,
    results: int = 1,
    timeout_s: float = 900,
    preload: str = "",
) -> list[Any]:
    """Start `serve(rank, port, *arguments, queue)` in `ranks` processes and return the items of the queue.

    `results` is the number of items that all ranks together put into the queue. `preload` is a module that is imported
    once, and the ranks are forked afterwards. Without `preload` each rank starts a new interpreter.
    """
    context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
    if preload:
        context.set_forkserver_preload([preload])
    queue = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=serve, args=(rank, port, *arguments, queue), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    items = [queue.get(timeout=timeout_s) for _ in range(results)]
    for process in processes:
        process.join()
    return items


def last_json(output: str) -> Any:
    """Return the JSON object in the output of a command, without the text around it."""
    return json.loads(output[output.index("{") : output.rindex("}") + 1])


def write_json(path: Path | None, result: Any, smoke: bool = False) -> None:
    """Write a result. Does nothing without a path, and in a short run."""
    if path is not None and not smoke:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path | None, default: Any) -> Any:
    """Return an earlier result, or `default` if there is none."""
    if path is None or not path.exists():
        return default
    return json.loads(path.read_text(encoding="utf-8"))


def ensure_text(folder: Path, smoke: bool) -> None:
    """Write the token files `train` and `validation` if they do not exist: Python's standard library as bytes.

    In a short run they contain a few kilobytes.
    """
    if (folder / "validation.idx").exists():
        return
    if not smoke:
        subprocess.run([*COMMAND, "data", "stdlib", str(folder), "--tokenizer", "bytes"], check=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.jsonl"
    numbers = " ".join(map(str, range(20_000)))
    text.write_text(json.dumps({"text": numbers}) + "\n", encoding="utf-8")
    for part in ("train", "validation"):
        command = [*COMMAND, "data", "tokenize", str(text), "--tokenizer", "bytes", "--output", str(folder / part)]
        subprocess.run(command, check=True)


def write_measured(page: Path, program: str, text: str, smoke: bool = False) -> None:
    """Print `text`, and put it into `page` between `<!-- measured: written by PROGRAM -->` and `<!-- /measured -->`.

    `program` is the file of the benchmark, and PROGRAM is its path in the checkout. A short run does not change the
    page. Raises SystemExit if the page has no such part.
    """
    print(text)
    mark = f"<!-- measured: written by {Path(program).resolve().relative_to(ROOT)} -->"
    before, begin, rest = page.read_text(encoding="utf-8").partition(mark)
    _, end, after = rest.partition("<!-- /measured -->")
    if not begin or not end:
        raise SystemExit(f"{page} has no place for the results: write {mark} and <!-- /measured --> around it")
    if not smoke:
        page.write_text(f"{before}{mark}\n{text}{end}{after}", encoding="utf-8")
