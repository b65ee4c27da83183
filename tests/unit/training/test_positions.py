"""Complete runs that change their data. The weights are frozen, so that a step's loss identifies the samples that it
read.

These tests fail if a position is the number of steps times the present batch, or if each blend counts its sources
separately.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from frontier_llm.checkpoint.directory import digest_line, read_manifest
from frontier_llm.cli.main import main
from frontier_llm.cluster.status import read_status
from frontier_llm.config import RunConfig, dump, load_run
from frontier_llm.data import samples
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.position import Position
from frontier_llm.data.recorded import as_it_stands
from frontier_llm.errors import CheckpointError, ConfigError
from frontier_llm.run import run_dir
from frontier_llm.run.signals import SignalWatcher
from frontier_llm.training import loop
from frontier_llm.training.guard.skips import SpikePolicy
from frontier_llm.training.installed import input_facts
from frontier_llm.training.loop import Resume

RUN = (
    "model=llama-tiny",
    "model.sequence_length=16",
    "model.layers=1",
    "batch.global_batch=1",
    "batch.micro_batch=1",
    "precision.dtype=fp64",
    "optimizer.lr=1.0e-30",
    "optimizer.min_lr=0",
    "optimizer.schedule=constant",
    "optimizer.weight_decay=0",
    "train.save_final=true",
    "train.keep_every=1",
)
A = "{path: a, weight: 0.9}"
B = "{path: b, weight: 0.1}"
EQUAL_A = "{path: a, weight: 0.5}"
EQUAL_B = "{path: b, weight: 0.5}"


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets a, b and c with at least 1,000 tokens each."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.Generator(np.random.PCG64(3))
    for name in "abc":
        with IndexedWriter(tmp_path / name, "u2") as writer:
            for length in generator.integers(10, 60, 40):
                writer.add_document(generator.integers(1, 250, int(length)).tolist())


def trained(directory: Path, steps: int, *words: str, allow: Sequence[str] = ()) -> list[float]:
    """Train up to `steps` and return the loss of each step of the run so far."""
    config = load_run("bench", [*RUN, *words, f"train.run_dir={directory}", f"train.steps={steps}"])
    with SignalWatcher() as signals:
        assert loop.train(config, None, signals, Resume(allow_changes=tuple(allow))) == 0
    return [row["loss"] for row in run_dir.steps(directory)]


def position(directory: Path, step: int) -> Position:
    progress = read_manifest(directory / "checkpoints" / f"step_{step:08}")[0].progress
    assert progress.position is not None and progress.consumed_samples == progress.position.samples
    return progress.position


def close(losses: Sequence[float], expected: Sequence[float]) -> None:
    assert losses == pytest.approx(expected, rel=1e-9, abs=0)


def test_another_batch_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    """Regression: the batch grew from 1 to 2 after step 3.

    Step 4 then read samples 6 and 7, and samples 3 to 5 were never read.
    """
    single = trained(tmp_path / "single", 11, "data.train=a")
    trained(tmp_path / "run", 3, "data.train=a")
    losses = trained(tmp_path / "run", 7, "data.train=a", "batch.global_batch=2", allow=["batch.global_batch"])
    close(losses[:3], single[:3])
    close(losses[3:], [(single[k] + single[k + 1]) / 2 for k in (3, 5, 7, 9)])
    assert position(tmp_path / "run", 7).samples == 11 and position(tmp_path / "run", 7).tokens == 11 * 16
    losses = trained(
        tmp_path / "phases", 7, "data.train=a", "train.phases=[{steps: 3}, {steps: 4, batch: {global_batch: 2}}]"
    )
    close(losses, trained(tmp_path / "run", 7, "data.train=a", "batch.global_batch=2"))


def test_a_run_in_tokens_whose_batch_doubled_ends_after_its_tokens(tmp_path: Path) -> None:
    """Regression: the run's length was counted with the present batch from step 0 on, so that no step was left to
    train.
    """
    words = ("data.train=a", "train.steps=192 tokens", "optimizer.schedule=cosine", f"train.run_dir={tmp_path}/run")
    trained(tmp_path / "run", 6, "data.train=a", "optimizer.decay_steps=12", "optimizer.schedule=cosine")
    config = load_run("bench", [*RUN, *words, "batch.global_batch=2", "optimizer.decay_steps=12"])
    assert config.train.steps == 6 and as_it_stands(config).train.steps == 9
    with SignalWatcher() as signals:
        assert loop.train(config, None, signals, Resume(allow_changes=("batch.global_batch", "train.steps"))) == 0
    assert position(tmp_path / "run", 9).tokens == 192
    status = read_status(tmp_path / "run")
    assert (status.step, status.steps, status.damage, status.tokens) == (9, 9, (), 192)
    assert nothing_left(tmp_path / "run", config)


def nothing_left(directory: Path, config: RunConfig) -> bool:
    return run_dir.end(directory, as_it_stands(config).train.steps) == "finished"


def test_other_weights_read_each_source_on(tmp_path: Path) -> None:
    """Regression: a blend with other weights applied the run's sample number to each source.

    Some samples were read twice and others never.
    """
    of_a, of_b = (trained(tmp_path / f"only_{name}", 24, f"data.train={name}") for name in "ab")
    trained(tmp_path / "run", 10, f"data.train=[{A}, {B}]")
    after = trained(tmp_path / "run", 24, f"data.train=[{EQUAL_A}, {EQUAL_B}]", allow=["data.train"])
    phases = f"train.phases=[{{steps: 10}}, {{steps: 14, data: {{train: [{EQUAL_A}, {EQUAL_B}]}}}}]"
    assert trained(tmp_path / "phases", 24, f"data.train=[{A}, {B}]", phases) == after
    # Dataset `a` gives the same samples in the same order as a run on `a` alone. The samples of `b`, the second
    # dataset, have a fixed order, which differs from a run on `b` alone.
    assert set(of_a[:16]) <= set(after) and len(set(after)) == 24 and not set(of_b) & set(after)
    streams = position(tmp_path / "run", 24).streams
    assert [stream.taken for stream in streams] == [16, 8]
    assert [stream.tokens_read for stream in streams] == [256, 128]


def test_a_phase_with_other_weights_goes_on_in_its_sources(tmp_path: Path) -> None:
    """Regression: about a fifth of an epoch was never read, and a fifth was read twice."""
    of_a = trained(tmp_path / "only_a", 30, "data.train=a")
    phases = "train.phases=[{steps: 10}, {steps: 20, data: {train: [a, b]}}, {steps: 10}]"
    losses = trained(tmp_path / "phases", 40, "data.train=a", phases)
    assert losses[:10] == of_a[:10] and losses[-10:] == of_a[20:30]
    assert [loss for loss in losses if loss in set(of_a)] == of_a
    assert [stream.taken for stream in position(tmp_path / "phases", 40).streams] == [30, 10]


def test_phases_by_hand_are_phases_of_the_run_file(tmp_path: Path) -> None:
    phases = (
        "train.phases=[{steps: 4}, {steps: 4, model: {sequence_length: 32}}, {steps: 4, data: {train: [b, a]}, "
        "batch: {global_batch: 2}}]"
    )
    whole = trained(tmp_path / "whole", 12, "data.train=a", phases)
    trained(tmp_path / "run", 4, "data.train=a")
    trained(tmp_path / "run", 8, "data.train=a", "model.sequence_length=32", allow=["model.sequence_length"])
    keys = ("model.sequence_length", "data.train", "batch.global_batch")
    losses = trained(tmp_path / "run", 12, "data.train=[b, a]", "batch.global_batch=2", allow=keys)
    assert losses == whole
    assert position(tmp_path / "run", 12) == position(tmp_path / "whole", 12)
    assert [(s.path, s.sequence_length, s.taken) for s in position(tmp_path / "run", 12).streams] == [
        ("a", 16, 8),
        ("a", 32, 4),
        ("b", 16, 4),
    ]
    # The phases are added to a run that had none. The past steps stay the same.
    trained(tmp_path / "late", 4, "data.train=a")
    assert trained(tmp_path / "late", 12, "data.train=a", phases, allow=["train.phases"]) == whole


def test_a_source_in_front_leaves_the_others_in_their_order(tmp_path: Path) -> None:
    """Regression: a source's order depended on its place in the list."""
    alone = trained(tmp_path / "alone", 12, "data.train=[a, b]")
    trained(tmp_path / "run", 6, "data.train=[a, b]")
    losses = trained(tmp_path / "run", 15, "data.train=[c, a, b]", allow=["data.train"])
    assert losses[:6] == alone[:6]
    of_before = [loss for loss in losses[6:] if loss in set(alone)]
    assert sorted(of_before) == sorted(alone[6:12]) and len(set(losses)) == 15
    assert [(stream.path, stream.taken) for stream in position(tmp_path / "run", 15).streams] == [
        ("a", 6),
        ("b", 6),
        ("c", 3),
    ]


