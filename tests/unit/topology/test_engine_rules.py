"""Settings that the other engines do not support are refused before a rank starts, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from frontier_llm.config import BatchConfig, RunConfig, load_model
from frontier_llm.errors import LayoutError
from frontier_llm.topology.plan import make_plan, plan_problems
from frontier_llm.topology.traffic import step_traffic


def problems(world_size: int, **sections: dict[str, Any]) -> list[str]:
    config = RunConfig(model=load_model("llama-tiny"), batch=BatchConfig(global_batch=8), **sections)  # type: ignore[arg-type]
    return [f"{problem.where}: {problem.what}; {problem.fix}" for problem in plan_problems(config, world_size)]


DEEPSPEED = {"engine": "deepspeed"}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"parallel": {"data_mode": "fsdp", "pipeline": 2}},
            "parallel.pipeline: 2 stages cannot be combined with fsdp, ",
        ),
        ({"parallel": {"context": 2}, "optimizer": DEEPSPEED}, "optimizer.engine: deepspeed with context 2"),
        (
            {"parallel": {"data_mode": "fsdp"}, "optimizer": DEEPSPEED},
            "parallel.data_mode: is fsdp, which cannot be combined with the engine deepspeed",
        ),
        ({"parallel": {"zero": 2}}, "parallel.zero: 2 is not supported: "),
        ({"parallel": {"zero": 3}, "optimizer": DEEPSPEED}, "parallel.zero: 3 is not supported: "),
        ({"optimizer": {"name": "adamv"}}, "optimizer.name: 'adamv' is not an optimizer; did you mean 'adamw'?"),
        (
            {"parallel": {"zero": 0}, "optimizer": DEEPSPEED},
            "parallel.zero: is 0, but the engine deepspeed needs ZeRO-1",
        ),
        ({"precision": {"dtype": "fp16"}, "optimizer": DEEPSPEED}, "precision.dtype: fp16 with the engine deepspeed"),
        (
            {"optimizer": {"deepspeed_config": "ds.json"}},
            "optimizer.deepspeed_config: is given, but the engine is native",
        ),
        (
            {"parallel": {"data_mode": "fsdp", "tensor": 2}, "comm": {"in_flight": "one"}},
            "comm.in_flight: fsdp's collectives would overlap with those of parallel.tensor, "
            "and only one communication may be in flight on local",
        ),
        (
            {"parallel": {"data_mode": "fsdp", "data_shard": 1}, "machine": "lumi"},
            "comm.in_flight: fsdp's collectives would overlap with those of parallel.data_shard (sums over the "
            "copies), and only one communication may be in flight on lumi",
        ),
        (
            {"parallel": {"data_mode": "fsdp", "context": 2}, "machine": "frontier"},
            "comm.in_flight: fsdp's collectives would overlap with those of parallel.context, ",
        ),
    ],
)
def test_refused(sections: dict[str, Any], expected: str) -> None:
    found = problems(2, **sections)
    assert len(found) == 1 and found[0].startswith(expected), found


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"data_mode": "fsdp", "tensor": 2}},
        {"parallel": {"tensor": 2}, "optimizer": DEEPSPEED},
        {"parallel": {"data_mode": "fsdp"}, "machine": "frontier", "comm": {"in_flight": "many"}},
        {"machine": "frontier"},
        {"parallel": {"data_mode": "fsdp"}, "machine": "frontier"},
        {"parallel": {"data_mode": "fsdp"}, "machine": "lumi"},
        {"optimizer": DEEPSPEED, "machine": "frontier"},
        {"parallel": {"tensor": 2}, "optimizer": DEEPSPEED, "machine": "lumi"},
        {"parallel": {"pipeline": 2, "schedule": "zb-h1"}, "optimizer": DEEPSPEED},
    ],
)
def test_allowed(sections: dict[str, Any]) -> None:
    assert problems(4, **sections) == []


@pytest.mark.parametrize(
    ("settings", "engine"), [({"data_mode": "fsdp"}, "fsdp"), ({}, "deepspeed")], ids=["fsdp", "deepspeed"]
)
def test_no_communication_is_predicted_for_an_engine_that_the_ledger_does_not_count(
    settings: dict[str, Any], engine: str
) -> None:
    optimizer = DEEPSPEED if engine == "deepspeed" else {}
    config = RunConfig(
        model=load_model("llama-tiny"),
        batch=BatchConfig(global_batch=8),
        parallel=settings,  # type: ignore[arg-type]
        optimizer=optimizer,  # type: ignore[arg-type]
    )
    with pytest.raises(LayoutError, match=f"{engine} starts collectives of its own"):
        step_traffic(config, make_plan(config, 8), 0)
