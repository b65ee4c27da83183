"""Uses the public names of the package in the way in which a user's program uses them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from signal import SIGINT
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import frontier_llm
from frontier_llm import FrontierError, RankFailure, Result, load_run, open_checkpoint, plan, score, train
from frontier_llm.api.train import _Child, _Rows
from frontier_llm.data.tokenizer import load_tokenizer
from frontier_llm.run.signals import EXIT_INTERRUPTED

ROOT = Path(__file__).parents[3]
TINY = {
    "model": {
        "name": "tiny",
        "layers": 2,
        "hidden": 32,
        "heads": 2,
        "ffn_hidden": 64,
        "vocab_size": 300,
        "sequence_length": 16,
    },
    "machine": "local",
    "precision": {"dtype": "fp32"},
    "data": {"train": "synthetic"},
    "batch": {"global_batch": 4, "micro_batch": 1},
    "train": {"steps": 6, "device": "cpu", "save_interval": 3, "tensorboard": False},
}


def test_a_trainer_waits_for_uploads_unless_its_loop_failed() -> None:
    for error, wait in ((None, True), (KeyError("batch"), False)):
        trainer = object.__new__(frontier_llm.Trainer)
        trainer._checkpoints = Mock()
        trainer._stack = Mock()
        with nullcontext() if error is None else pytest.raises(KeyError), trainer:
            if error is not None:
                raise error
        trainer._checkpoints.close.assert_called_once_with(verify=wait)
        trainer._stack.close.assert_called_once_with()


def test_a_trainer_refuses_a_run_with_phases() -> None:
    phases = [{"steps": 3}, {"steps": 3, "batch": {"global_batch": 2}}]
    with pytest.raises(FrontierError, match="no phases") as caught:
        frontier_llm.Trainer(load_run(TINY, {"train.phases": phases}))
    assert caught.value.why == "train.phases"


def tiny(run_dir: Path, **more: Any) -> frontier_llm.Run:
    return load_run(TINY, {"train.run_dir": str(run_dir), **more})


def in_a_fresh_interpreter(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_package_imports_nothing_before_a_name_is_used() -> None:
    program = (
        "import sys; before = set(sys.modules); import frontier_llm; "
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} & "
        "{'torch', 'numpy', 'yaml', 'pydantic'}))"
    )
    assert in_a_fresh_interpreter(program) == "[]"


def test_planning_imports_no_torch() -> None:
    program = (
        "import sys, frontier_llm; chosen = frontier_llm.plan('gpt-22b', machine='frontier', nodes=2); "
        "print(chosen.layout['parallel']['tensor'], 'torch' in sys.modules)"
    )
    degree, loaded = in_a_fresh_interpreter(program).split()
    assert int(degree) >= 1 and loaded == "False"


def test_the_public_names_are_few_and_exist() -> None:
    assert len(frontier_llm.__all__) <= 16
    assert all(getattr(frontier_llm, name).__doc__ for name in frontier_llm.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'tarin'; public names: .*train"):
        _ = frontier_llm.tarin


def test_overrides_have_the_keys_of_yaml_and_errors_have_three_parts() -> None:
    run = load_run("quickstart", {"train.steps": 5, "train.seed": 7}, machine="mi250")
    assert (run.config.train.steps, run.config.train.seed, run.config.machine) == (5, 7, "mi250")
    assert load_run(run.to_dict()).config == run.config
    with pytest.raises(FrontierError) as caught:
        load_run(TINY, {"train.stepz": 5})
    assert caught.value.what == "unknown key"
    assert caught.value.why == "overrides: train.stepz"
    assert caught.value.fix.startswith("did you mean 'steps'?")


def test_values_of_numpy_and_paths_are_values_of_a_run() -> None:
    run = load_run("quickstart", {"train.run_dir": "runs/\N{GRINNING FACE}", "train.steps": np.int64(5)})
    assert (run.config.train.run_dir, run.config.train.steps) == ("runs/\N{GRINNING FACE}", 5)
    content = {**TINY, "train": {"run_dir": Path("runs") / "mine", "steps": np.int64(7)}}
    assert load_run(content).config.train.run_dir == "runs/mine"
    with pytest.raises(FrontierError, match="has the type object") as caught:
        load_run({**TINY, "train": {"steps": object()}})
    assert caught.value.why == "train.steps"


def test_directories_without_a_run_are_left_out_of_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a", ""), ("b", "model: other\ntrain: {}\n"), ("c", "model: {name: m}\ntrain: {steps: 4}\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    assert [found["path"].name for found in frontier_llm.list_runs(tmp_path)] == ["c"]
    assert capsys.readouterr().err.count("is left out") == 2


def test_a_plan_becomes_a_run_and_a_notebook_shows_it() -> None:
    chosen = plan(tiny(Path("runs/x")), machine="frontier", nodes=1, fixed={"tensor": 2})
    run = chosen.to_run({"train.steps": 3})
    assert run.config.parallel.tensor == 2
    assert run.config.train.steps == 3
    assert run.config.model.name == "tiny"
    assert "TP" in chosen.table()
    assert repr(chosen) == str(chosen)
    html = chosen._repr_html_()
    assert html.startswith("<pre") and "pipeline rank 0" in html
    # A notebook does not run scripts in the page, so the timeline is drawn with SVG rectangles.
    assert "<script" not in html
    assert html.count("forward, microbatch") >= chosen.as_dict()["plans"][0]["microbatches"]
    assert chosen.as_dict()["promise"]


def test_a_planned_run_keeps_its_machine_its_directory_and_its_tokens() -> None:
    run = tiny(Path("runs/x"))
    chosen = plan(run, nodes=1, global_batch=8)
    planned = chosen.to_run().config
    assert chosen.machine_name == planned.machine == "local"
    assert planned.train.run_dir == run.config.train.run_dir
    assert (planned.batch.global_batch, planned.train.steps) == (8, 3)  # the run has 6 steps of 4 sequences
    unnamed = load_run({name: value for name, value in TINY.items() if name != "machine"}).with_({"train.steps": 5})
    assert plan(unnamed, nodes=1).machine_name == "frontier"


@pytest.mark.parametrize(("tokens", "written"), [(None, "640 tokens"), (1280, 5)])
def test_a_planned_run_keeps_steps_that_are_given_in_tokens(tokens: int | None, written: object) -> None:
    run = tiny(Path("runs/x"), **{"train.steps": "640 tokens"})  # 10 steps of 4 sequences with 16 tokens
    planned = plan(run, nodes=1, global_batch=16, tokens=tokens).to_run()
    assert planned.to_dict()["train"]["steps"] == written
    assert planned.config.train.steps == (tokens or 640) // (16 * 16) + (tokens is None)


def test_phases_of_a_planned_run_get_the_microbatch_of_its_layout() -> None:
    phases = [
        {"steps": 3, "batch": {"micro_batch": 1}},
        {"steps": 3, "batch": {"micro_batch": 1, "global_batch": 24}},
    ]
    run = load_run(tiny(Path("runs/x")), {"train.phases": phases, "batch.global_batch": 16})
    planned = plan(run, nodes=1, fixed={"micro_batch": 2, "data": 8}).to_run().config
    assert [phase.batch.micro_batch for phase in planned.train.phases] == [2, 1]  # 3 samples per replica in phase 2
    assert [phase.batch.global_batch for phase in planned.train.phases] == [None, 24]


def test_phases_in_tokens_have_other_steps_with_another_batch() -> None:
    """Regression: the sum of the phases' steps was kept, so that the last phase was trained with half of its tokens."""
    phases = [{"steps": "640 tokens"}, {"steps": "1280 tokens", "batch": {"global_batch": 8}}]
    content = {**TINY, "train": {"run_dir": "runs/x", "phases": phases}}
    run = load_run(content)
    assert run.config.train.steps == 20  # 10 steps of 4 sequences with 16 tokens, then 10 of 8 sequences
    assert run.with_({"batch.global_batch": 2}).config.train.steps == 30
    assert load_run(run.to_dict()).config == run.config
    planned = plan(run, nodes=1, global_batch=16).to_run().config
    assert planned.train.steps == 13 and planned.batch.global_batch == 16


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[int]]:
    seen: list[int] = []
    run_dir = tmp_path_factory.mktemp("library") / "run"
    result = train(tiny(run_dir), on_step=lambda row: seen.append(row["step"]), show_progress=False)
    return result, seen


