"""Tests skipped steps, rewinds and steps with values that are not finite, in complete runs.

These policies must be deterministic and recorded, and a resumed run must give the same results.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.runs import Run

# limits so low that ordinary steps of a tiny run count as spikes
SPIKES = ("guard.spike_sigmas=0.7", "guard.spike_window=4")


def decisions(run: Run) -> list[dict]:
    return [json.loads(line) for line in (run.run_dir / "decisions.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_spikes_are_skipped_alike_in_an_interrupted_run(tmp_path: Path) -> None:
    whole, cut = (Run(tmp_path / name, steps=20, save_interval=4, overrides=SPIKES) for name in ("whole", "cut"))
    assert whole.finish()[0] == 0
    assert cut.finish("train.step#15=kill")[0] == -9
    assert cut.finish()[0] == 0
    assert any(entry["action"] == "spike" for entry in decisions(whole))
    assert decisions(cut) == decisions(whole)
    assert cut.losses() == whole.losses() and cut.shards() == whole.shards()


@pytest.mark.thorough
def test_rewind_leaves_data_out_and_replays_bit_equal(tmp_path: Path) -> None:
    rewind = (
        *SPIKES,
        "guard.spike_action=rewind",
        "guard.rewind_steps=3",
        "guard.rewind_skip_steps=5",
        "train.keep_every=1",
    )
    once, again = (Run(tmp_path / name, steps=16, save_interval=2, overrides=rewind) for name in ("once", "again"))
    code, output, _ = once.finish()
    assert code == 0 and "leaving out 40 samples of data" in output, output
    assert again.finish("checkpoint.latest_moved#4=kill")[0] == -9
    assert again.finish()[0] == 0
    rewinds = [entry for entry in decisions(once) if entry["action"] == "rewind"]
    assert rewinds and rewinds[-1]["left_out_samples"] == 40 * len(rewinds)
    assert decisions(again) == decisions(once) and again.shards() == once.shards()


@pytest.mark.thorough
def test_a_run_that_only_skips_stops_with_a_diagnosis(tmp_path: Path) -> None:
    run = Run(
        tmp_path, steps=40, overrides=("optimizer.lr=1.0e+30", "optimizer.clip_norm=0", "guard.max_skips_in_row=5")
    )
    code, output, _ = run.finish()
    assert code == 2 and "5 steps in a row were skipped; at the last one loss was" in output
    assert len(decisions(run)) == 5 and {entry["action"] for entry in decisions(run)} == {"not finite"}


@pytest.mark.thorough
def test_a_run_whose_weights_are_not_finite_ends_with_an_error_and_keeps_the_good_state(tmp_path: Path) -> None:
    """The save at the end of the run is refused too."""
    run = Run(
        tmp_path, steps=2, overrides=("optimizer.lr=1.0e+39", "optimizer.warmup_steps=0", "optimizer.decay_steps=2")
    )
    code, output, _ = run.finish()
    assert code == 2 and "weights are not finite: " in output and "the step is not saved" in output
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
