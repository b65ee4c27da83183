"""Observers of a run: a plugin's observer on every rank, the profiler's trace, Weights & Biases and MLflow without a
network.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.cli.main import main
from frontier_llm.config import load_run
from frontier_llm.training import observers
from frontier_llm.training.observers.trackers import MLFLOW_MAX_VALUE, Tracker

PLUGIN = """
import json
from pathlib import Path
from frontier_llm.training import observers

class Diary(observers.Observer):
    def __init__(self, config):
        self.path = Path(config.train.run_dir)
        self.lines = []

    def record(self, kind, step, values):
        self.lines.append([kind, step])

    def before_step(self, state):
        self.lines.append(["before", state.current_step])

    def after_step(self, state, result):
        self.rank = state.mesh.world.rank
        self.lines.append(["after", state.current_step, result.loss])

    def close(self):
        (self.path / f"diary_{self.rank}.json").write_text(json.dumps(self.lines))

observers.register("diary", Diary, every_rank=True)
"""


def run_file(tmp_path: Path, **train: Any) -> str:
    path = tmp_path / "run.yaml"
    settings = {
        "run_dir": str(tmp_path / "run"),
        "steps": 3,
        "device": "cpu",
        "tensorboard": False,
        "eval_samples": 2,
        **train,
    }
    content = {
        "model": "llama-tiny",
        "batch": {"global_batch": 4},
        "data": {"validation": "synthetic"},
        "train": settings,
    }
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.thorough
def test_a_plugin_s_observer_and_a_profile_on_two_ranks(tmp_path: Path) -> None:
    plugin = tmp_path / "diary.py"
    plugin.write_text(PLUGIN)
    file = run_file(tmp_path, observers=["diary"], profile={"steps": "2-3", "ranks": [1]})
    assert main(["train", file, "parallel.pipeline=2", f"plugins=[{plugin}]"]) == 0
    first, second = (json.loads((tmp_path / "run" / f"diary_{rank}.json").read_text()) for rank in (0, 1))
    assert [line for line in second if line[0] == "before"] == [["before", step] for step in range(3)]
    assert {line[0] for line in second} == {"before", "after"}, "only rank 0 writes records"
    assert [line for line in first if line[0] == "after"] == [line for line in second if line[0] == "after"], (
        "all ranks see one loss"
    )
    assert [line for line in first if line[0] not in ("before", "after")] == [
        ["start", 0],
        ["data", 0],
        ["evaluation", 0],
        ["step", 1],
        ["step", 2],
        ["step", 3],
        ["memory", 3],
        ["evaluation", 3],
        ["save", 3],
        ["communication", 3],
        ["communication", 3],
    ]
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "steps_2-3_rank_00001.json.gz"
    names = [event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    for phase in ("forward of microbatch 3, virtual stage 1", "backward of microbatch 0, virtual stage 1", "optimizer"):
        assert names.count(phase) == 2, phase  # once in each step


def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", full)
    assert main(["train", run_file(tmp_path, steps=2, profile={"steps": "1"})]) == 0
    assert "the profile of steps 1 is lost: No space left on device" in capsys.readouterr().err


def told(config_file: str, name: str, *overrides: str) -> observers.Observer:
    """Write the records of one attempt. The second call acts as the attempt after a resume."""
    (observer,) = observers.make(load_run(config_file, [f"train.observers=[{name}]", *overrides]), 0)
    observer.record("start", 0, {"layout": {}})
    observer.record("step", 1, {"loss": 3.5, "phases_s": {"forward": 0.25, "tp (blocked)": 0.125}, "skipped": False})
    observer.close()
    return observer


@pytest.mark.thorough  # MLflow's database takes many seconds to set up
def test_mlflow_goes_on_with_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")  # a server may be configured so
    from mlflow.tracking import MlflowClient

    many_sets = "data.validation=" + json.dumps({f"set{number}": "synthetic" for number in range(400)})
    assert len(many_sets) > MLFLOW_MAX_VALUE
    first, _ = (told(run_file(tmp_path), "mlflow", many_sets) for _ in range(2))
    run_id = first._run_id  # type: ignore[attr-defined]
    client = MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
    assert [point.value for point in client.get_metric_history(run_id, "step/loss")] == [3.5, 3.5]
    run = client.get_run(run_id)
    assert run.data.metrics["step/phases_s/forward"] == 0.25 and run.data.metrics["step/phases_s/tp blocked"] == 0.125
    assert run.data.params["batch.global_batch"] == "4"


@pytest.mark.parametrize("failing", ["_open", "_record", "_close"])
def test_an_error_of_a_tracker_does_not_end_the_run(
    tmp_path: Path, failing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: object) -> None:
        raise LookupError("no answer")

    methods = {name: lambda *_: None for name in ("_open", "_record", "_close")} | {failing: unreachable}
    server = type("Server", (Tracker,), {"name": "Server", **methods})(load_run(run_file(tmp_path), []))
    server.record("step", 1, {})
    server.record("step", 2, {})
    server.close()
    when = {"_open": "the start", "_record": "step 1", "_close": "the end of the run"}[failing]
    expected = f"the record in Server ends at {when}: LookupError: no answer; metrics.jsonl is still written"
    messages = capsys.readouterr().err
    assert expected in messages and messages.count("the record in Server ends") == 1, "the server is not called again"


@pytest.mark.thorough
def test_weights_and_biases_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (tmp_path / "run").mkdir()
    told(run_file(tmp_path), "wandb")
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    # A process of W&B writes the file, on a busy machine after `close`. pytest's time limit ends the wait.
    while kept.stat().st_size <= 500:
        time.sleep(0.05)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.observers=[wand]"], "did you mean 'wandb'"),
        (["train.profile={steps: 2-9}"], "ends after the last step of the run, 3"),
        (["train.profile={steps: 1, ranks: [4]}"], "the run has no rank 4"),
        (["train.profile={steps: 3-2}"], "write 2-3"),
    ],
)
def test_what_cannot_be_watched_is_refused(
    tmp_path: Path, overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", run_file(tmp_path), "--dry-run", *overrides]) != 0
    said = capsys.readouterr()
    assert words in said.out + said.err
