"""Tests precision.dtype=auto: the type follows from the device and its instructions. A resumed run keeps its type."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

from frontier_llm.cli.ranks import read_run
from frontier_llm.config import load_run
from frontier_llm.errors import FrontierError
from frontier_llm.machine import precision
from frontier_llm.machine.precision import problem_on_gpu, resolve_precision
from frontier_llm.ops import AttentionNeeds, select, sizes_of, working_dtype
from frontier_llm.ops.providers import PROVIDERS
from frontier_llm.run.complete import MANIFEST, MANIFEST_DIGEST, digest_line, step_name
from frontier_llm.training import device
from frontier_llm.training.agreement import RankReport, judge
from frontier_llm.training.device import DeviceError, choose_device


def resolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_bf16: bool, *words: str) -> str:
    monkeypatch.setattr(precision, "has_bf16_instructions", lambda: has_bf16)
    config = load_run("quickstart", [f"train.run_dir={tmp_path}", *words])
    return resolve_precision(config).precision.dtype


@pytest.mark.parametrize(
    ("has_bf16", "words", "dtype", "reason"),
    [
        (True, (), "bf16", "this CPU has bf16 instructions"),
        (False, (), "fp32", "has no bf16 instructions"),
        (False, ("train.device=cuda",), "bf16", "the device is a GPU"),
        (False, ("train.device=auto", "machine=frontier"), "bf16", "the device is a GPU"),
        (False, ("train.device=cpu", "machine=frontier"), "fp32", "has no bf16 instructions"),
    ],
)
def test_the_type_fits_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, has_bf16: bool, words, dtype: str, reason: str
) -> None:
    assert resolved(monkeypatch, tmp_path, has_bf16, *words) == dtype
    told = capsys.readouterr().err
    assert f"precision.dtype=auto: {dtype}, because" in told and reason in told


def test_a_type_by_name_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert resolved(monkeypatch, tmp_path, False, "precision.dtype=bf16") == "bf16"
    assert "auto" not in capsys.readouterr().err


def save(run_dir: Path, step: int, dtype: str) -> None:
    folder = run_dir / "checkpoints" / step_name(step)
    folder.mkdir(parents=True)
    manifest = {"progress": {"step": step}, "shards": [], "config": {"precision": {"dtype": dtype}}}
    content = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(content)
    (folder / MANIFEST_DIGEST).write_bytes(digest_line(content))


def test_a_resume_on_another_cpu_keeps_the_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    save(tmp_path, 100, "bf16")
    save(tmp_path, 200, "fp32")
    assert resolved(monkeypatch, tmp_path, True) == "fp32"
    assert "was trained in this precision" in capsys.readouterr().err
    (tmp_path / "checkpoints" / step_name(200) / MANIFEST).write_text("{}")  # damaged, so the older checkpoint counts
    assert resolved(monkeypatch, tmp_path, False) == "bf16"


def test_ranks_on_another_kind_of_cpu_are_named() -> None:
    reports = [RankReport(f"n{rank}", {"device": "cpu", "precision": "fp32"}) for rank in range(3)]
    reports.append(RankReport("n3", {"device": "cpu", "precision": "bf16"}))
    failure = judge(reports)
    assert failure is not None and failure.rank == 3
    text = "\n".join(failure.message)
    assert "rank 3 on n3 differs from most ranks: precision is bf16 instead of fp32" in text
    assert "set precision.dtype=" in text


def test_fp16_on_a_cpu_is_refused_before_ranks_start_and_by_each_rank(tmp_path: Path) -> None:
    words = ["precision.dtype=fp16", f"train.run_dir={tmp_path}"]
    with pytest.raises(FrontierError, match="6 to 140 times as long as in fp32") as refusal:
        read_run("quickstart", words, None)
    assert "precision.dtype=fp32" in refusal.value.fix and "ops.allow_fallback=true" in refusal.value.fix
    with pytest.raises(DeviceError, match="fp16 on a CPU"):
        choose_device(load_run("quickstart", words), None, None)
    accepted = read_run("quickstart", [*words, "ops.allow_fallback=true"], None)
    assert accepted.precision.dtype == "fp16" and choose_device(accepted, None, None).type == "cpu"
    assert read_run("quickstart", [*words, "machine=frontier", "train.device=auto"], None).precision.dtype == "fp16"


def test_a_type_without_attention_on_a_gpu_is_refused_as_the_selection_of_ops_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("flash_attn", "triton", "sdpa"):
        monkeypatch.setitem(PROVIDERS, name, dataclasses.replace(PROVIDERS[name], missing=lambda: ""))
    monkeypatch.setattr("frontier_llm.ops.sdpa.blocks_missing", lambda: "")
    flags = itertools.product((False, True), repeat=5)
    refusals = 0
    cases = itertools.product(("bf16", "fp16", "fp32"), (64, 320), flags)
    for dtype, head_dim, (softcap, window, alibi, documents, equal_bits) in cases:
        for context, way in ((1, "auto"), (2, "ring"), (2, "heads")):
            words = [
                f"precision.dtype={dtype}",
                f"model.head_dim={head_dim}",
                f"model.score_softcap={50.0 if softcap else 'null'}",
                f"model.sliding_window={64 if window else 'null'}",
                f"model.position={'alibi' if alibi else 'rope'}",
                f"data.reset_at_documents={documents}",
                f"ops.deterministic={equal_bits}",
                f"parallel.context={context}",
                f"parallel.context_attention={way}",
            ]
            config = load_run("quickstart", words)
            needs = AttentionNeeds(documents, parts=way == "ring", window=window, alibi=alibi, softcap=softcap)
            sizes = sizes_of(config.model)
            conditions = select.Conditions("cuda", working_dtype(dtype), needs, deterministic=equal_bits, sizes=sizes)
            chosen = select.choose("attention", "auto", conditions)
            problem = problem_on_gpu(config)
            assert (problem is None) == isinstance(chosen, select.ChosenBackend), words
            if problem is None:
                continue
            refusals += 1
            assert "only the reference does" in problem.what
            key, _, value = problem.fix.partition(",")[0].removeprefix("set ").removesuffix(" or lower").partition("=")
            repaired = load_run("quickstart", [*words, f"{key}={value}"])
            assert problem_on_gpu(repaired) != problem, words
    assert refusals > 20
    accepted = load_run("quickstart", ["precision.dtype=fp32", "model.score_softcap=50.0", "ops.attention=reference"])
    assert problem_on_gpu(accepted) is None


def test_a_soft_cap_in_fp32_is_refused_before_ranks_start_and_by_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["precision.dtype=fp32", "model.score_softcap=50.0", f"train.run_dir={tmp_path}"]
    message = "no fused attention on a GPU supports fp32 with a soft cap of attention's scores"
    with pytest.raises(FrontierError, match=message):
        read_run("quickstart", [*words, "machine=frontier", "train.device=auto"], None)
    assert read_run("quickstart", words, None).precision.dtype == "fp32"  # on this CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(device, "architecture_of_device", lambda index: "sm_90")
    monkeypatch.setattr(device, "_use", lambda index: None)
    with pytest.raises(DeviceError, match=message):
        choose_device(load_run("quickstart", [*words, "train.device=cuda"]), None, None)


def test_a_checkpoint_in_fp16_is_not_continued_on_a_cpu(tmp_path: Path) -> None:
    save(tmp_path, 100, "fp16")
    with pytest.raises(FrontierError, match="fp16 on a CPU"):
        read_run("quickstart", [f"train.run_dir={tmp_path}"], None)
