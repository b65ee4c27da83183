"""Tests of the step on the meta device: counts of shipped runs, and planted waits, copies and mixed devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from frontier_llm.certificate.axis_types.check import check_axis_types
from frontier_llm.certificate.device_step.count import NOT_COUNTED, DeviceCounts, count_device_step
from frontier_llm.certificate.section import SectionVerdict
from frontier_llm.config import load_run
from tests.harness.marks import but_first
from tests.harness.planted import planted
from tests.parity.cases import Case, pairwise

ON_FRONTIER = ("machine=frontier", "precision.dtype=bf16")
# The only place in a step where the host waits for the GPU: the sums of losses and norms.
SUMS = "at frontier_llm/training/step.py:"


def counts_of(*settings: str, **degrees: object) -> DeviceCounts:
    case = Case(settings=(*ON_FRONTIER, *settings), **{"family": "gpt", **degrees})  # type: ignore[arg-type]
    return count_device_step(case.config("bf16"), case.world_size)


def test_the_shipped_1t_run_waits_once_in_a_step() -> None:
    counts = count_device_step(load_run("train_1t"), 3072)
    assert counts.problems == ()
    layer, wait, *copies = counts.evidence
    assert layer.startswith("a layer launches for each microbatch: forward ")
    assert SUMS in wait and wait.endswith("(sum_over_world): 1 in each step")
    assert ["frontier_llm/training/feed.py" in copy for copy in copies] == [False, True]
    assert sum(sum(count.values()) for count in counts.by_line["launches_of_a_layer"].values()) > 20
    assert not torch.distributed.is_initialized()


UP = "self.up(x, add_bias=False)"


@pytest.mark.parametrize(
    "plant",
    [
        "self.up(x, add_bias=x.sum().item() < 0)",
        "self.up(x, add_bias=x.cpu() is None)",
        "self.up(x[list(range(len(x)))], add_bias=False)",
        "self.up(x, add_bias=x.new_tensor([1.0]).tolist() == [0.0])",
    ],
)
def test_a_planted_wait_is_listed_with_its_line(plant: str) -> None:
    with planted("frontier_llm.model.layers", "Mlp.forward", UP, plant) as lines:
        counts = counts_of()
    assert counts.problems == ()
    found = [line for line in counts.evidence if line.startswith("the host waits") and "layers.py" in line]
    assert len(found) == 1 and found[0].endswith("(Mlp.forward): 1 in the forward of each microbatch")
    assert int(found[0].split("layers.py:")[1].split()[0]) in lines


def test_a_copy_from_pageable_memory_waits() -> None:
    pinned = "tensor.pin_memory().to(self._device, non_blocking=True)"
    for plant in ("tensor.to(self._device)", "tensor.to(self._device, non_blocking=True)"):
        with planted("frontier_llm.training.feed", "Feed._tensor", pinned, plant):
            waits = [line for line in counts_of().evidence if line.startswith("the host waits")]
        assert any("frontier_llm/training/feed.py" in wait for wait in waits)


@pytest.mark.parametrize(
    ("module", "function", "call", "plant", "operation"),
    [
        ("frontier_llm.model.layers", "Mlp.forward", UP, f"({UP} + x.new_ones(48, device='cpu'))", "aten.add"),
        ("frontier_llm.model.layers", "Mlp.forward", "self.up.bias", "x.new_ones(48, device='cpu')", "gelu_forward"),
        (
            "frontier_llm.training.step",
            "sum_over_world",
            "all_reduce_(numbers, mesh.world)",
            "all_reduce_(torch.zeros(2), mesh.world)",
            "c10d.allreduce_",
        ),
    ],
)
def test_mixed_devices_are_refused_with_their_line(
    module: str, function: str, call: str, plant: str, operation: str
) -> None:
    with planted(module, function, call, plant) as lines:
        counts = counts_of(tp=2)
    assert [problem.what.split()[0] for problem in counts.problems] == [operation]
    place = counts.problems[0].where
    assert place.endswith(f"({function})") and int(place.split(":")[1].split()[0]) in lines


def test_the_section_is_refused_for_mixed_devices() -> None:
    """The section also runs a small copy of the model on the CPU, which cannot find mixed devices."""
    config = Case("gpt", settings=ON_FRONTIER).config("bf16")
    assert check_axis_types(config, 1).verdict is SectionVerdict.PASSED
    with planted("frontier_llm.model.layers", "Mlp.forward", UP, f"({UP} + x.new_zeros(1, device='cpu'))"):
        section = check_axis_types(config, 1)
    assert section.verdict is SectionVerdict.REFUSED
    assert "layers.py" in str(section.problems[0])


def test_arguments_that_torch_distributed_refuses_are_refused() -> None:
    """A message to a rank outside of the group."""
    with planted("frontier_llm.comm.group", "TorchGroup.send", "self._ranks[to], group", "self._ranks[to] + 1, group"):
        counts = counts_of(tp=2, pp=2)
    assert "torch.distributed refuses the call: ValueError" in counts.problems[0].what
    assert "frontier_llm/comm/group.py" in counts.problems[0].where


def test_a_shape_that_depends_on_values_is_named() -> None:
    with planted("frontier_llm.model.layers", "Mlp.forward", UP, "self.up(x, add_bias=x[x > 0] is None)"):
        counts = counts_of()
    assert counts.problems == ()
    assert counts.evidence[0].startswith(f"{NOT_COUNTED}: frontier_llm/model/layers.py:")


def test_a_machine_without_a_gpu_has_no_counts() -> None:
    config = Case("gpt").config()
    assert count_device_step(config, 1).evidence[0].startswith(f"{NOT_COUNTED}: machine=local")


def test_experts_of_other_ranks_wait_for_the_numbers_of_rows() -> None:
    counts = counts_of("parallel.expert=2", family="mixtral", dp=2)
    waits = [line for line in counts.evidence if line.startswith("the host waits")]
    assert any("_RowCounts.read): 1 in the forward of each microbatch" in wait for wait in waits)


@pytest.mark.thorough
@pytest.mark.parametrize("case", but_first(pairwise()[:40], 15, in_ci=15), ids=str)  # the 40 contain all settings
def test_every_layout_of_the_parity_tests_is_counted(case: Case) -> None:
    counts = count_device_step(replace(case, settings=(*ON_FRONTIER, *case.settings)).config("bf16"), case.world_size)
    assert counts.problems == () and counts.by_line["waits"], counts.evidence
