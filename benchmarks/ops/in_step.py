"""Measures each op's share of the training step: the step with all fused ops, with one group off, and with all off.

    OMP_NUM_THREADS=1 python -m benchmarks.ops.in_step [--dtype bf16,fp32] [--rounds 4] [--update]

The settings alternate. One rank on the CPU, model bench-l8-h384, 4 microbatches of 4. It takes about 2 minutes for bf16
and 3 for fp32 on an idle machine. Times are CPU seconds of the process (one thread), best of the rounds, so that other
load on the machine has little influence. "Off" is SDPA for attention and plain torch for the other ops. --update puts
the tables into docs/benchmarks/ops.md.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from benchmarks.harness import MEASURED, TINY, interleave, parse_arguments
from frontier_llm.config import load_run
from frontier_llm.ops.reference import GROUPS
from frontier_llm.training.build import TrainState
from frontier_llm.training.join import joined_state
from frontier_llm.training.step import train_step

DOCUMENT = MEASURED / "ops.md"
TOKENS = 16 * 256


def measure(dtype: str, rounds: int, words: Sequence[str]) -> dict[str, float]:
    """Return the CPU seconds of a step by the name of the setting ("all on", "norm off", …)."""
    off = {group: "sdpa" if group == "attention" else "reference" for group in GROUPS}
    choices: dict[str, dict[str, str]] = {
        "all on": {},
        **{f"{group} off": {group: how} for group, how in off.items()},
        "all off": off,
    }
    with ExitStack() as stack:
        states = {}
        for name, ops in choices.items():
            overrides = [
                f"precision.dtype={dtype}",
                "batch.global_batch=16",
                "batch.micro_batch=4",
                "model=bench-l8-h384",
                *words,
            ]
            config = load_run("bench", [*overrides, *(f"ops.{group}={how}" for group, how in ops.items())])
            states[name] = stack.enter_context(joined_state(config, None))
        work = {name: partial(step_s, state) for name, state in states.items()}
        seconds = interleave(work, rounds, warm_up=1)
    return {name: min(of_choice) for name, of_choice in seconds.items()}


def step_s(state: TrainState) -> float:
    """Run one step and return its CPU seconds."""
    begin_s = time.process_time()
    train_step(state)
    return time.process_time() - begin_s


def table(dtype: str, best: dict[str, float]) -> str:
    """Return the table of docs/benchmarks/ops.md."""
    lines = [f"| {dtype} | CPU s per step | tokens/s | loss of speed without it |", "|---|---|---|---|"]
    for name, seconds in best.items():
        label = f"{name} (not used by this model: the noise)" if name in ("rope off", "experts off") else name
        lines.append(f"| {label} | {seconds:.2f} | {TOKENS / seconds:,.0f} | {seconds / best['all on'] - 1:+.1%} |")
    return "\n".join(lines) + "\n"


def updated(document: str, fresh: str) -> str:
    """Replace the table that has the same first line. Raises ValueError if there is not exactly one."""
    heading = fresh.partition("\n")[0]
    document, found = re.subn(rf"^{re.escape(heading)}\n(\|.*\n)+", lambda _: fresh, document, flags=re.MULTILINE)
    if found != 1:
        raise ValueError(f"{DOCUMENT} has {found} tables that begin with {heading!r}")
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16,fp32")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the run")
    parser.add_argument("--update", action="store_true", help="write the tables into docs/benchmarks/ops.md")
    args = parse_arguments(parser, smoke=["--dtype", "fp32", "--rounds", "1", *TINY])
    torch.set_num_threads(1)
    for dtype in args.dtype.split(","):
        fresh = table(dtype, measure(dtype, args.rounds, args.overrides))
        print(fresh, flush=True)
        if args.update:
            DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8"), fresh), encoding="utf-8")


if __name__ == "__main__":
    main()
