"""Writes the best published rates into frontier_llm/planner/best_published.json. `plan` prints them beside its own.

    python -m benchmarks.published.best [--check]

With --check nothing is written, and the exit code is 1 if the file differs from the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict

from benchmarks.published.datasets import shipped
from benchmarks.published.predict import cluster, cluster_rates, complete, rates_of
from frontier_llm.blueprint.layout import Layout
from frontier_llm.blueprint.parameters import total_parameters
from frontier_llm.blueprint.work import model_flops_per_token
from frontier_llm.planner.uncertainty import BEST_PUBLISHED, BestRun, family, size_class
from frontier_llm.units import TERA

LONGEST_KEY = 40  # a run with a longer key is named by its data set


def best_of_rows(equivalent: bool = False) -> dict[str, dict[int, BestRun]]:
    """Return family of devices → size class of the model → the run with the highest model TFLOP/s per device.

    With `equivalent`, runs whose layout has no equivalent here (AxoNN's 4D) are excluded.

    Runs in fp8 are excluded. Runs with context parallelism are excluded too, because their rates depend on whether
    masked scores count.
    """
    best: dict[str, dict[int, BestRun]] = defaultdict(dict)
    for row in shipped():
        if row.stack.endswith("fp8") or row.layout.cp > 1 or (equivalent and row.approximate):
            continue
        tokens = row.layout.global_batch * row.model.sequence_length
        tflops = round(model_flops_per_token(row.model) * tokens / row.seconds / row.layout.devices / TERA, 1)
        name = row.key if len(row.key) < LONGEST_KEY else row.dataset
        of_family = best[family(cluster(row.machine).device.name)]
        size = size_class(total_parameters(row.model))
        previous = of_family.get(size)
        if previous is None or (tflops, name) > (previous.tflops, previous.run):
            layout = complete(row, rates_of(row, cluster_rates(row.machine, row.stack)))
            changed = {key: value for key, value in vars(layout).items() if value != getattr(Layout(), key)}
            of_family[size] = BestRun(tflops=tflops, run=name, machine=row.machine, stack=row.stack, layout=changed)
    return best


def as_json() -> str:
    """Return the file's content, with a line per size class."""
    parts = []
    for name, equivalent in (("fastest", False), ("equivalent", True)):
        families = []
        for device, sizes in sorted(best_of_rows(equivalent).items()):
            rows = []
            for size, value in sorted(sizes.items()):
                rows.append(f'   "{size}": {json.dumps(vars(value))}')
            lines = ",\n".join(rows)
            families.append(f'  "{device}": {{\n{lines}\n  }}')
        content = ",\n".join(families)
        parts.append(f' "{name}": {{\n{content}\n }}')
    stacks = sorted({(row.machine, row.stack) for row in shipped() if row.known})
    parts.append(f' "stacks": {json.dumps(stacks)}')
    body = ",\n".join(parts)
    return f"{{\n{body}\n}}\n"


def main() -> int:
    """Return the exit code: 1 with --check if the file is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare, and write nothing")
    check = parser.parse_args().check
    content = as_json()
    if not check:
        BEST_PUBLISHED.write_text(content, encoding="utf-8")
    elif BEST_PUBLISHED.read_text(encoding="utf-8") != content:
        print(f"{BEST_PUBLISHED} differs from the rows: run python -m benchmarks.published.best", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
