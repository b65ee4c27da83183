"""Run files that `frontier-llm plan --emit` writes, and the comparison of their predictions with measured runs."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from frontier_llm.config import configs_dir, phases_of
from frontier_llm.config.load import dump, load_run
from frontier_llm.data.loader import data_problems
from frontier_llm.errors import ConfigError, LayoutError
from frontier_llm.machine.precision import resolve_precision
from frontier_llm.planner.emit import write_run
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.metrics import layout_of
from tests.harness.plan_command import plan as run


def test_an_emitted_run_is_complete_but_for_the_data_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    code, out, _ = run(
        capsys,
        "gpt-22b",
        "--nodes",
        "8",
        "batch.global_batch=512",
        "--tokens",
        "300B",
        "--emit",
        str(path),
    )
    assert code == 0
    config = load_run(str(path))
    tokens = config.train.steps * config.batch.global_batch * config.model.sequence_length
    assert 300e9 <= tokens < 300e9 + config.batch.global_batch * config.model.sequence_length
    saves = re.search(r"checkpoint every .* \((\d+) steps", " ".join(out.split()))
    assert saves and config.train.save_interval == int(saves[1])
    assert (config.optimizer.lr, config.optimizer.min_lr) == (1e-4, 1e-5)  # the nearest published values (GPT-3 13B)
    assert 0 < config.optimizer.warmup_steps * config.batch.global_batch * config.model.sequence_length < 0.1 * tokens
    told = [line for line in out.splitlines() if line.startswith("set data.train to")]
    assert told and f"# {told[0]}" in path.read_text()
    assert [problem.where for problem in data_problems(config)] == [f"data.train: {Path.cwd()}/FILL_IN.bin"]
    words = out.splitlines()[-1]
    assert all(
        word in words
        for word in (
            f"train.steps={config.train.steps}",
            "optimizer.lr=0.0001",
            "data.train=FILL_IN",
            "global_batch=512",
        )
    )


def test_a_plan_of_a_run_with_another_batch_keeps_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    words = ("--run", "quickstart", "--machine", "local", "--nodes", "1", "--emit", str(path))
    base = load_run("quickstart")
    assert run(capsys, *words, f"batch.global_batch={2 * base.batch.global_batch}")[0] == 0
    assert load_run(str(path)).train.steps == base.train.steps / 2
    assert run(capsys, *words)[0] == 0
    assert load_run(str(path)).train.steps == base.train.steps


def test_steps_given_in_tokens_are_replaced_by_those_of_other_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: with twice the batch, twice the tokens are as many steps, which the base run turned into half."""
    base = tmp_path / "mine.yaml"
    emitted = tmp_path / "planned.yaml"
    quickstart = load_run("quickstart")
    step_tokens = quickstart.batch.global_batch * quickstart.model.sequence_length
    base.write_text(f"base: quickstart\ntrain: {{steps: {10 * step_tokens} tokens}}\n")
    words = ("--run", str(base), "--machine", "local", "--nodes", "1", "--emit", str(emitted))
    doubled = f"batch.global_batch={2 * quickstart.batch.global_batch}"
    for tokens, steps in (((), 5), (("--tokens", str(20 * step_tokens)), 10)):
        assert run(capsys, *words, *tokens, doubled)[0] == 0
        assert load_run(str(emitted)).train.steps == steps


