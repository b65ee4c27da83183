#!/usr/bin/env python3
"""Compares a small mixture of experts with megatron-core's dropless all-to-all dispatcher and with this project's dense
model.

    python -m benchmarks.peers.moe --peers-python PEERS_VENV/bin/python [--rounds 2] [--layouts serial,ep2,ep4,ep2tp2]

The mixture has L8 H384 and 16 experts of width 384, top 4. The dense model is bench-l8-h384, whose MLP of 1,536 is as
wide as the four experts of a token. The three programs alternate, with one thread per rank, in bf16. CPU seconds are
summed over all ranks. They are comparable on a machine with other load, or with fewer cores than ranks. Wall seconds
are reported beside them.

Layouts are added to docs/benchmarks/results/moe_step.json as they are measured. The measured part of
docs/benchmarks/moe.md is written from it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness import (
    MEASURED,
    RESULTS,
    interleave,
    last_json,
    parse_arguments,
    read_json,
    write_json,
    write_measured,
)
from benchmarks.peers.gpt import PEERS, SHAPE, TOKENS, run
from frontier_llm.blueprint.work import model_flops_per_token
from frontier_llm.config import load_run

EXPERTS = {
    "experts": 16,
    "top_k": 4,
    "expert_hidden": 384,
}
MOE = f"model.moe={json.dumps(EXPERTS)}"
# for all three programs, because neither this project's experts nor megatron-core's have biases
BARE = "model.bias=false"


class Degrees(NamedTuple):
    """Degrees of one layout. An expert is never split, because it is narrow."""

    tp: int
    dp: int
    ep: int


LAYOUTS = {
    "serial": Degrees(1, 1, 1),
    "ep2": Degrees(1, 2, 2),
    "ep4": Degrees(1, 4, 4),
    "ep2tp2": Degrees(2, 2, 2),
}


def ours(layout: Degrees, experts: bool, steps: int) -> dict[str, list[float]]:
    """Return the "wall" and "cpu" seconds of each step."""
    overrides = [
        BARE,
        f"parallel.tensor={layout.tp}",
        f"parallel.data={layout.dp}",
        f"parallel.sequence_parallel={str(layout.tp > 1).lower()}",
    ]
    overrides += [MOE, f"parallel.expert={layout.ep}"] if experts else []
    with tempfile.TemporaryDirectory() as run_dir:
        command = [
            sys.executable,
            "-m",
            "frontier_llm.cli.main",
            "bench",
            "step",
            "bench",
            *overrides,
            f"train.run_dir={run_dir}",
        ]
        output = run([*command, "--steps", str(steps), "--json"])
    result = last_json(output)
    return {"wall": result["step_times_s"], "cpu": result["cpu_times_s"]}


def megatron(python: str, layout: Degrees, steps: int) -> dict[str, list[float]]:
    arguments = {
        **SHAPE,
        **EXPERTS,
        "tp": layout.tp,
        "pp": 1,
        "ep": layout.ep,
        "steps": steps,
        "warmup": 2,
        "dtype": "bf16",
    }
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={layout.tp * layout.dp}"]
    output = run(
        [
            *command,
            "--module",
            PEERS["megatron-core"],
            *(f"--{key}={value}" for key, value in arguments.items()),
        ]
    )
    match = re.search(r"^RESULT (.*)$", output, re.M)
    assert match, output
    result = json.loads(match[1])
    return {"wall": result["step_s"], "cpu": result["cpu_s"]}


def page(result: dict[str, Any]) -> str:
    """Return the measured part of docs/benchmarks/moe.md."""
    rows = []
    for name, row in result["layouts"].items():
        ratios = [f"{row['megatron-core'][kind] / row['experts'][kind]:.2f}" for kind in ("cpu", "wall")]
        share = [
            f"{row['flops_experts_over_dense'] * row['dense'][kind] / row['experts'][kind]:.2f}"
            for kind in ("cpu", "wall")
        ]
        seconds = [f"{row[who]['cpu']:.2f} / {row[who]['wall']:.2f}" for who in ("experts", "megatron-core", "dense")]
        rows.append(f"| {name} | {' | '.join(seconds)} | {' / '.join(ratios)} | {' / '.join(share)} |")
    lines = [
        "### Measured: the step",
        "",
        f"`benchmarks/peers/moe.py`: L8 H384 A6 S256 V8192, {EXPERTS['experts']} experts of "
        f"{EXPERTS['expert_hidden']}, top {EXPERTS['top_k']}, {TOKENS:,} tokens a "
        "step, bf16, one thread per rank. megatron-core 0.16.1 uses its all-to-all dispatcher without dropping and "
        "computes one expert after the other, because its grouped product needs a GPU. The two cores were **shared "
        "with other jobs**, so CPU seconds of all ranks are compared, and wall seconds are only added. Values are "
        "medians of interleaved steps. Four ranks share the two cores, so their wall seconds mean little. The dense "
        "model's MLP is as wide as the four experts of a token. The last column is the experts' rate of model FLOPs "
        "over the dense model's rate.",
        "",
        "| layout | ours, cpu / wall s | megatron-core | our dense model | megatron-core over ours | rate over dense |",
        "|---|--:|--:|--:|--:|--:|",
        *rows,
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    small = ["--rounds", "1", "--steps", "1", "--layouts", "serial"]
    options = parse_arguments(parser, smoke=["--peers-python", sys.executable, *small])
    target = RESULTS / "moe_step.json"
    result: dict[str, Any] = read_json(target, {"shape": {**SHAPE, **EXPERTS}, "layouts": {}})
    flops = {
        name: model_flops_per_token(load_run("bench", more).model)
        for name, more in (("experts", [BARE, MOE]), ("dense", [BARE]))
    }
    for name in options.layouts.split(","):
        layout = LAYOUTS[name]
        work = {
            "experts": partial(ours, layout, True, options.steps),
            "megatron-core": partial(megatron, options.peers_python, layout, options.steps),
            "dense": partial(ours, layout, False, options.steps),
        }
        seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for who, turns in interleave(work, options.rounds).items():
            for measured in turns:
                for kind, values in measured.items():
                    seconds[who][kind] += values
        medians = {who: {kind: median(values) for kind, values in kinds.items()} for who, kinds in seconds.items()}
        samples = {who: dict(kinds) for who, kinds in seconds.items()}
        result["layouts"][name] = {
            **medians,
            "flops_experts_over_dense": flops["experts"] / flops["dense"],
            "samples_s": samples,
        }
        write_json(target, result, options.smoke)
        write_measured(MEASURED / "moe.md", __file__, page(result), options.smoke)
        print(f"{name}: {medians}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
