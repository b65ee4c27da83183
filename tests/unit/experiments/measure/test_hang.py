"""The hang test: its verdict on a mode, and a planted hang that it must find."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.experiments.measure import hang
from frontier_llm.experiments.measure.hang import Verdict, in_flight_of, watch
from frontier_llm.machine.load import load_machine

# Planted fault: with one communication in flight, the first stage waits for its first gradient before it has sent
# anything.
PLANT = """
from frontier_llm.parallel import pipeline as engine
from frontier_llm.schedule import Kind

original = engine.Engine.__init__


def planted(self, schedule, stages, mesh, *rest, **named):
    original(self, schedule, stages, mesh, *rest, **named)
    if mesh.one_in_flight:
        self._units = sorted(self._units, key=lambda unit: unit[0][:2] != (Kind.RECV_BACKWARD, 0))


engine.Engine.__init__ = planted
"""


def verdict_of(code: str, folder: Path, limit_s: float) -> Verdict:
    write = f"from pathlib import Path; say = Path({str(folder / 'progress')!r}).write_text; "
    return watch([sys.executable, "-c", write + code], dict(os.environ), "many", 2, limit_s, folder)


def test_a_mode_is_safe_when_all_steps_end_and_a_late_one_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict_of("say('2')", tmp_path, 60.0).safe
    late = verdict_of("say('1'); import time; time.sleep(300)", tmp_path, 1.0)
    assert (
        not late.safe and late.fault == "step 2 of 2 hung for 1 s" and "many: NOT SAFE: step 2 of 2" in late.describe()
    )
    failed = verdict_of("say('1'); raise SystemExit('rank 1 sees no GPU')", tmp_path, 60.0)
    assert failed.fault == "ended after 1 of 2 steps with exit code 1: rank 1 sees no GPU"
    monkeypatch.setattr(hang, "START_S", 0.2)
    assert verdict_of("import time; time.sleep(300)", tmp_path, 60.0).fault == "the start hung for 0 s"


def test_many_is_taken_where_it_is_safe_with_its_overlaps() -> None:
    many, waiting, one = (Verdict(mode, 2, 2, 1.0) for mode in hang.MODES)
    hung = Verdict("many", 1, 2, 1.0, "hung")
    assert in_flight_of([many, waiting, one]) == "many"
    assert in_flight_of([hung, waiting, one]) == "one" and in_flight_of([hung]) is None


@pytest.mark.thorough  # starts ranks three times
def test_a_planted_hang_is_found_and_the_machine_file_says_what_is_safe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plant.py").write_text(PLANT)
    content = {
        "model": "llama-tiny",
        "parallel": {"pipeline": 2},
        "batch": {"global_batch": 4},
        "precision": {"dtype": "fp32"},
        "train": {"device": "cpu"},
        "plugins": [str(tmp_path / "plant.py")],
    }
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    options = [
        "--hang-test",
        "--steps",
        "3",
        "--step-limit",
        "15",
        "--emit-machine",
        str(tmp_path / "here.yaml"),
        "--json",
    ]
    assert main(["bench", "comm", str(tmp_path / "run.yaml"), *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["mode"]: row["safe"] for row in result["modes"]} == {"many": True, "many-waiting": True, "one": False}
    assert result["modes"][2]["fault"] == "step 1 of 3 hung for 15 s" and result["in_flight"] == "many"
    machine = load_machine(str(tmp_path / "here.yaml"))
    assert (machine.in_flight.mode, machine.in_flight.tag) == ("many", "measured")
    assert "one 0 of 3 steps" in machine.in_flight.source
