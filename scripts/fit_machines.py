"""Fit the clusters' constants on the stated half of the published rows and write them into configs/machines/*.yaml.

    python scripts/fit_machines.py [--dry-run] [MACHINE ...]

Every fitted number keeps its tag `estimated` and says in its source on how many rows of which data set it was fitted.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np

from frontier_llm.config import configs_dir
from frontier_llm.costs.time import step_s
from frontier_llm.machine import load_machine, rates
from frontier_llm.machine.load import PLACES
from frontier_llm.planner.datasets import shipped, stack_workloads
from frontier_llm.planner.fit import KEYS, fit

# where each constant starts, and what the weak prior holds it to; the file's own value would drift from fit to fit
START = {
    "gemm_efficiency": 0.8, "gemm_k_half": 100.0, "unaligned_penalty": 4.0, "flash_efficiency": 0.6, "flash_backward": 0.75,
    "hbm_efficiency": 0.75, "kernel_s": 8e-6, "launch_s": 30e-6, "microbatch_s": 5e-4, "step_s": 2e-2, "fabric_latency_s": 20e-6,
    "fabric_hop_s": 2e-6, "network_efficiency": 0.8, "network_crowding": 0.8, "network_latency_s": 25e-6,
}  # fmt: skip
START_OF = {
    "llm-foundry-h100": {"gemm_efficiency": 0.65, "flash_efficiency": 0.4, "flash_backward": 0.6},
    "eos": {"gemm_efficiency": 0.7, "flash_efficiency": 0.5},
    "frontier": {"unaligned_penalty": 2.0},
}
FABRIC = {"A100": 240e9, "H100": 360e9}
UNIT = {"_us": 1e6, "_gbps": 1e-9}


def rewrite(path: Path, stack: str, key: str, value: float, source: str) -> None:
    """Replace one number's value and source in place; comments and order of the file stay."""
    section, name = PLACES[key]
    unit = next((factor for suffix, factor in UNIT.items() if name.endswith(suffix)), 1.0)
    lines, inside, out = path.read_text().splitlines(), "", []
    within_fabric = False
    for line in lines:
        top = re.match(r"^(\w+):", line)
        if top:
            inside = top.group(1)
        sub = re.match(r"^  ([\w-]+):\s*$", line)
        if inside == "stacks" and sub:
            inside_stack = sub.group(1)
        if inside == "node" and line.startswith("  ") and not line.startswith("    "):
            within_fabric = line.strip() == "fabric_gbps:"
        here = (section == "stack" and inside == "stacks" and line.startswith(f"    {name}:") and inside_stack == stack) or (
            section == inside and line.startswith(f"  {name}:") and "{" in line
        )
        if key == "fabric_bytes_s":
            here = within_fabric and bool(re.match(r"^    \d+:", line))
        if here:
            head = line.split("{")[0]
            line = f'{head}{{value: {value * unit:.4g}, tag: estimated, source: "{source}"}}'
        out.append(line)
    path.write_text("\n".join(out) + "\n")


def main() -> None:
    """Fit every stack that has keys and rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="*")
    parser.add_argument("--dry-run", action="store_true", help="print, do not write")
    args = parser.parse_args()
    from dataclasses import replace

    for (name, stack), keys in KEYS.items():
        if args.machines and name not in args.machines:
            continue
        rows = [row for row in shipped() if (row.machine, row.stack) == (name, stack)]
        train, unseen = [row for row in rows if row.fitted], [row for row in rows if not row.fitted]
        machine = load_machine(name)
        start = rates(machine, stack)
        values = {**START, **START_OF.get(name, {})}
        start = replace(start, **{key: values[key] for key in keys if key != "fabric_bytes_s"})
        if "fabric_bytes_s" in keys:
            speed = FABRIC["H100" if "H100" in machine.device.name else "A100"]
            start = replace(start, fabric_bytes_s=tuple(speed for _ in start.fabric_bytes_s))
        best = fit(train, start, keys)
        for title, part in (("fitted", train), ("unseen", unseen)):
            if part:
                error = step_s(stack_workloads(part), best) / np.array([row.seconds for row in part]) - 1
                print(
                    f"{name:20s} {stack:18s} {title} n={len(part):3d} MAPE {100 * np.mean(np.abs(error)):5.2f} % median {100 * np.median(np.abs(error)):5.2f} % bias {100 * np.mean(error):+5.2f} %"
                )
        for key in keys:
            value = getattr(best, key)
            value = value[0] if isinstance(value, tuple) else value
            print(f"    {key} = {value:.4g}")
            if not args.dry_run:
                source = f"fitted on {len(train)} of {len(rows)} rows of {train[0].dataset} (scripts/fit_machines.py)"
                rewrite(configs_dir() / "machines" / f"{name}.yaml", stack, key, value, source)


if __name__ == "__main__":
    main()
