"""The algorithm of context-parallel attention is a choice of the planner. The planner enumerates the algorithms,
predicts their times, and writes its choice into the run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from frontier_llm.blueprint.layout import Layout, context_way
from frontier_llm.cli.main import main
from frontier_llm.config import load_run
from frontier_llm.config.load import load_model
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.planner.candidates import context_ways, enumerate_layouts
from frontier_llm.planner.costs.memory import peak_memory
from frontier_llm.planner.costs.time import step_s
from frontier_llm.planner.rejected import other_contexts

LONG = load_model("llama-3-8b", {"sequence_length": 65536})  # 8 key/value heads


def test_ways_that_heads_and_kernels_allow() -> None:
    assert context_ways(LONG, 2, 1) == ["auto"]
    assert context_ways(LONG, 2, 4) == ["gather", "ring", "heads"]
    assert context_ways(LONG, 4, 4) == ["gather", "ring"]
    assert context_ways(load_model("mpt-7b"), 2, 4) == ["gather", "ring", "heads"]
    windows = {"sliding_window": 4096}
    assert context_ways(load_model("llama-3-8b", windows), 2, 4) == ["heads"]
    assert context_ways(load_model("llama-3-8b", {**windows, "score_softcap": 50.0}), 2, 4) == [
        "gather",
        "ring",
        "heads",
    ]
    assert context_ways(LONG, 2, 4, "ring") == ["ring"] and context_ways(LONG, 4, 4, "heads") == []
    assert context_ways(LONG, 2, 4, "auto") == [context_way(LONG, 2, 4)]


def test_the_cheapest_way_is_written_into_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.yaml"
    fixed = ("tensor=2", "context=4", "pipeline=2", "micro_batch=1", "recompute=none", "schedule=1f1b")
    words = [
        "plan",
        "llama-3-8b",
        "model.sequence_length=65536",
        "--machine",
        "frontier",
        "--nodes",
        "8",
        "--emit",
        str(path),
    ]
    assert main([*words, *(f"--fix={choice}" for choice in fixed)]) == 0
    parallel = load_run(str(path)).parallel
    out = capsys.readouterr().out
    layout = Layout(tp=2, cp=4, pp=2, dp=4, microbatches=64, sequence_parallel=parallel.sequence_parallel)
    numbers = rates(load_machine("frontier"))
    seconds = {
        way: float(step_s(LONG, replace(layout, context_attention=way), numbers)) for way in ("gather", "ring", "heads")
    }
    assert len(set(seconds.values())) == 3 and parallel.context_attention == min(seconds, key=lambda way: seconds[way])
    others = seconds.keys() - {parallel.context_attention}
    assert (
        all(f"attention by {way}: the fastest layout that fits" in out for way in others)
        and f"attention by {parallel.context_attention}, " in out
    )


@pytest.mark.thorough
def test_131072_tokens_on_sixteen_nodes_get_a_layout_that_fits_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.yaml"
    assert (
        main(
            [
                "plan",
                "llama-3-8b",
                "model.sequence_length=131072",
                "--machine",
                "frontier",
                "--nodes",
                "16",
                "--emit",
                str(path),
            ]
        )
        == 0
    )
    config = load_run(str(path))
    out = capsys.readouterr().out
    assert config.model.sequence_length == 131072 and config.parallel.context > 1
    assert f"attention by {config.parallel.context_attention}, " in out


def test_memory_knows_the_way() -> None:
    """With the algorithm "heads", attention keeps its own output and the output that was sent back.

    With "gather", a rank holds keys and values of the complete sequence.
    """
    layout = Layout(tp=2, cp=4, recompute="none")
    numbers = rates(load_machine("frontier"))
    peaks = {
        way: float(peak_memory(LONG, replace(layout, context_attention=way), numbers))
        for way in ("gather", "ring", "heads")
    }
    assert len(set(peaks.values())) == 3


def test_a_choice_without_context_parallelism_is_not_compared_with_itself() -> None:
    """The choice comes from the simulation. By the closed form, another layout with context parallelism may be the
    fastest.
    """
    layouts = enumerate_layouts(LONG, 16, 64, 8, {"tp": 2, "recompute": "none"})
    seconds = np.where(layouts.cp > 1, 1.0, 1.01)
    split = int(np.argmax(layouts.cp > 1))
    assert other_contexts(layouts, seconds, layouts.row(int(np.argmax(layouts.cp == 1)))) == []
    lines = other_contexts(layouts, seconds, layouts.row(split))
    assert "CP1" in lines[0] and "takes 1.0 % longer" in lines[0], lines