def test_another_seed_of_the_data_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "run", 2, "data.train=a")
    with pytest.raises(CheckpointError, match=r"data\.seed: 1234 → 7 \(each source keeps the order"):
        trained(tmp_path / "run", 4, "data.train=a", "data.seed=7", allow=["data"])


def test_a_moved_dataset_and_equal_proportions_are_no_change(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 8, "data.train=[a, b]")
    trained(tmp_path / "run", 4, "data.train=[a, b]")
    (tmp_path / "moved").mkdir()
    for suffix in ("bin", "idx"):
        (tmp_path / f"a.{suffix}").rename(tmp_path / "moved" / f"a.{suffix}")
    assert trained(tmp_path / "run", 8, "data.train=[{path: moved/a, weight: 3}, {path: b, weight: 3}]") == whole


def test_a_position_that_cannot_be_true_stops_the_load(tmp_path: Path) -> None:
    trained(tmp_path / "run", 2, "data.train=a")
    trained(tmp_path / "run", 4, "data.train=a")
    path = tmp_path / "run" / "checkpoints" / "step_00000004" / "manifest.json"
    content = json.loads(path.read_text())
    for change, what in (({"taken": 5}, "consumed_samples is 4"), ({"taken": -1}, "progress.position.streams.0.taken")):
        content["progress"]["position"]["streams"][0] |= change
        path.write_text(json.dumps(content))
        (path.parent / "manifest.sha256").write_bytes(digest_line(path.read_bytes()))
        before = path.read_bytes()
        with pytest.raises(CheckpointError, match=what):
            trained(tmp_path / "run", 6, "data.train=a")
        assert path.read_bytes() == before


