"""Starts complete training runs with the command that a user would use, and injects a fault into them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

START_LIMIT_S = 200.0  # time until a run has done its first steps; imports take about 12 s on an idle machine

RUN = """
model: llama-tiny
batch: {{global_batch: 8, micro_batch: 2}}
optimizer: {{lr: 1.0e-3, warmup_steps: 2, decay_steps: 60}}
precision: {{dtype: fp32}}
train: {{run_dir: {run_dir}, steps: {steps}, save_interval: {save_interval}, device: cpu, tensorboard: false, timeout_s: {timeout_s}}}
"""  # noqa: E501


@dataclass
class Run:
    """A run directory and the command that starts the run."""

    directory: Path
    steps: int = 12
    save_interval: int = 3
    timeout_s: float = 60.0
    overrides: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """Write the run file and return the command line."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "run.yaml"
        settings = {
            "run_dir": self.directory / "run",
            "steps": self.steps,
            "save_interval": self.save_interval,
            "timeout_s": self.timeout_s,
        }
        path.write_text(RUN.format(**settings))
        return [sys.executable, "-m", "frontier_llm.cli.main", "train", str(path), *self.overrides]

    @staticmethod
    def environment(failpoints: str = "") -> dict[str, str]:
        """Return the environment variables of the run's processes. `failpoints` names the faults to inject."""
        return {**os.environ, "FRONTIER_LLM_FAILPOINTS": failpoints, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def start(self, failpoints: str = "") -> subprocess.Popen[str]:
        """Start the run in the background."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.command, env=self.environment(failpoints), stdout=pipe, stderr=subprocess.STDOUT, text=True
        )

    def finish(self, failpoints: str = "", limit_s: float = 240.0) -> tuple[int, str, float]:
        """Run to the end. Returns (exit code, output, seconds)."""
        started = time.monotonic()
        done = subprocess.run(
            self.command, env=self.environment(failpoints), capture_output=True, text=True, timeout=limit_s, check=False
        )
        return done.returncode, done.stdout + done.stderr, time.monotonic() - started

    @property
    def run_dir(self) -> Path:
        """Folder with the run's records and checkpoints."""
        return self.directory / "run"

    def losses(self) -> dict[int, float]:
        """Return the loss by step. A repeated step must have the same loss each time."""
        found: dict[int, float] = {}
        for line in (self.run_dir / "metrics.jsonl").read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # an incomplete line, because the process was killed
            if row["kind"] == "step":
                assert found.get(row["step"], row["loss"]) == row["loss"], f"step {row['step']} had two losses"
                found[row["step"]] = row["loss"]
        return found

    def shards(self) -> dict[str, str]:
        """Return {file: sha256} of the last checkpoint: final weights and optimizer state, and the header that names
        the step.
        """
        name = (self.run_dir / "checkpoints" / "LATEST").read_text().strip()
        manifest = json.loads((self.run_dir / "checkpoints" / name / "manifest.json").read_text())
        return {shard["file"]: shard["sha256"] for shard in manifest["shards"]}

    def failure(self) -> dict[str, object]:
        """Return the content of failure.json."""
        return json.loads((self.run_dir / "failure.json").read_text())
