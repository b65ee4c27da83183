"""The scripts for tokenizing, evaluation and export run on a local Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.data.tokenize import TokenizeOptions, tokenize
from tests.harness.slurm import ROOT, LocalSlurm
from tests.slurm.test_train import TOY


def run_script(cluster: LocalSlurm, script: str, output: Path, *words: str, nodes: int = 1) -> str:
    """Run a committed script with one task per node. Returns its output."""
    options = (f"--nodes={nodes}", "--ntasks-per-node=1", "--partition=local", "--time=20", f"--output={output}")
    job_id = cluster.submit(*options, str(ROOT / "slurm" / script), *words, cwd=ROOT)
    job = cluster.wait_job(job_id, 300)
    text = output.read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), text
    return text


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_nodes_share_the_parts_of_a_dataset(cluster: LocalSlurm, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(6):
        (corpus / f"{number}.txt").write_text(f"text of file {number}\n" * 40_000)
    prefix = tmp_path / "data"
    words = (str(corpus), "--tokenizer", "bytes", "--output", str(prefix), "--shard-mib", "1", "--workers", "1")
    text = run_script(cluster, "tokenize.sbatch", tmp_path / "job.out", *words, nodes=2)
    assert all(f"{node} has finished its share, 3 parts" in text for node in ("n0", "n1")), text
    assert "6 of 6 parts exist already and are kept" in text
    tokenize([corpus], tmp_path / "alone", "bytes", TokenizeOptions(shard_bytes=1 << 20), workers=1)
    for ending in (".bin", ".idx"):
        assert Path(f"{prefix}{ending}").read_bytes() == (tmp_path / f"alone{ending}").read_bytes()
    again = run_script(cluster, "tokenize.sbatch", tmp_path / "again.out", *words, nodes=2)
    assert "nothing to do" in again and "finished its share" not in again


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_checkpoints_are_evaluated_and_exported(cluster: LocalSlurm, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text for training and evaluation\n" * 500)
    data = tmp_path / "data"
    tokenize([tmp_path / "text.txt"], data, "bytes", workers=1)
    run = tmp_path / "run"
    words = [
        *(word for word in TOY if not word.startswith("model.vocab")),
        "model.vocab_size=257",
        "parallel.tensor=1",
        "parallel.pipeline=1",
        "batch.global_batch=2",
        "train.steps=4",
        "train.save_interval=2",
        f"train.run_dir={run}",
        f"data.train={data}",
        f"data.validation={data}",
        "data.tokenizer=bytes",
    ]
    assert main(["train", "train_small", *words]) == 0
    text = run_script(cluster, "evaluate.sbatch", tmp_path / "evaluate.out", str(run), "--windows", "2")
    assert text.index("evaluating") < text.rindex("evaluating")
    for step in (2, 4):
        result = json.loads((run / "evaluations" / f"step_{step:08}.json").read_text())
        assert result["held_out"][0]["dataset"] == str(data) and result["held_out"][0]["loss"] > 0
    assert "evaluating" not in run_script(cluster, "evaluate.sbatch", tmp_path / "again.out", str(run))
    run_script(cluster, "export.sbatch", tmp_path / "export.out", str(run), str(tmp_path / "exported"))
    assert (tmp_path / "exported" / "model.safetensors").is_file()