def resumed(directory: Path, steps: int, resume: Resume, *words: str) -> list[float]:
    config = load_run("bench", [*RUN, *words, f"train.run_dir={directory}", f"train.steps={steps}"])
    with SignalWatcher() as signals:
        assert loop.train(config, None, signals, resume) == 0
    return [row["loss"] for row in run_dir.steps(directory)]


def decisions(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / "decisions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("phases", "spike_at", "left_out"),
    [
        pytest.param("[]", 7, 4, id="long after the checkpoint"),
        pytest.param("[]", 5, 3, id="soon after the checkpoint"),
        pytest.param("[{steps: 6}, {steps: 6, data: {train: [b, a]}}]", 7, 4, id="in the next phase"),
        pytest.param("[{steps: 6}, {steps: 6, batch: {global_batch: 2}}]", 7, 6, id="after a larger batch"),
    ],
)
def test_a_rewind_leaves_out_the_data_of_the_spike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phases: str, spike_at: int, left_out: int
) -> None:
    """Regression: only the samples directly after the checkpoint were left out, and the spike was read again."""
    words = ("data.train=a", f"train.phases={phases}", "train.save_interval=4")
    words += ("guard.spike_action=rewind", "guard.rewind_steps=1", "guard.rewind_skip_steps=3")
    whole = trained(tmp_path / "whole", 12, *words)
    monkeypatch.setattr(SpikePolicy, "is_spike", lambda self, loss, norm: loss == whole[spike_at])
    losses = trained(tmp_path / "run", 12, *words)
    assert losses[:4] == whole[:4] and not set(losses[4:]) & set(whole[4 : spike_at + 1])
    rewind = {"step": 4, "action": "rewind", "spike_at": spike_at, "left_out_samples": left_out}
    assert decisions(tmp_path / "run") == [rewind]
    assert position(tmp_path / "run", 12).samples_left_out == left_out


def test_samples_are_left_out_and_recorded(tmp_path: Path) -> None:
    single = trained(tmp_path / "whole", 12, "data.train=a")
    trained(tmp_path / "run", 4, "data.train=a")
    assert resumed(tmp_path / "run", 6, Resume(leave_out=5), "data.train=a")[4:] == single[9:11]
    assert trained(tmp_path / "run", 7, "data.train=a")[6:] == single[11:12]
    assert decisions(tmp_path / "run") == [{"step": 4, "action": "leave out", "samples": 5}]
    (stream,) = position(tmp_path / "run", 7).streams
    assert (stream.taken, stream.left_out, stream.tokens_read) == (12, ((4, 5),), 7 * 16)


