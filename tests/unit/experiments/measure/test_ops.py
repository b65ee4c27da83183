"""Tests the contents of the output of `ops list` and `bench ops`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from frontier_llm.cli.main import main
from frontier_llm.config import load_model
from frontier_llm.config.schema import OpsConfig
from frontier_llm.errors import BackendError
from frontier_llm.experiments.measure.op_cases import CASES, Shapes
from frontier_llm.experiments.measure.ops import Timing, compare
from frontier_llm.experiments.measure.timing import kernel_s
from frontier_llm.ops import select_ops
from frontier_llm.ops.manifest import kernel_report
from frontier_llm.ops.reference import GROUPS


def test_list_names_every_op_and_one_choice_each(capsys):
    assert main(["ops", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    for group in GROUPS:
        rows = [row for row in listed["backends"] if row["op"] == group and row["device"] == "cpu"]
        assert sum(row["chosen"] for row in rows) == 1
        assert all(row["available"] or row["status"].startswith("no: ") for row in rows)
    assert set(listed["prebuilt"]) == {"gfx90a", "gfx942", "sm_80", "sm_90"}
    assert main(["ops", "list", "--dtype", "fp64"]) == 0
    assert "* attention      reference" in capsys.readouterr().out


def test_bench_times_both_sides_and_survives_a_broken_op():
    tiny = load_model("llama-tiny", {"sequence_length": 32})

    def broken(*_args):
        raise BackendError("no such kernel", "build it")

    ops = select_ops(OpsConfig(), "cpu", torch.float32).but(swiglu=broken)
    timings = {(timing.op, timing.way): timing for timing in compare(ops, tiny, 1, torch.float32, "cpu", rounds=1)}
    for op in ("attention", "attention_alibi", "rms_norm", "gelu", "cross_entropy", "adamw", "weight_gradient"):
        assert timings[op, "ours"].seconds > 0 and timings[op, "eager"].seconds > 0
    assert "no such kernel" in timings["swiglu", "ours"].error and timings["swiglu", "eager"].seconds > 0


@pytest.mark.parametrize("model", ["llama-tiny", "gpt-tiny"])  # one model with RMSNorm, one with LayerNorm
@pytest.mark.parametrize("tp", [1, 2])
def test_both_sides_of_a_case_compute_the_same(model, tp):
    shapes = Shapes(load_model(model, {"sequence_length": 32}), 2, torch.float32, torch.device("cpu"), tp)
    ops = select_ops(OpsConfig(), "cpu", torch.float32)
    for name in (
        "attention",
        "rms_norm",
        "layer_norm",
        "add_norm",
        "rope",
        "swiglu",
        "gelu",
        "gelu_tanh",
        "route",
        "linear",
        "linear_input_gradient",
    ):
        case = CASES[name](ops, shapes)
        torch.testing.assert_close(
            case.ours(*case.inputs),
            case.eager(*case.inputs),
            rtol=1e-4,
            atol=1e-4,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert CASES["linear"](ops, shapes).flops == 2 * shapes.rows * shapes.model.hidden * shapes.model.ffn_hidden / tp


def test_json_holds_no_nan_for_what_cannot_run(capsys, monkeypatch):
    failed = Timing("attention", "sdpa-cudnn", float("nan"), 0, 0.0, "RuntimeError: no viable backend")
    monkeypatch.setattr(
        "frontier_llm.experiments.measure.ops.compare",
        lambda *_: [failed, replace(failed, way="ours", seconds=0.5, error="")],
    )
    assert main(["bench", "ops", "--model", "llama-tiny", "--json"]) == 0
    ops = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["ops"]
    assert [(row["way"], row["seconds"]) for row in ops] == [("sdpa-cudnn", None), ("ours", 0.5)]


def test_a_gpu_is_timed_by_its_own_clock_while_the_host_is_ahead(monkeypatch):
    said = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            said.append("event")

        def elapsed_time(self, _end):
            return 20.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("wait"))
    assert kernel_s(lambda: said.append("run"), "cuda") == 0.002
    assert said == ["sleep", "event", *["run"] * 10, "event", "wait"]


def test_kernels_prints_the_report_or_how_to_build(capsys):
    try:
        lines = kernel_report("gfx90a")
    except BackendError:
        assert main(["ops", "kernels", "gfx90a"]) == 2
        assert "build_ops --arch gfx90a" in capsys.readouterr().err
        return
    assert main(["ops", "kernels", "gfx90a"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + sum(line["dtype"] == "bf16" for line in lines)
    assert all(1 <= line["waves_per_simd"] <= 8 for line in lines)
    assert (
        sum("unaligned" in line for line in printed)
        == sum(line["dtype"] == "bf16" and not line["aligned"] for line in lines)
        > 0
    )
