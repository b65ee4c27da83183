"""Runs without changes read the same samples as before positions were recorded.

`sample_order.json` was written by the program before that change. It holds the first 8 digits of the sha256 of each
sample's tokens (int64), and the losses of 8 steps. Every case is bit-equal on the machine that wrote it. Other
processors round losses differently.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from frontier_llm.config import RunConfig, load_run, phases_of
from frontier_llm.data.identity import datasets_of, wanted
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.loader import open_run
from frontier_llm.data.position import START
from frontier_llm.run import run_dir
from frontier_llm.run.signals import SignalWatcher
from frontier_llm.training import loop

BEFORE = json.loads((Path(__file__).parent / "sample_order.json").read_text())
RUN = (
    "model=llama-tiny",
    "model.sequence_length=32",
    "batch.global_batch=4",
    "batch.micro_batch=2",
    "precision.dtype=fp32",
    "optimizer.schedule=constant",
    "train.steps=8",
)
BLEND = "data.train=[{path: a, weight: 0.5}, {path: b, weight: 0.3}, {path: c, weight: 0.2}]"
CASES = {
    "synthetic": (),
    "one": ("data.train=a", "model.dropout=0.1"),
    "blend": (BLEND,),
    "twice": ("data.train=[a, b, a]", "data.seed=7"),
    "best_fit": (BLEND, "data.packing=best-fit"),
    "ramp": (BLEND, "train.phases=[{steps: 4}, {steps: 4, batch: {global_batch: 8}}]", "model.dropout=0.1"),
    "lengths": (BLEND, "train.phases=[{steps: 8}, {steps: 2, model: {sequence_length: 64}}]", "train.steps=8"),
}


def write_datasets(directory: Path) -> None:
    generator = np.random.Generator(np.random.PCG64(5))
    for name, documents in (("a", 90), ("b", 60), ("c", 30)):
        with IndexedWriter(directory / name, "u2") as writer:
            for length in generator.integers(1, 120, documents):
                writer.add_document(generator.integers(1, 250, int(length)).tolist())


def samples_of(config: RunConfig) -> list[str]:
    """Return the digests of all samples of a run."""
    datasets = datasets_of([config])
    position = START
    digests = []
    for phase in phases_of(config):
        position = position.enter(wanted(phase.config, datasets))
        samples = open_run(phase.config, position)
        row = np.empty(samples.sequence_length + 1, np.int64)
        learnt = np.empty(row.shape, np.bool_)
        for k in range(position.samples, position.samples + phase.steps * phase.config.batch.global_batch):
            samples.fill(k, row, learnt)
            digests.append(hashlib.sha256(row.astype("<i8").tobytes()).hexdigest()[:8])
        position = position.advance(phase.config.batch.global_batch, phase.steps)
    return digests


@pytest.mark.parametrize("name", CASES)
def test_unchanged_runs_read_and_lose_what_they_did(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_datasets(tmp_path)
    config = load_run("bench", [*RUN, *CASES[name], f"train.run_dir={tmp_path}/run"])
    assert samples_of(config) == BEFORE[name]["samples"]
    with SignalWatcher() as signals:
        assert loop.train(config, None, signals) == 0
    losses = [row["loss"] for row in run_dir.steps(tmp_path / "run")]
    assert losses == pytest.approx(BEFORE[name]["losses"], rel=1e-5)