def test_training_returns_losses_and_the_last_checkpoint(trained: tuple[Result, list[int]]) -> None:
    result, seen = trained
    assert result.finished and seen == [1, 2, 3, 4, 5, 6]
    assert list(result.losses) == seen
    assert result.checkpoint == result.run_dir / "checkpoints" / "step_00000006"
    assert result.checkpoint.is_dir()
    assert len(frontier_llm.read_metrics(result.run_dir)) == 6
    (found,) = frontier_llm.list_runs(result.run_dir.parent)
    assert (found["model"], found["step"], found["steps"]) == ("tiny", 6, 6)


def test_a_checkpoint_is_a_module(trained: tuple[Result, list[int]]) -> None:
    model = open_checkpoint(trained[0].run_dir)
    tokens_BS = torch.randint(0, 300, (2, 16))
    logits_BSV = model(tokens_BS)
    assert logits_BSV.shape == (2, 16, 300)
    log_probabilities = logits_BSV.log_softmax(-1)
    (likelihood,) = score(model, [(tokens_BS[0, :3].tolist(), tokens_BS[0, 3:5].tolist())])
    expected = sum(float(log_probabilities[0, place - 1, tokens_BS[0, place]]) for place in (3, 4))
    assert likelihood.log_probability == pytest.approx(expected, rel=1e-5)
    model._tokenizer = load_tokenizer("bytes")
    assert score(model, [("ab ", "c")]) == score(model, [([97, 98], [32, 99])])  # the space belongs to " c"
    with pytest.raises(FrontierError, match="has no tokens") as caught:
        score(model, [("ab", "c"), ("ab", "")])
    assert caught.value.why == "pairs[1]"
    text = model.generate("ab", max_new_tokens=12)
    assert len(text) > 3 and model.generate("ab", stops=text[2] + "\0", max_new_tokens=12) == text
    for faulty, name in (({"windows": -1}, "windows"), ({"batch_size": 0}, "batch_size")):
        with pytest.raises(FrontierError, match="expected at least") as caught:
            frontier_llm.evaluate(model, **faulty)
        assert caught.value.why == name
    with pytest.raises(FrontierError, match="missing"):
        frontier_llm.evaluate(model, Path("missing"))
    with pytest.raises(FrontierError, match="17 tokens are more than the model's sequence length 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))
    ours = model.state_dict(names="run")
    theirs = model.state_dict(names="huggingface")
    assert torch.equal(theirs["model.embed_tokens.weight"][:300], ours["embedding.token.weight"][:300])


def test_a_damaged_checkpoint_is_refused_unless_it_is_not_verified(
    trained: tuple[Result, list[int]], tmp_path: Path
) -> None:
    copy = tmp_path / "step_00000006"
    assert trained[0].checkpoint is not None
    shutil.copytree(trained[0].checkpoint, copy)
    shard = next(copy.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(FrontierError, match=shard.name):
        open_checkpoint(copy)
    opened = open_checkpoint(copy, verify=False)
    assert opened.config.name == "tiny"
    shutil.rmtree(copy)  # as a run deletes its old checkpoints
    with pytest.raises(FrontierError, match="was deleted"):
        opened.state_dict(names="huggingface")


def test_ctrl_c_before_the_run_has_begun_is_no_failure() -> None:
    for interruption, code in (([KeyboardInterrupt], EXIT_INTERRUPTED), ([], 130)):
        child = object.__new__(_Child)
        child.process = Mock(returncode=-SIGINT)
        assert child.wait(Mock(new=Mock(side_effect=[*interruption, []])), None, None) == code


def test_new_rows_begin_after_the_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "step", "step": step, "loss": 1.0}) + "\n" for step in range(1, 6)]
    path.write_text(lines[0] + lines[1][:-9])
    rows = _Rows(path)
    assert rows.new() == []
    path.write_text(lines[0] + "no JSON\n" + lines[2] + lines[3][:-2])  # the run has removed the incomplete line
    assert [row["step"] for row in rows.new()] == [3]
    path.write_text(lines[4])  # the file is another one
    assert [row["step"] for row in rows.new()] == [5] and rows.new() == []


