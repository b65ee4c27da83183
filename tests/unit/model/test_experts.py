"""The all-to-all of rows overlaps the shared expert."""

from __future__ import annotations

import importlib
from typing import Any
from unittest.mock import patch

import torch

from frontier_llm.comm import serial_mesh
from frontier_llm.config import RunConfig, build, load_model
from frontier_llm.parallel.expert import Dispatch
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import build_state
from tests.unit.planner.costs.test_activations import Source

# The package has a function with the module's name, so a plain import would return the function.
dispatch = importlib.import_module("frontier_llm.parallel.expert.dispatch")


def test_the_shared_expert_is_between_the_rows_departure_and_their_arrival() -> None:
    """The backward of the shared expert also lies between start and end of the gradients' all-to-all, so that both are
    overlapped.
    """
    model = load_model("moe-tiny", {"layers": 1, "moe": {"shared_hidden": 32}})
    batch = {"global_batch": 1, "micro_batch": 1}
    config = build(
        RunConfig,
        {"model": model.model_dump(), "batch": batch, "train": {"device": "cpu"}, "precision": {"dtype": "fp32"}},
    )
    state = build_state(config, make_plan(config, 1), serial_mesh(), torch.device("cpu"), Source(config))
    order: list[str] = []

    class Noted(dispatch.Travel):  # type: ignore[name-defined,misc]
        def __init__(self, rows: torch.Tensor, plan: Dispatch, back: bool) -> None:
            super().__init__(rows, plan, back)
            self.name = "home" if back else "there"
            order.append(f"{self.name}: begins")

        def end(self) -> torch.Tensor:
            order.append(f"{self.name}: ends")
            rows: torch.Tensor = super().end()
            return rows

    def note(what: str) -> Any:
        return lambda *_: order.append(what)

    shared = state.stages[0].blocks[0].moe.shared  # type: ignore[union-attr]
    shared.register_forward_hook(note("shared expert"))  # type: ignore[union-attr]
    shared.register_full_backward_hook(note("shared expert's gradient"))  # type: ignore[union-attr]
    state.sync.begin()
    with patch.object(dispatch, "Travel", Noted):
        state.stages[0](None, state.feed.step(0)(0)).output.backward()
    rows_and_weights = ["there: begins"] * 2 + ["shared expert"] + ["there: ends"] * 2
    gradients = ["home: begins"] * 2 + ["shared expert's gradient"] + ["home: ends"] * 2
    assert order == [*rows_and_weights, "home: begins", "home: ends", "there: begins", "there: ends", *gradients]