@pytest.mark.parametrize("where", ["the run", "its base", "the model", "the machine"])
def test_an_emitted_run_does_not_replace_a_file_that_it_is_read_from(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    above = tmp_path / "above.yaml"
    above.write_text(f"base: {path}\n")
    shipped = {"the model": "models/llama-15m", "the machine": "machines/local"}.get(where, "runs/quickstart")
    path.write_text((configs_dir() / f"{shipped}.yaml").read_text())
    before = path.read_text()
    words = {
        "the run": ("--run", str(path), "--machine", "local"),
        "its base": ("--run", str(above), "--machine", "local"),
        "the model": (str(path), "--machine", "local"),
        "the machine": ("llama-15m", "--machine", str(path)),
    }[where]
    code, _, err = run(capsys, *words, "--nodes", "1", "--emit", str(path))
    assert code == 2 and f"{path} is read by the run that would replace it" in err
    assert path.read_text() == before and sorted(tmp_path.iterdir()) == [above, path]


def test_a_run_that_is_not_legal_does_not_replace_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: quickstart\n")
    for error, content in ((LayoutError, {"parallel": {"tensor": 3}}), (ConfigError, {"batch": {"micro": 1}})):
        with pytest.raises(error) as raised:
            write_run(path, (), {"base": "quickstart", **content}, 1)
        assert list(tmp_path.iterdir()) == [path] and path.read_text() == "base: quickstart\n"
        assert str(tmp_path) not in str(raised.value) or str(path) in str(raised.value)


def test_phases_with_a_microbatch_get_that_of_the_planned_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    phases = [
        {"steps": 10, "batch": {"micro_batch": 1}},
        {"steps": 10, "batch": {"micro_batch": 1, "global_batch": 72}},
    ]
    content = {"base": "quickstart", "machine": "frontier", "batch": {"global_batch": 64}, "train": {"phases": phases}}
    path.write_text(yaml.safe_dump(content))
    emitted = tmp_path / "planned.yaml"
    fixed = ("--fix", "micro_batch=2", "--fix", "data=4")
    assert run(capsys, "--run", str(path), "--nodes", "1", *fixed, "--emit", str(emitted))[0] == 0
    config = load_run(str(emitted))
    assert [phase.config.batch.micro_batch for phase in phases_of(config)] == [2, 2]
    assert [phase.config.batch.global_batch for phase in phases_of(config)] == [64, 72]
    typed = ("batch.global_batch=96", "train.phases=[{steps: 30, batch: {micro_batch: 1}}, {steps: 40}]")
    fixed = ("--fix", "micro_batch=12", "--fix", "data=8")
    assert run(capsys, "--run", str(path), "--nodes", "1", *fixed, *typed, "--emit", str(emitted))[0] == 0
    config = load_run(str(emitted))
    assert [phase.steps for phase in config.train.phases] == [30, 40]
    assert [phase.config.batch.micro_batch for phase in phases_of(config)] == [12, 12]


def test_phases_without_a_batch_keep_that_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: the batch of the phase with the longest sequences became the batch of all phases."""
    path = tmp_path / "mine.yaml"
    longer = {"steps": 10, "model": {"sequence_length": 512}, "batch": {"global_batch": 16}}
    content = {"base": "quickstart", "batch": {"global_batch": 64}, "train": {"phases": [{"steps": 10}, longer]}}
    path.write_text(yaml.safe_dump(content))
    emitted = tmp_path / "planned.yaml"
    for typed, batch in (((), 64), (("batch.global_batch=32",), 32)):
        assert run(capsys, "--run", str(path), "--nodes", "1", *typed, "--emit", str(emitted))[0] == 0
        assert [phase.config.batch.global_batch for phase in phases_of(load_run(str(emitted)))] == [batch, 16]


def test_a_run_for_several_nodes_is_submitted_as_the_emitted_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has its own model, so that no script in slurm/ starts it."""
    emitted = tmp_path / "planned.yaml"
    code, out, _ = run(capsys, "--run", "train_22b", "--nodes", "16", "--emit", str(emitted))
    assert code == 0
    assert f"frontier-llm submit {emitted} --site frontier --nodes 16" in out and "sbatch --account" not in out


def test_a_run_is_planned_emitted_on_top_of_itself_and_compared_with_what_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emitted = tmp_path / "planned.yaml"
    code, out, _ = run(
        capsys,
        "--run",
        "quickstart",
        "--machine",
        "local",
        "--nodes",
        "1",
        "--fix",
        "data=2",
        "--emit",
        str(emitted),
    )
    assert code == 0
    assert f"frontier-llm train {emitted}" in out
    config = resolve_precision(load_run(str(emitted)))
    base = load_run("quickstart")
    assert (config.model, config.batch.global_batch, config.data) == (base.model, base.batch.global_batch, base.data)
    assert config.parallel.data == 2
    world_size = 2 * config.parallel.tensor * config.parallel.pipeline
    assert make_plan(config, world_size).grid.dp == 2

    run_dir = tmp_path / "taken"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(dump(config))
    (run_dir / "plan.json").write_text(json.dumps(asdict(make_plan(config, world_size))))
    steps = [
        json.dumps({"kind": "step", "step": n, "loss": 8.0, "step_time_s": s})
        for n, s in ((10, 9.0), (20, 0.4), (30, 0.6), (40, 0.4))
    ]
    (run_dir / "metrics.jsonl").write_text("\n".join([*steps, '{"kind": "step", "st']))
    code, out, _ = run(capsys, "--machine", "local", "--measured", str(run_dir), "--json")
    assert code == 0
    (row,) = json.loads(out)
    assert row["measured_s"] == 0.4
    assert row["error"] == pytest.approx(row["predicted_s"] / 0.4 - 1)
    code, out, _ = run(capsys, "--measured", str(run_dir), "--json")
    assert json.loads(out) == [row] and row["machine"] == "local", "without --machine the run's machine is used"
    code, out, _ = run(capsys, "--machine", "local", "--measured", str(run_dir))
    assert "400 ms" in out
    # Steps of an attempt on another layout are not compared with the prediction.
    now = layout_of(config, world_size)
    layouts = (0, 1, {**now, "sequence_parallel": not now["sequence_parallel"]}), (30, 2, now)
    starts = [
        json.dumps({"kind": "start", "step": step, "incarnation": number, "layout": layout})
        for step, number, layout in layouts
    ]
    (run_dir / "metrics.jsonl").write_text(
        "\n".join([starts[0], *steps[:3], starts[1], steps[3].replace("0.4", "0.7")])
    )
    code, out, _ = run(capsys, "--machine", "local", "--measured", str(run_dir), "--json")
    assert json.loads(out)[0]["measured_s"] == 0.7
    code, _, err = run(capsys, "--machine", "local", "--measured", str(tmp_path / "none"))
    assert code != 0
    assert "is not a run directory: it lacks config.yaml, plan.json, metrics.jsonl" in err


def test_of_a_runs_own_layout_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.yaml"
    emitted = tmp_path / "planned.yaml"
    own = (
        "parallel: {data_shard: 2, data_mode: fsdp, stage_layers: null, axis_order: dp-tp-pp}\ncomm: "
        "{tensor_chunks: 2, in_flight: many}"
    )
    mine.write_text(f"base: quickstart\n{own}\n")
    code, _, err = run(
        capsys,
        "--run",
        str(mine),
        "--machine",
        "local",
        "--nodes",
        "1",
        "--fix",
        "zero=1",
        "--emit",
        str(emitted),
    )
    assert code == 0, err
    planned = load_run(str(emitted))
    assert (planned.parallel.data_mode, planned.parallel.data_shard, planned.parallel.axis_order) == (
        "zero",
        None,
        "tp-dp-pp",
    )
    assert (planned.comm.tensor_chunks, planned.comm.in_flight) == (1, "many")


@pytest.mark.parametrize(("tensor", "algorithms"), [(8, "frontier"), (2, "flat")])
def test_an_emitted_run_has_the_algorithms_that_were_priced(
    tensor: int,
    algorithms: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Eight groups per node share its NICs over 16 nodes, so that two stages are chosen.

    Two groups over 4 nodes use rings.
    """
    path = tmp_path / "mine.yaml"
    nodes = "32" if tensor == 8 else "8"
    fixed = ["--fix", f"tensor={tensor}", "--fix", "pipeline=2", "--fix", "zero=1"]
    code, out, _ = run(capsys, "gpt-22b", "--nodes", nodes, "batch.global_batch=512", *fixed, "--emit", str(path))
    assert code == 0
    assert load_run(str(path)).comm.algorithms == algorithms
    assert ("comm.algorithms=frontier" in out.splitlines()[-1]) == (algorithms == "frontier")


def test_an_emitted_run_keeps_a_changed_sequence_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.yaml"
    code, _, _ = run(
        capsys,
        "llama-2-7b",
        "--nodes",
        "2",
        "batch.global_batch=64",
        "model.sequence_length=8192",
        "--emit",
        str(path),
    )
    assert code == 0
    assert load_run(str(path)).model.sequence_length == 8192