@pytest.mark.thorough
def test_ctrl_c_saves_and_the_same_call_continues(tmp_path: Path) -> None:
    def interrupt(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            raise KeyboardInterrupt

    run = tiny(tmp_path / "run", **{"train.steps": 400})
    stopped = train(run, on_step=interrupt, show_progress=False)
    assert not stopped.finished and stopped.checkpoint is not None
    last = max(stopped.losses)
    assert 2 <= last < 400
    finished = train(run.with_({"train.steps": last + 1}), show_progress=False, allow_change=["train.steps"])
    assert finished.finished and max(finished.losses) == last + 1


@pytest.mark.thorough
def test_a_killed_rank_is_named_and_the_caller_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRONTIER_LLM_FAILPOINTS", "train.step@1#2=kill")
    with pytest.raises(RankFailure) as caught:
        train(tiny(tmp_path / "run", **{"parallel.tensor": 2}), show_progress=False)
    assert caught.value.why == "rank 1"
    assert "SIGKILL" in caught.value.what
    assert str(tmp_path / "run" / "logs") in caught.value.fix


def test_a_refused_run_raises_the_error_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(FrontierError) as caught:
        train(tiny(tmp_path / "run", **{"parallel.tensor": 3}), show_progress=False)
    assert "3" in caught.value.what and caught.value.fix


@pytest.mark.thorough
def test_ranks_end_with_the_calling_process(tmp_path: Path) -> None:
    """The calling process exits in the second step without a message to its rank. The rank, a child process, saves a
    checkpoint and ends long before the last step.
    """
    run_dir = tmp_path / "run"
    program = (
        "import os, frontier_llm\n"
        f"run = frontier_llm.load_run({TINY!r}, {{'train.run_dir': {str(run_dir)!r}, 'train.steps': 100000}})\n"
        "frontier_llm.train(run, on_step=lambda row: os._exit(7) if row['step'] == 2 else None)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # The pipe is open until the last process that holds it has ended.
    done = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=False)
    assert done.returncode == 7
    saved = run_dir / "checkpoints"
    until_s = time.monotonic() + 120  # a run that never ends fails the test after 120 s
    while not any(saved.glob("step_*[0-9]")) and time.monotonic() < until_s:
        time.sleep(0.2)
    assert any(saved.glob("step_*[0-9]"))


@pytest.mark.exhaustive
@pytest.mark.thorough
def test_the_example_trains_on_tp2_pp2_and_resumes_on_dp4(tmp_path: Path) -> None:
    example = ROOT / "docs" / "examples" / "own_loop.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 40
    outputs = []
    for layout in ('{"parallel.tensor": 2, "parallel.pipeline": 2}', '{"parallel.data": 4}'):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(example), layout],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        outputs.append(done.stdout)
    assert "step 10: loss" in outputs[0] and "step 20: loss" in outputs[1]


def test_the_reference_page_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "library_reference.py"), "--check"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
