"""Memory of pipeline stages: measured in the first steps, recorded, read back, and written into a machine file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frontier_llm.cli.main import main
from frontier_llm.cluster.status_text import _memory
from frontier_llm.config import load_run
from frontier_llm.experiments.measure.report import write_report
from frontier_llm.machine.load import OWN_STACK, load_machine, rates
from frontier_llm.planner.predict import plans_of, stage_bytes
from frontier_llm.run import run_dir
from frontier_llm.run.stage_memory import StageMemory, as_row, describe, fullest, read_stage_memory
from frontier_llm.training import memory
from frontier_llm.training.memory import MEASURED_STEPS, MemoryCheck
from frontier_llm.units import GIB
from tests.unit.experiments.measure.test_report import make_run

# two stages of a GPU run: the other rank of stage 0 uses more than this rank
STAGES = (
    StageMemory(0, 58 * GIB, predicted_bytes=56 * GIB, allocated_bytes=50 * GIB, reserved_bytes=53 * GIB),
    StageMemory(1, 40 * GIB, predicted_bytes=44 * GIB, allocated_bytes=36 * GIB, reserved_bytes=37 * GIB),
)


@pytest.fixture
def gpu_state(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank of stage 0 on a device of 64 GiB. The second rank of stage 0 and a rank of stage 1 are simulated."""
    others = [58 * GIB, 49 * GIB, 53 * GIB, 40 * GIB, 36 * GIB, 37 * GIB]
    peaks = {"allocated_bytes.all.peak": 50 * GIB, "reserved_bytes.all.peak": 52 * GIB}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 64 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: peaks)
    monkeypatch.setattr(memory, "maximum", lambda own, world, device: list(map(max, own, others)))
    mesh = SimpleNamespace(pp=SimpleNamespace(rank=0, size=2), world=SimpleNamespace(rank=0, size=3))
    phases = (SimpleNamespace(end=100),)
    return SimpleNamespace(current_step=7, device=torch.device("cuda"), mesh=mesh, phases=phases, config=None)


def test_each_stage_has_the_maximum_of_its_ranks_beside_the_prediction(gpu_state: Any) -> None:
    check = MemoryCheck(gpu_state, lambda config, ranks: (56.0 * GIB, 44.0 * GIB))
    measured = []
    for _ in range(MEASURED_STEPS + 2):
        gpu_state.current_step += 1
        measured.append(check.after_step(gpu_state))
    assert measured == [(), (), STAGES, (), ()]
    assert STAGES[0].error == pytest.approx(56 / 58 - 1)
    assert STAGES[0].surplus_bytes == 8 * GIB
    head, names, *rows = describe(STAGES, check.steps)
    assert head == "memory after 3 steps, GiB of the device, the largest of the ranks of a stage:"
    assert names.split() == ["stage", "predicted", "allocated", "reserved", "used", "error"]
    assert rows[0].split() == ["0", "56.00", "50.00", "53.00", "58.00", "-3.4", "%"]
    assert _memory(fullest(STAGES)) == "58.0 GiB on the fullest stage (0), predicted 56.0 (-3.4 %)"


def test_the_prediction_is_that_of_the_plan() -> None:
    config = load_run("bench", ["parallel.pipeline=2", "parallel.data=1"])
    (plan,) = plans_of(config, 2)
    assert stage_bytes(config, 2) == tuple(sum(lines.values()) for lines in plan.memory)


def test_a_run_directory_gives_its_newest_record_and_skips_damaged_ones(tmp_path: Path) -> None:
    assert read_stage_memory(tmp_path) == ()
    path = tmp_path / "metrics.jsonl"
    run_dir.append_line(path, {"kind": "memory", "step": 3, **as_row(STAGES[:1])})
    run_dir.append_line(path, {"kind": "memory", "step": 3, **as_row(STAGES)})
    damaged: tuple[Any, ...] = (7, [], [7], [{"stage": 0}], [{**as_row(STAGES)["stages"][0], "used_bytes": 0}])
    for stages in damaged:
        run_dir.append_line(path, {"kind": "memory", "step": 3, "stages": stages})
    assert read_stage_memory(tmp_path) == STAGES


def test_the_measured_surplus_becomes_the_reserve_of_a_machine_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", "machine=frontier")
    emitted = tmp_path / "mine.yaml"
    command = ["calibrate", "--memory-from", str(run), "--emit-machine", str(emitted)]
    assert main(command) == 2
    assert "has measured no memory" in capsys.readouterr().err
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"kind": "memory", "step": 3, **as_row(STAGES)}) + "\n")
    assert main(command) == 0
    machine = load_machine(str(emitted))
    reserve = machine.stacks[OWN_STACK].reserve_gib
    assert (reserve.value, reserve.tag) == (8.0, "measured") and "first steps of run" in reserve.source
    shipped = rates(load_machine("frontier"))
    assert rates(machine).reserve_bytes == 8 * GIB != shipped.reserve_bytes
    config = load_run("bench", ["machine=frontier"])
    more = stage_bytes(config.model_copy(update={"machine": str(emitted)}), 1)[0] - stage_bytes(config, 1)[0]
    assert more == pytest.approx(8 * GIB - shipped.reserve_bytes)
    page = write_report([run], tmp_path / "report.html").read_text()
    assert "<h2>Memory after the first steps</h2>" in page and "<td>-3.4 %</td>" in page


def test_a_run_on_cpus_has_no_surplus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"kind": "memory", "step": 3, **as_row([StageMemory(0, GIB)])}) + "\n")
    assert main(["calibrate", "--memory-from", str(run), "--emit-machine", str(tmp_path / "mine.yaml")]) == 2
    assert "ran on CPUs" in capsys.readouterr().err


@pytest.mark.parametrize(("machine", "is_compared"), [("local", True), ("frontier", False)])
def test_the_memory_of_a_process_is_not_compared_with_the_prediction_for_a_gpu(machine: str, is_compared: bool) -> None:
    axis = SimpleNamespace(rank=0, size=1)
    config = load_run("quickstart", [f"machine={machine}"])
    state = SimpleNamespace(
        current_step=0,
        device=torch.device("cpu"),
        mesh=SimpleNamespace(pp=axis, world=axis),
        phases=(SimpleNamespace(end=10),),
        config=config,
    )
    predicted = MemoryCheck(state, lambda config, ranks: (1.0 * GIB,))._predicted(state)  # type: ignore[arg-type]
    assert (predicted is not None) is is_compared
