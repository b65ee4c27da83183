"""Tests of the section "types": layouts that pass, planted faults, faults of plugins, and options that are left out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from frontier_llm import log
from frontier_llm.certificate.axis_types.check import check_axis_types
from frontier_llm.certificate.axis_types.small import small_copy
from frontier_llm.certificate.axis_types.step import run_step
from frontier_llm.certificate.axis_types.trace import text_of, visible
from frontier_llm.certificate.section import SectionVerdict
from frontier_llm.config import load_run
from tests.harness.axis_faults import FAULTS, LAYOUTS, NOT_FOUND, SABOTAGE_LAYOUTS, Fault, check
from tests.harness.marks import but_first
from tests.harness.planted import planted
from tests.parity.cases import Case, pairwise
from tests.parity.sabotage import SABOTAGES

# functions of which one fault each is planted in everyday tests
EVERYDAY = ("multiply_and_reduce", "Zero.squared_norm_share", "GradientSync._start_sum")
_FIRST = [next(fault for fault in FAULTS if fault.function == function) for function in EVERYDAY]
BY_NODE = ("parallel.expert=2", "parallel.expert_all_to_all=hierarchical")
_SETTINGS = {
    "gather": Case("llama", tp=2, cp=2, settings=("parallel.context_attention=gather",)),
    "ring": Case("llama", tp=2, cp=2, sequence_parallel=True, settings=("parallel.context_attention=ring",)),
    "heads": Case("llama", cp=2, dp=2, settings=("parallel.context_attention=heads",)),
    "documents": Case("gpt", tp=2, cp=2, pp=2, documents=True, settings=("parallel.context_attention=gather",)),
    "olmo2": Case("olmo2", tp=2, pp=2, sequence_parallel=True),
    "gemma2": Case("gemma2", tp=2, pp=2, sequence_parallel=True),
    "experts": Case("mixtral", tp=2, dp=2, settings=("parallel.expert=2",)),
    "by node": Case("olmoe", tp=2, dp=2, settings=BY_NODE),
    "etp": Case("mixtral", tp=2, dp=2, settings=("parallel.expert=2", "parallel.expert_tensor=2")),
    "shared expert": Case("deepseek", tp=2, dp=2, pp=2, sequence_parallel=True, settings=("parallel.expert=2",)),
    "experts and cp": Case("deepseek", tp=2, cp=2, settings=("parallel.expert=2",)),
    "balance": Case("mixtral", tp=2, dp=2, settings=("parallel.expert=2", "model.moe.balance=global")),
    "muon": Case("llama", tp=2, dp=2, settings=("optimizer.name=muon",)),
    "adafactor": Case("gpt", tp=2, dp=2, sequence_parallel=True, settings=("optimizer.name=adafactor",)),
    "wire": Case("llama", tp=2, dp=2, settings=("optimizer.name=lion", "precision.gradient_wire=bf16")),
    "dropout and z": Case("gpt", tp=2, settings=("model.dropout=0.1", "train.loss_weights={output-z: 0.01}")),
    "dualpipe": Case("llama", pp=2, dp=2, schedule="dualpipe-v"),
    "three stages": Case("llama", tp=2, pp=4, sequence_parallel=True, schedule="interleaved"),
}


def _passes(case: Case) -> None:
    section = check_axis_types(case.config(), case.world_size)
    assert section.verdict is SectionVerdict.PASSED, section.problems


def test_a_layout_with_all_axes_passes() -> None:
    case = Case("gpt", tp=2, pp=2, dp=2, sequence_parallel=True)
    section = check_axis_types(case.config(), case.world_size)
    assert section.verdict is SectionVerdict.PASSED, section.problems
    assert "8 simulated ranks, tp 2 x cp 1 x pp 2 x dp 2" in section.evidence[0]
    assert all(letter in section.evidence[1] for letter in "RVP")


@pytest.mark.thorough
@pytest.mark.parametrize("case", but_first(pairwise()[:40], in_ci=8), ids=str)  # the 40 contain all settings
def test_no_layout_of_the_parity_tests_is_refused(case: Case) -> None:
    _passes(case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", _SETTINGS.values(), ids=_SETTINGS)
def test_no_further_option_is_refused(case: Case) -> None:
    _passes(case)


def _is_named(fault: Fault) -> None:
    section, names_the_line = check(fault)
    assert section.verdict is SectionVerdict.REFUSED
    assert names_the_line, section.problems


@pytest.mark.parametrize("fault", _FIRST, ids=str)
def test_a_planted_fault_is_named(fault: Fault) -> None:
    _is_named(fault)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in _FIRST], ids=str)
def test_each_planted_fault_is_named(fault: Fault) -> None:
    _is_named(fault)


def _recorded(case: Case) -> list[tuple[object, ...]]:
    with log.quiet():
        ranks = run_step(small_copy(case.config(), case.world_size))
    return [
        (event.id, text_of(visible(event.site)), event.operation, event.sources)
        for record in ranks
        for event in record.recorder.events
    ]


@pytest.mark.thorough
def test_records_do_not_depend_on_addresses_or_on_earlier_runs() -> None:
    """If the recorder mistook a new tensor for a freed tensor at the same address, it would name a random line."""
    case = LAYOUTS["moe"]
    first = _recorded(case)
    held = [torch.zeros(3) for _ in range(1000)]
    del held[::2]  # the second run gets other addresses
    assert _recorded(case) == first


_SHOW_LINES = """
from tests.harness.axis_faults import FAULTS, check
for fault in FAULTS:
    if fault.function in ("_add_up", "_Combine.backward", "take_part"):
        print(fault, [(problem.where, problem.what) for problem in check(fault)[0].problems])
