"""Records the planner's results for every shipped model, and compares a later version with the record.

A change of structure must not change a prediction. `record` writes the best plans of each model at three numbers of
nodes on two machines. `compare` plans the record's cases again and lists each value that changed by more than 0.1 %.
`--checkout` plans with the code of another checkout, so that a record of an older commit can be made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT

MACHINES = ("frontier", "lumi")
NODES = (8, 64, 384)
PLANS = 3  # number of best plans that a record keeps per case
FIELDS = ("tensor", "pipeline", "schedule", "micro_batch", "step_s", "mfu", "memory_bytes", "closed_form_step_s")
TOLERANCE = 1e-3  # relative
BASELINE = RESULTS / "baseline_plans.json"  # record of commit df54020, before the packages were moved
SMOKE_CASE = "gpt-22b frontier 8"


def plan(checkout: Path, model: str, machine: str, nodes: int) -> dict[str, Any]:
    """Return the result of `frontier-llm plan` with the code of `checkout`: the best plans, or the reason why none
    fits.
    """
    command = [
        sys.executable,
        "-m",
        "frontier_llm",
        "plan",
        model,
        "--machine",
        machine,
        "--nodes",
        str(nodes),
        "--json",
    ]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        return {"refused": done.returncode}
    answer = json.loads(done.stdout)
    best = answer["plans"][:PLANS]
    return {
        "legal": answer["legal"],
        "fitting": answer["fitting"],
        "plans": [{field: each[field] for field in FIELDS} for each in best],
    }


def all_cases() -> Iterator[tuple[str, str, int]]:
    """Yield (model, machine, nodes) for every shipped model."""
    for model in sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.yaml")):
        for machine in MACHINES:
            for nodes in NODES:
                yield model, machine, nodes


def differences(before: Any, after: Any, place: str) -> Iterator[str]:
    """Yield a line of text for each value below `place` that differs by more than the tolerance."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(before.get(key), after.get(key), f"{place} {key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{place} [{index}]")
    elif isinstance(before, float) and isinstance(after, float):
        if abs(after - before) > TOLERANCE * abs(before):
            yield f"{place}: {before:.6g} before, {after:.6g} now"
    elif before != after:
        yield f"{place}: {before} before, {after} now"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        default=BASELINE,
        help=f"JSON record (default: {BASELINE.name})",
    )
    parser.add_argument("--checkout", type=Path, default=ROOT, help="checkout whose code plans (default: this one)")
    parser.add_argument("--smoke", action="store_true", help="compare one case only")
    arguments = parser.parse_args()

    if arguments.action == "record":
        answers = {}
        for model, machine, nodes in all_cases():
            answers[f"{model} {machine} {nodes}"] = plan(arguments.checkout, model, machine, nodes)
        arguments.file.write_text(json.dumps(answers, indent=1) + "\n")
        print(f"{len(answers)} cases are in {arguments.file}")
        return 0

    record = json.loads(arguments.file.read_text())
    cases = [SMOKE_CASE] if arguments.smoke else list(record)
    moved: list[str] = []
    for case in cases:
        model_name, machine_name, node_count = case.split()
        now = plan(arguments.checkout, model_name, machine_name, int(node_count))
        moved += differences(record[case], now, case)
    print("\n".join(moved))
    print(f"{len(cases)} cases compared with {arguments.file}: {len(moved)} values moved by more than 0.1 %")
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
