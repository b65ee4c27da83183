"""Program of scripts/first_gpu.sh. Runs each stage in its own process group with a time limit, and writes the page.
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import page
import wheels

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Stage:
    """A stage of the program. `limit_s` is its time limit if all stages take nine minutes, and scales with
    --minutes.
    """

    name: str
    limit_s: float
    about: str


# Most important stages first, because the time may run out.
STAGES = (
    Stage("machine", 30, "driver, versions, devices"),
    Stage(
        "build",
        150,
        "C++ parts and kernels; kernels that the driver refuses are built again with this machine's assembler",
    ),
    Stage("checks", 60, "every op against float64"),
    Stage("ceilings", 30, "matrix products and copies, by torch"),
    Stage("ops", 80, "times of each op, of eager torch and of the best SDPA back-end"),
    Stage("attention", 40, "fastest attention back-end here, as a table for ops.attention_table"),
    Stage("step_1b", 60, "time of a 1B model's step; two runs must have the same losses"),
    Stage("step_3b", 60, "a 3B model's step"),
    Stage("products", 120, "the models' matrix products by shape, on all devices at once for a minute"),
    Stage("reference", 60, "100 steps against the CPU reference"),
    Stage("families", 60, "small models of every family against the CPU"),
    Stage("waits", 30, "number of times that the host waits for the device in a step"),
    Stage("restart", 60, "a stopped and resumed run against an uninterrupted one"),
    Stage("hang_test", 170, "modes of comm.in_flight that do not hang here, and the memory of the communicators"),
    Stage("layout", 90, "losses of tensor x pipeline x data parallelism, compared with one device"),
    Stage("addresses", 90, "every op under an address checker"),
    Stage("compiled", 90, "times of the plain torch ops, compiled by torch.compile"),
)
GRACE_S = 5.0  # between SIGTERM and SIGKILL


def run_limited(command: list[str], limit_s: float, log: Path, environment: dict[str, str]) -> str:
    """Run a command. Returns '' or the fault. A late command is ended with all its children, which would occupy the
    GPU.
    """
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"not ready after {limit_s:.0f} s"
        # Also ends processes that a finished stage left behind. An interrupt from the keyboard does not reach another
        # session.
        finally:
            _end_group(process)
    return f"exit code {code}" if code else ""


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + GRACE_S
        while number == signal.SIGTERM and time.monotonic() < deadline:
            if process.poll() is not None:
                break
            time.sleep(0.05)


def run_stage(stage: Stage, limit_s: float, out: Path, python: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run one stage. If it fails, the fault is added to the results that it has written before."""
    result_path = out / f"{stage.name}.json"
    log = out / "logs" / f"{stage.name}.log"
    result_path.unlink(missing_ok=True)
    partial = out / f"{stage.name}.partial.json"
    partial.unlink(missing_ok=True)
    begin = time.monotonic()
    command = [python, str(ROOT / "scripts" / "first_gpu" / "stages.py"), stage.name, str(out)]
    fault = run_limited(command, limit_s, log, environment) if limit_s > 0 else "no time was left for it"
    result = _read(result_path)
    if fault:
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:] if log.is_file() else []
        result = {
            **result,
            "state": "failed" if limit_s > 0 else "skipped",
            "why": fault,
            "log_tail": tail,
            "until_then": _read(partial),
        }
    result = {
        "stage": stage.name,
        "about": stage.about,
        **result,
        "seconds": round(time.monotonic() - begin, 1),
        "limit_s": round(limit_s),
    }
    result_path.write_text(json.dumps(result, indent=1), encoding="utf-8")
    partial.unlink(missing_ok=True)
    return result


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def main() -> int:
    """Return the exit code: 0 if no stage failed."""
    parser = argparse.ArgumentParser(prog="scripts/first_gpu.sh", description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "first_gpu",
        metavar="DIR",
        help="folder of the results (default: %(default)s)",
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="folder with wheels of packages that this Python may lack"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="time limit in minutes for all stages together (default: 9)"
    )
    parser.add_argument(
        "--stages",
        default=",".join(stage.name for stage in STAGES),
        help="run only these stages, comma-separated (default: all)",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run every stage on the CPU or with a fake driver, in an environment without optional packages",
    )
    parser.add_argument(
        "--collect-wheels", type=Path, metavar="DIR", help="download wheels for another machine, and exit"
    )
    parser.add_argument("--python", default="3.12", help="Python version of the other machine (default: 3.12)")
    parser.add_argument(
        "--platform",
        action="append",
        default=[],
        help="platform tag of wheels that the other machine accepts; may be given several times",
    )
    args = parser.parse_args()
    if args.collect_wheels:
        return wheels.collect(args.collect_wheels, args.python, args.platform)
    unknown = set(args.stages.split(",")) - {stage.name for stage in STAGES}
    if unknown:
        parser.error(
            f"no stage is called {', '.join(sorted(unknown))}; the stages are "
            f"{', '.join(stage.name for stage in STAGES)}"
        )

    begin = time.monotonic()
    out = args.out.absolute()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    python = sys.executable
    wheels_folder = args.wheels
    if args.rehearse:
        if wheels_folder is None:
            wheels_folder = out / "wheels"
            wheels.from_installed(wheels.LACKING, wheels_folder)
        python = str(wheels.bare_environment(out / "bare"))
        if not wheels.imports(python, out / "nothing"):
            raise SystemExit("error: the rehearsal's environment is not bare: it imports pydantic")
        used = wheels.unpack(wheels_folder, wheels.LACKING, out / "site")
    else:
        used = wheels.provide(wheels_folder, out / "site", python)
    path = [str(out / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")] if not args.rehearse else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    environment |= {"FIRST_GPU_DEVICE": "rehearsal"} if args.rehearse else {}
    environment.pop("FRONTIER_LLM_LAUNCHER", None)
    for name in [name for name in environment if name.startswith(("SLURM_", "PMI_", "OMPI_"))]:
        environment.pop(name)  # the stages start ranks themselves, not through the launcher of this process

    total_s = 60 * args.minutes
    results = []
    for stage in STAGES:
        if stage.name in args.stages.split(","):
            left_s = total_s - (time.monotonic() - begin)
            result = run_stage(stage, min(stage.limit_s * args.minutes / 9, left_s - GRACE_S), out, python, environment)
            results.append(result)
            print(
                f"{stage.name:<10} {result['state']:<8} {result['seconds']:6.1f} s  {result.get('why', '')}",
                file=sys.stderr,
                flush=True,
            )
            if stage.name == "machine" and result["state"] == "failed":
                break
    summary = {
        "rehearsal": args.rehearse,
        "wheels": used,
        "seconds": round(time.monotonic() - begin, 1),
        "stages": results,
    }
    (out / "page.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    text, machine = page.render(summary)
    (out / "page.md").write_text(text, encoding="utf-8")
    if machine:
        (out / "machine.yaml").write_text(machine, encoding="utf-8")
    print(text)
    return int(any(result["state"] == "failed" for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
