"""With one communication in flight, engines with communicators of their own take turns with this package."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frontier_llm.comm import Mesh, end_communication, serial_mesh
from frontier_llm.comm.group import OneInFlight
from frontier_llm.optim.deepspeed_zero import DeepSpeedZero
from frontier_llm.optim.fsdp import FullySharded

GPU = torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the order of communication and of the host's waits for the device."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.append("wait"))
    monkeypatch.setattr(torch, "as_tensor", lambda value, device: torch.tensor(value))
    return found


def mesh_with_one_in_flight() -> Mesh:
    mesh = serial_mesh()
    return replace(mesh, world=replace(mesh.world, in_flight=OneInFlight(torch.device("cpu"))))


def bare(kind: type, **attributes: Any) -> Any:
    """Return an engine with these attributes, without its communicators."""
    engine = kind.__new__(kind)
    vars(engine).update(device=GPU, _mesh=mesh_with_one_in_flight(), updates=0, **attributes)
    return engine


def test_the_host_waits_only_if_one_communication_may_be_in_flight(calls: list[str]) -> None:
    end_communication(serial_mesh(), GPU)
    end_communication(mesh_with_one_in_flight(), torch.device("cpu"))
    assert calls == []
    end_communication(mesh_with_one_in_flight(), GPU)
    assert calls == ["wait"]


def test_fsdp_begins_behind_our_communication_and_ends_before_it(calls: list[str]) -> None:
    engine = bare(FullySharded, _shards=[], _has_copies=False)
    engine.begin()
    calls.append("forward and backward")
    engine.finish()
    calls.append("sums over the world")
    assert calls == ["wait", "forward and backward", "wait", "sums over the world"]


def test_deepspeed_and_this_package_wait_for_each_other(calls: list[str]) -> None:
    zero = SimpleNamespace(
        use_grad_accum_attribute=False,
        scaled_global_norm=lambda: calls.append("norm of deepspeed") or 2.0,
        optimizer=SimpleNamespace(param_groups=[]),
        step=lambda: calls.append("step of deepspeed"),
        update_lp_params=lambda: calls.append("gather of deepspeed"),
    )
    deepspeed = SimpleNamespace(
        coalesce_grad_reduction=lambda: calls.append("sum of deepspeed") or nullcontext(), optimizer=zero
    )
    sync = SimpleNamespace(finish=lambda: calls.append("our sums"))
    more = {"_divided_by": 2, "_is_first": True, "_parameters": [], "_sync": sync}
    engine = bare(DeepSpeedZero, _zero=zero, _engine=deepspeed, **more)
    engine.finish()
    assert float(engine.squared_norm_share()) == 16.0
    calls.append("sums over the world")
    engine.step(1e-3, 1.0)
    calls.append("next forward")
    engine.weights_from_masters()
    assert calls == [
        "our sums",
        "wait",
        "sum of deepspeed",
        "norm of deepspeed",
        "wait",
        "sums over the world",
        "wait",
        "step of deepspeed",
        "wait",
        "next forward",
        "wait",
        "gather of deepspeed",
        "wait",
    ]
