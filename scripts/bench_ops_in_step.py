"""What each op is worth in the whole training step: the step with all fused ops, with one group off, and with all off, taking turns.

    OMP_NUM_THREADS=1 python scripts/bench_ops_in_step.py [--dtype bf16] [--rounds 5]

One rank on the CPU, model bench-l8-h384, 4 microbatches of 4. Times are CPU seconds of the process (one thread), best of the rounds, so that
other work on the machine moves them little. "Off" is SDPA for attention and plain torch for the rest.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack

import torch

from frontier_llm.config import load_run
from frontier_llm.ops.face import GROUPS
from frontier_llm.train.join import joined_state
from frontier_llm.train.step import train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    off = {group: "sdpa" if group == "attention" else "reference" for group in GROUPS}
    choices: dict[str, dict[str, str]] = {"all on": {}, **{f"{group} off": {group: how} for group, how in off.items()}, "all off": off}
    best = dict.fromkeys(choices, float("inf"))
    with ExitStack() as stack:
        states = {}
        for name, ops in choices.items():
            overrides = [f"precision.dtype={args.dtype}", "batch.global_batch=16", "batch.micro_batch=4", "model=bench-l8-h384"]
            config = load_run("bench", [*overrides, *(f"ops.{group}={how}" for group, how in ops.items())])
            states[name] = stack.enter_context(joined_state(config, None))
        for turn in range(args.rounds + 1):
            for name, state in states.items():
                begin = time.process_time()
                train_step(state)
                if turn:  # the first turn warms up
                    best[name] = min(best[name], time.process_time() - begin)
    tokens = 16 * 256
    print(f"| {args.dtype} | CPU s per step | tokens/s | loss of speed without it |\n|---|---|---|---|")
    for name, seconds in best.items():
        print(f"| {name} | {seconds:.2f} | {tokens / seconds:,.0f} | {seconds / best['all on'] - 1:+.1%} |")


if __name__ == "__main__":
    main()
