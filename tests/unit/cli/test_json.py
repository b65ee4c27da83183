"""`--json` of every command prints JSON as defined by RFC 8259: no NaN, and nothing else on stdout. The lines of
metrics.jsonl follow the same rule.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.cli.main import main
from frontier_llm.run import run_dir
from tests.harness.marks import exhaustive, thorough
from tests.unit.cli.test_help import PARSERS
from tests.unit.experiments.measure.test_report import make_run
from tests.unit.experiments.scaling.test_harvest import finish, points
from tests.unit.inference.test_commands import room

__all__ = ["room"]  # a fixture

COMMANDS = {
    "bench comm": "bench comm bench train.run_dir={here}/bench parallel.data=2 --min 1KiB --max 1KiB --no-pairs",
    "bench ops": "bench ops --model gpt-tiny",
    "bench step": "bench step bench train.run_dir={here}/bench --steps 1",
    "calibrate": "calibrate bench train.run_dir={here}/bench --ranks 1 --repeats 1 --emit-machine {here}/mine.yaml",
    "check": "check train_small train.run_dir={here}/new",
    "checkpoint diff": "checkpoint diff {room}/run/checkpoints/step_00000000 {room}/run/checkpoints/step_00000000",
    "checkpoint export-hf": "checkpoint export-hf {room}/run {here}/exported --tokenizer none",
    "checkpoint import-hf": "checkpoint import-hf {room}/hf",
    "checkpoint list": "checkpoint list {room}/run",
    "checkpoint pull": "checkpoint pull file://{here}/store {here}/pulled",
    "checkpoint push": "checkpoint push {room}/run file://{here}/store",
    "checkpoint verify": "checkpoint verify {room}/run",
    "data check": "data check {room}/data",
    "data inspect": "data inspect {room}/data --tokenizer bytes",
    "data stdlib": "data stdlib {here}/stdlib --tokenizer bytes --workers 1",
    "data tokenize": "data tokenize {here}/text.txt --output {here}/tokens --tokenizer bytes --workers 1",
    "data tokenizer": "data tokenizer {here}/text.txt --output {here}/words.json --vocab-size 300",
    "doctor": "doctor --this-node --run-dir {here}",
    "evaluate": "evaluate {room}/hf --data {room}/data --windows 1",
    "generate": "generate {room}/hf --max-new-tokens 2",
    "list": "list machines",
    "ops check": "ops check",
    "ops kernels": "ops kernels gfx90a",
    "ops list": "ops list",
    "plan": "plan gpt-tiny --machine local --nodes 1 --top 1",
    "report": "report {here}/run",
    "scaling report": "scaling report {here}/series",
    "scaling strong": "scaling strong --model gpt-175b --nodes 16,32 --site frontier -A x --simulate --output "
    "{here}/strong",
    "scaling weak": "scaling weak --model gpt-175b --nodes 16,32 --site frontier -A x --simulate --output {here}/weak",
    "status": "status {here}/run",
    "submit": "submit train_22b --site frontier --nodes 16 -A x --dry-run train.run_dir={here}/new",
    "tune": "tune train_small batch.global_batch=8 --max-node-hours 0 --output {here}/tune",
}
SLOW = ("bench comm", "bench ops", "data stdlib", "ops check", "tune")
LONG = ("bench step", "calibrate")  # CI leaves these out


def marked(name: str) -> Any:
    if name in LONG:
        return exhaustive(name)
    return thorough(name) if name in SLOW else name


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_command_with_json_is_played() -> None:
    with_json = {
        prog for prog, parser in PARSERS.items() if any("--json" in action.option_strings for action in parser._actions)
    }
    # ops tune measures for minutes on a CPU. tests/unit/ops/test_attention_table.py checks its output.
    # tests/unit/cli/test_data_plan.py checks the commands about a run's data.
    # tests/unit/interop checks import-megatron, which shares its output with import-hf.
    elsewhere = {"ops tune", "data plan", "data show", "checkpoint import-megatron"}
    assert {prog.removeprefix("frontier-llm ") for prog in with_json} == {*COMMANDS, *elsewhere}


@pytest.mark.parametrize("name", [marked(name) for name in COMMANDS])
def test_stdout_is_json(name: str, room: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for point in points(tmp_path / "series", [1, 2])[: name == "scaling report"]:
        finish(point, 1.0)
    (tmp_path / "text.txt").write_text("some words\n" * 20)
    with (make_run(tmp_path / "run") / "metrics.jsonl").open("a") as lines:
        lines.write(
            '\n{"kind": "step", "step": 41, "loss": null, "gradient_norm": null, "tokens_per_s": 1.0, '
            '"consumed_tokens": 1}\n'
        )
    if name == "checkpoint pull":
        main(["checkpoint", "push", str(room / "run"), f"file://{tmp_path}/store"])
    capfd.readouterr()
    code = main([*COMMANDS[name].format(here=tmp_path, room=room).split(), "--json"])
    out = capfd.readouterr().out
    if name in ("ops kernels", "ops check") and code == 2:
        assert out == ""  # no kernels are built here, or there is no GPU
        return
    content = strict(out)
    assert code in (0, 1) and content not in ({}, None)
    if name == "status":
        assert content[0]["step"] == 41 and content[0]["loss"] is None


def test_a_loss_that_is_not_finite_is_null_in_the_file_and_nan_to_readers(tmp_path: Path) -> None:
    run_dir.append_line(
        tmp_path / "metrics.jsonl",
        {"kind": "step", "step": 1, "loss": math.nan, "gradient_norm": math.inf, "mfu": None},
    )
    assert strict((tmp_path / "metrics.jsonl").read_text())["loss"] is None
    (row,) = run_dir.steps(tmp_path)
    assert math.isnan(row["loss"]) and math.isnan(row["gradient_norm"]) and row["mfu"] is None
