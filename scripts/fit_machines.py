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
from frontier_llm.machine import Rates, load_machine, rates
from frontier_llm.machine.load import PLACES
from frontier_llm.planner.datasets import shipped
from frontier_llm.planner.fit import KEYS, fit, starting_point
from frontier_llm.planner.predict import predict

UNIT = {"_us": 1e6, "_gbps": 1e-9}


def rewrite(path: Path, stack: str, key: str, value: float, source: str) -> None:
    """Replace one number's value and source in place; comments and order of the file stay."""
    key, _, ranks = key.partition("/")
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
            here = within_fabric and bool(re.match(rf"^    {ranks or '[0-9]+'}:", line))
        if here:
            head = line.split("{")[0]
            line = f'{head}{{value: {value * unit:.4g}, tag: estimated, source: "{source}"}}'
        out.append(line)
    path.write_text("\n".join(out) + "\n")


def value_of(best: Rates, key: str) -> float:
    """A fitted constant; "fabric_bytes_s/4" is the entry for groups of four."""
    name, _, ranks = key.partition("/")
    value = getattr(best, name)
    return value[best.fabric_size.index(int(ranks)) if ranks else 0] if isinstance(value, tuple) else value


def main() -> None:
    """Fit every stack that has keys and rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="*")
    parser.add_argument("--dry-run", action="store_true", help="print, do not write")
    args = parser.parse_args()
    for (name, stack), keys in KEYS.items():
        if args.machines and name not in args.machines:
            continue
        rows = [row for row in shipped() if (row.machine, row.stack) == (name, stack)]
        train, unseen = [row for row in rows if row.fitted], [row for row in rows if not row.fitted]
        best = fit(train, starting_point(name, rates(load_machine(name), stack), keys), keys)
        for title, part in (("fitted", train), ("unseen", unseen)):
            if part:
                error = np.array([one.error for one in predict(part, best)])
                print(
                    f"{name:20s} {stack:18s} {title} n={len(part):3d} MAPE {100 * np.mean(np.abs(error)):5.2f} % median {100 * np.median(np.abs(error)):5.2f} % bias {100 * np.mean(error):+5.2f} %"
                )
        for key in keys:
            value = value_of(best, key)
            print(f"    {key} = {value:.4g}")
            if not args.dry_run:
                source = f"fitted on {len(train)} of {len(rows)} rows of {train[0].dataset} (scripts/fit_machines.py)"
                rewrite(configs_dir() / "machines" / f"{name}.yaml", stack, key, value, source)


if __name__ == "__main__":
    main()
