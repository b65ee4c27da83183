"""Announces how long each part of scripts/quickstart.sh takes on this machine, and prints the measured seconds.

`measure` is the first measurement: it starts one process for each rank of the quickstart, and counts the words of the
Python standard library. The seconds of all other parts follow from this measurement, from the budget of `calibrate`,
and from the step time that the planner predicts with the calibrated machine file. A part whose result exists already
counts as zero seconds.

    python -m frontier_llm.experiments.quickstart measure
    python -m frontier_llm.experiments.quickstart begin PART     # ends the part before it
    python -m frontier_llm.experiments.quickstart end
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from frontier_llm.config import RunConfig
from frontier_llm.files import write_atomically
from frontier_llm.machine.precision import load_resolved
from frontier_llm.planner.predict import predict
from frontier_llm.run.complete import newest_complete
from frontier_llm.tables import aligned
from frontier_llm.units import format_seconds, strict_json

RANKS = 4
BUDGET_S = 10.0  # budget of `calibrate`, without the start of the ranks
RUN_DIR = Path("runs/quickstart")
OTHER_RUN_DIR = Path("runs/quickstart-tp2-pp2")
MACHINE = RUN_DIR / "machine.yaml"
PLANNED = RUN_DIR / "planned.yaml"
DATA = Path("data/stdlib/validation.idx")  # the last file that `data stdlib` writes
STATE = RUN_DIR / "seconds.json"
START = "import frontier_llm.training.loop"  # program that only imports the modules that a rank imports

# Times of the quickstart's parts, relative to the times measured at its start (`State.start_s`, `State.text_s`). The
# ratios were measured on two idle AVX-512 cores.
TEXTS_PER_DATA = 8.0  # time of `data stdlib` / time of `count_words`
STARTS_PER_PLAN = 0.4  # time of `plan` / time of the ranks' imports; the planner does not import torch
STARTS_PER_TRAINING = 1.4  # time of the launcher's checks and the ranks' start / time of the ranks' imports.
# Time of three commands on one rank (loss comparison, text sample and report) / time of the ranks' imports
STARTS_PER_REPORT = 0.7
FORWARD_SHARE = 1 / 3  # time of an evaluation relative to a step, which also has a backward pass
SAVE_S = 1.5  # time of one save of a checkpoint


@dataclass
class QuickstartPart:
    """One part of the quickstart: the time that was announced, and its begin and end as seconds since the epoch."""

    name: str
    announced_s: float
    begin_s: float
    end_s: float | None = None

    @property
    def measured_s(self) -> float:
        """Time from begin to end."""
        return (self.end_s or self.begin_s) - self.begin_s


@dataclass
class State:
    """First measurement, and the parts so far."""

    start_s: float  # time of all ranks' imports, which start at the same time
    text_s: float  # time of `count_words`
    parts: list[QuickstartPart] = field(default_factory=list)

    @property
    def training_start_s(self) -> float:
        """Time from the command to the first step."""
        return STARTS_PER_TRAINING * self.start_s

    def step_error(self) -> float:
        """Return the measured time over the announced time of all steps trained so far. 1 before the first training."""
        ended = [part for part in self.parts if part.name.startswith("training") and part.end_s is not None]
        steps_s = sum(part.announced_s - self.training_start_s for part in ended)
        if steps_s <= 0:
            return 1.0
        return max(sum(part.measured_s - self.training_start_s for part in ended) / steps_s, 0.1)


def measure() -> State:
    """Return the first measurement.

    The processes are first started once without counting the time, because that start reads torch's files from the
    disk.
    """
    command = [sys.executable, "-c", START]
    subprocess.run(command, check=True)  # noqa: S603 our own interpreter, no shell
    begin_s = time.monotonic()
    processes = [subprocess.Popen(command) for _ in range(RANKS)]  # noqa: S603 our own interpreter, no shell
    exit_codes = [process.wait() for process in processes]
    if any(exit_codes):
        raise SystemExit("a rank cannot import frontier_llm: see the error above")
    start_s = time.monotonic() - begin_s
    begin_s = time.monotonic()
    count_words(2**23)
    return State(start_s, time.monotonic() - begin_s)


def count_words(size_bytes: int) -> Counter[str]:
    """Count the words in the first `size_bytes` bytes of the standard library."""
    counts: Counter[str] = Counter()
    for path in sorted(Path(json.__file__).parents[1].glob("**/*.py")):
        content = path.read_bytes()[:size_bytes]
        counts.update(re.findall(r"\w+", content.decode("utf-8", "replace")))
        size_bytes -= len(content)
        if size_bytes <= 0:
            break
    return counts


def expected_s(name: str, state: State) -> float:
    """Return the time that a part will take, without the results that exist already.

    Raises KeyError for an unknown part.
    """
    parts = {
        "data": lambda: 1.0 if DATA.exists() else TEXTS_PER_DATA * state.text_s,
        "calibrate": lambda: 0.0 if MACHINE.exists() else state.training_start_s + BUDGET_S,
        "plan": lambda: STARTS_PER_PLAN * state.start_s,
        "training 1": lambda: training_s(load_resolved(str(PLANNED), [f"train.run_dir={RUN_DIR}"]), state),
        "training 2": lambda: training_s(load_resolved("quickstart", [f"train.run_dir={OTHER_RUN_DIR}"]), state),
        "report": lambda: STARTS_PER_REPORT * state.start_s,
    }
    return parts[name]()


def training_s(config: RunConfig, state: State) -> float:
    """Return the time of a run: its start, remaining steps, evaluations and saves.

    A step takes the planner's prediction, corrected by its error for the run that was trained before.
    """
    done = newest_complete(Path(config.train.run_dir) / "checkpoints") or 0
    steps = max(0, int(config.train.steps) - done)
    if not steps:
        return state.training_start_s
    step_s = predict(config, RANKS, str(MACHINE)).step_time_s
    evaluation_s = FORWARD_SHARE * step_s * config.train.eval_samples / config.batch.global_batch
    evaluations = 2  # one evaluation before the first step, and one after the last step
    saves = steps // config.train.save_interval + 1
    work_s = steps * step_s + evaluations * evaluation_s + saves * SAVE_S
    return state.training_start_s + work_s * state.step_error()


def table(parts: Sequence[QuickstartPart]) -> str:
    """Return the announced and measured seconds of all parts, and their sums."""
    rows = [(part.name, f"{part.announced_s:.0f}", f"{part.measured_s:.0f}") for part in parts]
    announced_s = sum(part.announced_s for part in parts)
    measured_s = sum(part.measured_s for part in parts)
    rows.append(("all", f"{announced_s:.0f}", f"{measured_s:.0f}"))
    return aligned(("part", ">announced s", ">measured s"), rows)


def load() -> State:
    """Return the state that the last call has written."""
    content = json.loads(STATE.read_text(encoding="utf-8"))
    parts = [QuickstartPart(**part) for part in content.pop("parts")]
    return State(**content, parts=parts)


def main(words: Sequence[str]) -> None:
    """Execute `measure`, `begin PART` or `end`, and write the state."""
    if words == ["measure"]:
        state = measure()
        STATE.parent.mkdir(parents=True, exist_ok=True)
    else:
        state = load()
        now_s = time.time()
        if state.parts:
            state.parts[-1].end_s = now_s
        if words == ["end"]:
            print(table(state.parts))
        else:
            _, name = words
            announced_s = expected_s(name, state)
            state.parts.append(QuickstartPart(name, announced_s, now_s))
            print(f"about {format_seconds(round(announced_s))}")
    write_atomically(STATE, strict_json(asdict(state), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