"""


@pytest.mark.exhaustive
@pytest.mark.thorough
def test_the_named_line_does_not_depend_on_the_order_of_hashes() -> None:
    command = [sys.executable, "-c", _SHOW_LINES]
    texts = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert texts[0].count(b"\n") == 3


@pytest.mark.thorough
@pytest.mark.parametrize("name", SABOTAGE_LAYOUTS)
def test_the_sabotages_of_the_parity_tests_are_refused(name: str) -> None:
    case = SABOTAGE_LAYOUTS[name]
    with SABOTAGES[name]():
        section = check_axis_types(case.config(), case.world_size)
    assert section.verdict is (SectionVerdict.PASSED if name in NOT_FOUND else SectionVerdict.REFUSED)


NOT_CHECKABLE = {
    "parallel.data_mode": Case("llama", dp=2, settings=("parallel.data_mode=fsdp",)),
    "optimizer.engine": Case("llama", dp=2, settings=("optimizer.engine=deepspeed",)),
    "model.moe.capacity": Case("mixtral", dp=2, settings=("model.moe.capacity=1.0",)),
    "parallel.expert_tensor": Case("olmoe", tp=4, settings=("parallel.expert=2", "parallel.expert_tensor=2")),
}


@pytest.mark.parametrize("option", NOT_CHECKABLE)
def test_options_that_the_simulated_ranks_cannot_run_are_named(option: str) -> None:
    case = NOT_CHECKABLE[option]
    section = check_axis_types(case.config(), case.world_size)
    assert section.verdict is SectionVerdict.NOT_CHECKABLE
    assert option in section.why


def test_a_fault_of_stages_without_embedding_and_head_is_found() -> None:
    inner = "(_sum(x, added) if self.spec.embedding or self.spec.head else x)"
    with planted("frontier_llm.model.stage", "Stage._blocks", "return _sum(x, added)", f"return {inner}"):
        _passes(Case("gpt", pp=2))  # the layout has no stage of this kind
        case = Case("gpt", pp=4)
        section = check_axis_types(case.config(), case.world_size)
    assert section.verdict is SectionVerdict.REFUSED
    assert "pp 3" in check_axis_types(case.config(), case.world_size).evidence[0]


@pytest.mark.thorough
def test_shipped_run_of_3072_ranks_passes() -> None:
    section = check_axis_types(load_run("train_1t"), 3072)
    assert section.verdict is SectionVerdict.PASSED, section.problems


def _fail(*_: object) -> None:
    raise RuntimeError("this plugin needs a GPU")


def test_a_step_that_fails_on_one_rank_is_not_checkable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout cannot be the cause, because the step already fails on one rank. `submit --force types` must therefore
    be possible.
    """
    monkeypatch.setattr("frontier_llm.certificate.axis_types.check.run_step", _fail)
    section = check_axis_types(Case("llama", tp=2).config(), 2)
    assert section.verdict is SectionVerdict.NOT_CHECKABLE
    assert "the step on one rank fails: RuntimeError: this plugin needs a GPU" in section.why


@pytest.mark.thorough
def test_tokens_that_travel_by_node_are_checked() -> None:
    case = Case("mixtral", tp=2, settings=BY_NODE)
    _passes(case)
    call = "travel = leave(grads[0], ctx.plan)"
    doubled = "travel = leave(grads[0] * 2, ctx.plan)"
    with planted("frontier_llm.parallel.expert.dispatch", "_Combine.backward", call, doubled):
        assert check_axis_types(case.config(), case.world_size).verdict is SectionVerdict.REFUSED
