"""Executes the prebuilt code objects of gfx90a on a simulated MI250X (tests/cdna2) and compares with the float64
reference.

    python -m tests.harness.check_gfx90a [--all] [--json] [--folder FOLDER]

Needs llvm-objdump and no GPU. The exit code is 1 if a result is wrong, or if a kernel breaks a rule of the machine. On
a machine with a GPU, `frontier-llm ops check` makes the same comparison on the GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from frontier_llm.errors import FrontierError
from frontier_llm.ops.check import DTYPES, check
from frontier_llm.ops.gpu import GpuOps
from frontier_llm.ops.manifest import GPU_DIR, read_manifest
from frontier_llm.ops.prebuilt import PrebuiltKernels
from tests.cdna2.driver import SimulatedGpu


def simulate(folder: Path, dtypes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the result of each test case, with its executed code objects and its number of executed instructions."""
    gpu = SimulatedGpu()
    files = {line["sha256"]: line["file"] for line in read_manifest("gfx90a", folder)["kernels"]}
    for result in check(GpuOps(PrebuiltKernels("gfx90a", folder, gpu)), "cpu", dtypes):
        instructions: Counter[str] = Counter()
        for launch in gpu.launches:
            instructions.update(launch.counts.instructions)
        executed = {
            "files": list(dict.fromkeys(files[launch.sha256] for launch in gpu.launches)),
            "instructions": instructions.total(),
            "waits": instructions["waits"],
            "barriers": instructions["barriers"],
        }
        gpu.launches.clear()
        yield {**asdict(result), **executed, "ok": result.ok}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="fp16 and fp32 too, not only bf16")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--folder", type=Path, default=GPU_DIR / "gfx90a", help="code objects, if not the installed ones"
    )
    args = parser.parse_args(arguments)
    try:
        results = list(simulate(args.folder, list(DTYPES) if args.all else ["bf16"]))
    except FrontierError as error:
        print(f"tests.harness.check_gfx90a: error\n{error}", file=sys.stderr)
        return error.exit_code
    wrong = [result for result in results if not result["ok"]]
    if args.json:
        print(json.dumps(results, indent=1))
        return int(bool(wrong))
    print("| op | type | shape | error | of at most | code objects | instructions | waits | barriers | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for result in results:
        cells = [
            result["op"],
            result["dtype"],
            result["shape"],
            f"{result['error']:.2f}",
            f"{result['limit']:g}",
            len(result["files"]),
        ]
        cells += [result["instructions"], result["waits"], result["barriers"], "ok" if result["ok"] else "wrong"]
        print(f"| {' | '.join(map(str, cells))} |")
    for result in wrong:
        print(
            f"wrong: {result['op']} {result['dtype']} {result['shape']}: "
            f"{result['fault'] or 'the error is above the limit'}"
        )
    files = {file for result in results for file in result["files"]}
    print(
        f"{len(files)} code objects executed on a simulated gfx90a, forward and backward; errors in units in the "
        f"last place"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
