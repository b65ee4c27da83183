"""Training from Python, in child processes.

Ranks install watchdogs and signal handlers and can be killed. In child processes they do not affect the calling
process, for example a notebook, which survives every failure of a rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from signal import SIGINT, SIGKILL, Signals
from typing import Any, TextIO

from frontier_llm import errors
from frontier_llm.api.run import Run, as_table, load_run
from frontier_llm.cluster.rank_logs import failure_lines, rank_log
from frontier_llm.errors import FrontierError, Problem, RankFailure
from frontier_llm.run import run_dir as records
from frontier_llm.run.failure import forget_failure, read_failure
from frontier_llm.run.rank_env import environment, with_this_package
from frontier_llm.run.records import json_row
from frontier_llm.run.signals import EXIT_INTERRUPTED

POLL_S = 0.1  # time between two reads of the child's metrics
SHOWN_LINES = 20  # number of lines at the end of a failed rank's log that an exception shows
Step = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """Result of `train`."""

    run_dir: Path
    # one dictionary per recorded step of the run: step, loss, tokens_per_s …
    steps: list[Step] = field(repr=False)
    finished: bool  # False: the run was stopped before its last step, and the same call continues it
    checkpoint: Path | None  # newest complete checkpoint

    @property
    def losses(self) -> dict[int, float]:
        """Training loss by step, in nats per token."""
        return {row["step"]: row["loss"] for row in self.steps}

    @property
    def metrics(self) -> Any:
        """The rows of `steps` as a pandas DataFrame if pandas is installed, and as a list otherwise."""
        return as_table(self.steps)


def train(
    run: Run | str | Path | Mapping[str, Any],
    on_step: Callable[[Step], object] | None = None,
    *,
    show_progress: bool = True,
    allow_change: Sequence[str] = (),
) -> Result:
    """Train a run to its end, or continue it from its newest checkpoint. Always trains in child processes.

    `run` is a `Run`, or anything that `load_run` accepts. `on_step` is called in this process with each recorded step:
    a dictionary with `step`, `loss` and other metrics. With `on_step` every step is recorded, without it every
    `train.log_interval`-th step. If `on_step` raises an exception, the run saves and stops, and the exception is
    raised here. `allow_change` names keys that may differ from the checkpoint although they change the mathematics.

    Ctrl-C makes the run save and stop, and `train` then returns a result that is not finished. A second Ctrl-C ends the
    ranks at once and raises KeyboardInterrupt. If this process dies, the ranks save and end.

    Raises FrontierError if the run is refused, and RankFailure, with the name of the rank and the end of its log, if a
    rank fails.
    """
    run = run if isinstance(run, Run) else load_run(run)
    if on_step is not None:
        run = run.with_({"train.log_interval": 1})
    bar = _Bar(sys.stderr, run.config.train.steps) if show_progress else None
    with tempfile.TemporaryDirectory() as folder:
        child = _Child(run, Path(folder), allow_change)
        code = child.wait(_Rows(run.run_dir / "metrics.jsonl"), on_step, bar)
        if bar is not None:
            bar.close()
        if code not in (0, EXIT_INTERRUPTED):
            raise child.error(code)
    newest = records.latest_step(run.run_dir)
    checkpoint = run.run_dir / "checkpoints" / f"step_{newest:08d}" if newest else None
    return Result(run.run_dir, records.steps(run.run_dir), code == 0, checkpoint)


class _Child:
    """The process that trains one rank, or starts several."""

    def __init__(self, run: Run, folder: Path, allow_change: Sequence[str]) -> None:
        self.run = run
        self.report = folder / "refusal.json"
        self.log = folder / "output.log"
        forget_failure(run.run_dir)
        run_file = run.write(folder / "run.yaml")
        command = [sys.executable, "-P", "-m", "frontier_llm.api.child", str(os.getpid()), str(self.report)]
        changes = [word for key in allow_change for word in ("--allow-change", key)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603 our own interpreter, no shell
                [*command, "train", str(run_file), *changes],
                env=with_this_package(environment()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C does not reach the child: `wait` sends a signal instead
            )

    def wait(self, rows: _Rows, on_step: Callable[[Step], object] | None, bar: _Bar | None) -> int:
        """Wait for the end of the process, report new steps, and return the exit code."""
        interrupted = False
        failed: BaseException | None = None
        while True:
            try:
                ended = self.process.poll() is not None
                for row in rows.new():
                    if bar is not None:
                        bar.show(row)
                    if on_step is not None and failed is None:
                        on_step(row)
                if ended:
                    break
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                if interrupted:
                    self.process.send_signal(SIGKILL)  # the ranks end with this child process
                    self.process.wait()
                    raise
                interrupted = True
                self.process.send_signal(SIGINT)
            except Exception as error:
                failed = error
                self.process.send_signal(SIGINT)
        if failed is not None:
            raise failed
        code = self.process.returncode
        if code < 0:
            code = 128 - code
        # a process that has not installed its signal handlers yet is ended by SIGINT itself
        return EXIT_INTERRUPTED if interrupted and code == 128 + SIGINT else code

    def error(self, code: int) -> FrontierError:
        """Return the exception for an exit code that is not 0: the refusal, or the first failed rank."""
        if self.report.is_file():
            content = json.loads(self.report.read_text(encoding="utf-8"))
            problems = [Problem(**problem) for problem in content["problems"]]
            kind: type[FrontierError] = getattr(errors, content["kind"], FrontierError)
            return kind(problems)
        record = read_failure(self.run.run_dir)
        own = "killed by " + Signals(code - 128).name if code > 128 else f"exit code {code}"
        if record is None:
            return RankFailure("\n".join([own, *failure_lines(self.log)[-SHOWN_LINES:]]), where="rank 0")
        logs = self.run.run_dir / "logs"
        log = rank_log(logs, record.rank or 0)
        lines = list(record.message) or (failure_lines(log) if log.is_file() else failure_lines(self.log))
        what = "\n".join([record.describe(), *lines[-SHOWN_LINES:]])
        return RankFailure(what, f"the logs of all ranks are in {logs}", where=f"rank {record.rank}")


class _Rows:
    """The new rows of a metrics file that another process writes. Rows that the file had when this object was made are
    left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        with suppress(FileNotFoundError), FileIO(path) as file:
            self.offset = records.end_of_lines(file)  # the run removes an incomplete last line

    def new(self) -> list[Step]:
        """Return the training rows since the last call. A line that is not complete yet is left for the next call."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            if self.offset > os.fstat(file.fileno()).st_size:
                self.offset = 0  # another file has replaced it
            file.seek(self.offset)
            text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self.offset += len(complete)
            rows = filter(records.is_row, filter(None, map(json_row, complete.splitlines())))
            return [row for row in rows if row.get("kind", "step") == "step" and "loss" in row]
        return []


class _Bar:
    """Progress on one line of a terminal or of a notebook's cell."""

    def __init__(self, out: TextIO, steps: int) -> None:
        self.out = out
        self.steps = steps
        self.shown = out.isatty() or "ipykernel" in sys.modules
        self.any = False

    def show(self, row: Step) -> None:
        """Show the number and the loss of the newest step."""
        if not self.shown:
            return
        done = row["step"]
        width = 24
        filled = width * done // max(self.steps, 1)
        speed = row.get("tokens_per_s")
        rate = f", {speed:,.0f} tokens/s" if speed else ""
        loss = row["loss"]
        text = f"\r[{'=' * filled:<{width}}] step {done} of {self.steps}, loss {loss or float('nan'):.4f}{rate}  "
        self.out.write(text)
        self.out.flush()
        self.any = True

    def close(self) -> None:
        """End the line if one was shown."""
        if self.any:
            self.out.write("\n")