def test_checks_and_indices_before_a_job_begin_at_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step on, the run would read more than one epoch of b, and b would have another order."""
    monkeypatch.setattr(samples, "CACHE_FROM_DOCUMENTS", 1)
    ten = ("batch.global_batch=10", "batch.micro_batch=10", "data.cache_dir=cache")
    trained(tmp_path / "run", 4, "data.train=a", *ten)
    words = ("data.train=[{path: b, max_epochs: 1}]", *ten)
    overrides = [*RUN, *words, f"train.run_dir={tmp_path}/run", "train.steps=10"]
    facts = input_facts(dump(load_run("bench", overrides)))
    assert facts is not None and facts.problems == ()
    assert main(["data", "index", "bench", *overrides]) == 0
    monkeypatch.setattr(samples.EpochIndex, "_build", lambda *_: pytest.fail("was not built ahead"))
    assert len(trained(tmp_path / "run", 10, *words, allow=["data.train"])) == 10


def test_a_source_is_restarted_in_another_order(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", 8, "data.train=[a, b]")
    trained(tmp_path / "run", 4, "data.train=[a, b]")
    losses = resumed(tmp_path / "run", 8, Resume(restart_sources=("a",)), "data.train=[a, b]")
    assert len(set(losses[4:]) & set(alone[4:])) == 2  # b continued
    streams = position(tmp_path / "run", 8).streams
    assert [(stream.path, stream.taken, stream.retired) for stream in streams] == [
        ("a", 2, True),
        ("b", 4, False),
        ("a", 2, False),
    ]
    assert streams[0].order != streams[2].order
    assert decisions(tmp_path / "run") == [{"step": 4, "action": "restart source", "path": "a", "samples_taken": 2}]
    with pytest.raises(ConfigError, match=r"--restart-source: 'c' is not a dataset of this run"):
        resumed(tmp_path / "run", 9, Resume(restart_sources=("c",)), "data.train=[a, b]")


def test_a_dataset_that_grew_is_a_new_source_said_in_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run", 4, "data.train=a")
    with IndexedWriter(tmp_path / "a", "u2") as writer:
        writer.add_document([7] * 5000)
    with pytest.raises(CheckpointError, match="the tokens of a have changed"):
        trained(tmp_path / "run", 6, "data.train=a")
    trained(tmp_path / "run", 6, "data.train=a", allow=["data.train"])
    said = capsys.readouterr().err
    assert re.search(
        r"a has changed and is read from its beginning: it has 5K tokens instead of 1\.\d+K, of which 64 were "
        r"read",
        said,
    ), said
    assert [stream.taken for stream in position(tmp_path / "run", 6).streams] == [4, 2]


def as_version_3(directory: Path, step: int, **policy: object) -> None:
    """Rewrite a checkpoint's manifest in version 3 of the format."""
    path = directory / "checkpoints" / f"step_{step:08}" / "manifest.json"
    content = json.loads(path.read_text())
    content["version"] = 3
    del content["progress"]["position"]
    content["progress"]["policy"] |= policy
    path.write_text(json.dumps(content))
    (path.parent / "manifest.sha256").write_bytes(digest_line(path.read_bytes()))


PHASES = "train.phases=[{steps: 3}, {steps: 3, batch: {global_batch: 2}}]"


@pytest.mark.parametrize(
    "words", [("data.train=[a, b]",), (), ("data.train=[a, b]", "data.packing=best-fit"), ("data.train=a", PHASES)]
)
def test_a_checkpoint_from_before_goes_on_where_it_was(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(tmp_path / "whole", 8, *words)
    trained(tmp_path / "run", 5, *words)
    before = position(tmp_path / "run", 5)
    as_version_3(tmp_path / "run", 5)
    assert trained(tmp_path / "run", 8, *words) == whole
    assert (
        "Data that earlier changes of batch, weights or data skipped or read twice is not recorded"
        in capsys.readouterr().err
    )
    assert position(tmp_path / "run", 8) == position(tmp_path / "whole", 8) and before.samples >= 5


def test_what_a_rewind_left_out_before_stays_left_out(tmp_path: Path) -> None:
    single = trained(tmp_path / "whole", 16, "data.train=a")
    trained(tmp_path / "run", 4, "data.train=a")
    rewind = {"step": 4, "action": "rewind", "spike_at": 6, "left_out_steps": 5}
    as_version_3(tmp_path / "run", 4, left_out_steps=5, rewinds=[rewind])
    assert trained(tmp_path / "run", 8, "data.train=a")[4:] == single[9:13]
    (stream,) = position(tmp_path / "run", 8).streams
    assert (stream.taken, stream.left_out) == (13, ((4, 5),))
