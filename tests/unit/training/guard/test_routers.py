"""A collapsed router is reported once, with a remedy. A router whose load fluctuates is not reported."""

from __future__ import annotations

import torch

from frontier_llm.config import load_model
from frontier_llm.training.guard import RouterWatch
from frontier_llm.training.routing import PATIENCE, summary

MODEL = load_model("moe-tiny")  # 8 experts; each token goes to 2


def routing(share: float) -> dict:
    """Return the summary of a step in which one expert of layer 2 receives this share of 100 tokens."""
    load_LE = torch.full((4, 10), 25.0, dtype=torch.float64)
    load_LE[2, 0] = 100 * share
    load_LE[2, 1:8] = (200 - 100 * share) / 7
    load_LE[:, 8], load_LE[:, 9] = 100 * 2.0, 0.0
    return summary(load_LE.numpy(), MODEL)


def test_the_figures_of_a_step() -> None:
    even = routing(0.25)
    collapsed = routing(1.0)
    assert even["largest_over_mean"] == [1.0] * 4 and even["entropy"] == [2.0] * 4
    assert round(collapsed["largest_over_mean"][2], 9) == 4.0 and abs(sum(collapsed["rows_per_expert"]) - 4 * 200) < 8


def test_a_collapse_is_said_once_until_the_router_recovers() -> None:
    watch = RouterWatch(MODEL)
    assert not any(watch.step(routing(0.9)) for _ in range(PATIENCE - 1))
    (found,) = watch.step(routing(0.9))
    assert found.layer == 2 and "90%" in str(found) and "balance_weight" in str(found)
    assert not any(watch.step(routing(0.9)) for _ in range(50))
    assert not any(watch.step(routing(0.5)) for _ in range(50))
    assert sum(len(watch.step(routing(0.9))) for _ in range(PATIENCE)) == 1


def test_a_dense_model_has_no_routers() -> None:
    assert list(RouterWatch(load_model("llama-tiny")).step({})) == []
