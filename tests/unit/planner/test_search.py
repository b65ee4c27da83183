"""The planner's choices and refusals. The planner reproduces the findings of the ORNL paper, which are not among its
inputs.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.blueprint.layout import SHARDING, Layout, layout_of, run_keys
from frontier_llm.config import ModelConfig
from frontier_llm.config.load import build, load_model, load_run
from frontier_llm.config.schema import RunConfig
from frontier_llm.errors import ConfigError, LayoutError
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.machine.rates import Rates
from frontier_llm.planner import compare, steps
from frontier_llm.planner.breakdown import breakdown
from frontier_llm.planner.candidates import enumerate_layouts, legal_node_counts, parse_fixed
from frontier_llm.planner.choice import RESOLUTION, TIE, preference
from frontier_llm.planner.costs.layouts import as_table
from frontier_llm.planner.costs.memory import memory_by_rank, peak_memory
from frontier_llm.planner.costs.time import step_s
from frontier_llm.planner.emit import Request, emit
from frontier_llm.planner.refusal import check_found, default_nodes
from frontier_llm.planner.report import layout_words
from frontier_llm.planner.search import Search, default_global_batch, search, simulate_layout, smallest_machine
from frontier_llm.topology.plan import plan_problems, split_layers

FRONTIER = rates(load_machine("frontier"))
ORNL = rates(load_machine("frontier"), "megatron-deepspeed")


def layout(**changes: Any) -> Layout:
    return Layout(**{"tp": 4, "pp": 4, "dp": 2, "microbatches": 16, "recompute": "full", **changes})


def speed(model: str, numbers: Rates = ORNL, **changes: Any) -> float:
    return simulate_layout(load_model(model), layout(**changes), numbers).tokens_per_s_per_device


def test_recomputing_every_second_layer_is_priced_between_all_and_none() -> None:
    model = load_model("gpt-22b")
    half, all_of_them, none = (layout(**one) for one in ({"recompute": "full,none"}, {}, {"recompute": "none"}))
    memory = [float(peak_memory(model, one, FRONTIER)) for one in (all_of_them, half, none)]
    seconds = [simulate_layout(model, one, FRONTIER).step_s for one in (none, half, all_of_them)]
    assert memory == sorted(set(memory)) and seconds == sorted(set(seconds))
    asked = enumerate_layouts(model, 64, 64, 8, parse_fixed(["recompute=full,none"]))
    assert set(asked.recompute.tolist()) == {"full,none"}


def test_modes_that_repeat_are_priced_by_each_stage_s_own_layers() -> None:
    """With the modes "full,none", two of three layers are recomputed on the first stage, and one of two on the second.

    The predictions for a single layout equal those for the same layout in a table.
    """
    model = load_model("gpt-22b", {"layers": 5})
    stages = split_layers(model, 2, (3, 2))
    mixed, full, none = (layout(pp=2, recompute=modes) for modes in ("full,none", "full", "none"))
    activations = [
        [lines["activations"] for lines in memory_by_rank(model, one, FRONTIER, stages)] for one in (mixed, full, none)
    ]
    backward = [
        [one.backward_s for one in simulate_layout(model, one, FRONTIER, (3, 2)).simulated.stage_times]
        for one in (mixed, full, none)
    ]
    for part, all_of_it, nothing in (activations, backward):
        assert part[0] == pytest.approx((2 * all_of_it[0] + nothing[0]) / 3)
        assert part[1] == pytest.approx((all_of_it[1] + nothing[1]) / 2)
    table = as_table([mixed, full, layout(pp=1, recompute="full,none")])
    assert peak_memory(model, table, FRONTIER)[0] == pytest.approx(float(peak_memory(model, mixed, FRONTIER)))
    assert step_s(model, table, FRONTIER)[0] == pytest.approx(float(step_s(model, mixed, FRONTIER)))


# --------------------------------------------------------------------------------------------- lessons


@pytest.mark.parametrize("numbers", [FRONTIER, ORNL], ids=["this package", "2023"])
@pytest.mark.parametrize("model", ["gpt-22b", "gpt-175b", "gpt-1t"])
def test_tp_beyond_the_node_loses(model: str, numbers: Rates) -> None:
    pp = {"gpt-22b": 4, "gpt-175b": 8, "gpt-1t": 16}[model]
    eight, sixteen = (speed(model, numbers, tp=tp, pp=pp, dp=32 // tp, microbatches=4 * pp) for tp in (8, 16))
    assert sixteen < 0.97 * eight


@pytest.mark.parametrize("numbers", [FRONTIER, ORNL], ids=["this package", "2023"])
def test_more_microbatches_at_fixed_pp_win(numbers: Rates) -> None:
    curve = [speed("gpt-175b", numbers, tp=8, pp=16, microbatches=m) for m in (16, 32, 64, 128, 256)]
    assert curve == sorted(curve)
    assert curve[-1] > 1.5 * curve[0]


# With one communication in flight each message adds time, so that thin stages pay more. The law of pp / m holds only
# with many in flight.
@pytest.mark.parametrize("numbers", [replace(FRONTIER, one_in_flight=False), ORNL], ids=["this package", "2023"])
def test_more_pp_at_a_fixed_global_batch_loses(numbers: Rates) -> None:
    curve = [speed("gpt-22b", numbers, tp=8, pp=pp, dp=2, microbatches=32) for pp in (2, 4, 8, 16)]
    assert curve == sorted(curve, reverse=True)
    held = [speed("gpt-22b", numbers, tp=8, pp=pp, dp=2, microbatches=8 * pp) for pp in (4, 8, 16)]
    assert min(held) > 0.85 * max(held)  # a constant pp/m nearly keeps the throughput


def test_flash_attention_pays_at_sequence_2048() -> None:
    """ORNL measured a gain of about 30 % over softmax in separate kernels.

    The 22B model in their scripts has 96 heads. The one in the paper has 48 heads, and therefore half the attention
    scores.
    """
    separate = replace(ORNL, attention="unfused", fused_softmax=False)

    def gain(heads: int, tp: int) -> float:
        model = load_model("gpt-22b", {"heads": heads})
        spread = layout(tp=tp, pp=8, microbatches=32)
        fused, plain = (simulate_layout(model, spread, numbers).step_s for numbers in (ORNL, separate))
        return plain / fused - 1

    assert all(0.25 < gain(96, tp) < 0.45 for tp in (2, 4, 8))
    assert all(0.12 < gain(48, tp) < 0.25 for tp in (1, 2, 4))


@pytest.mark.parametrize(
    ("model", "nodes", "batch", "recipe"),
    [
        ("gpt-22b", 16, 512, {"tp": 4, "pp": 8, "dp": 4, "micro_batch": 2, "microbatches": 64}),
        ("gpt-175b", 128, 10240, {"tp": 4, "pp": 16, "dp": 16, "microbatches": 640}),
        ("gpt-1t", 384, 9600, {"tp": 8, "pp": 64, "dp": 6, "microbatches": 1600}),
    ],
)
def test_the_choice_beats_ornls_recipe_in_its_own_simulation(model: str, nodes: int, batch: int, recipe: dict) -> None:
    found = search(load_model(model), FRONTIER, nodes, batch)
    assert found.best.tokens_per_s_per_device > 1.1 * speed(model, FRONTIER, **recipe)
    assert found.best.peak_bytes < 64 * 2**30
    assert found.best.binding


# --------------------------------------------------------------------------------------------- search


BIG = pytest.mark.parametrize(("model", "nodes"), [("gpt-1t", 384), ("gpt-175b", 9408)])


@pytest.mark.thorough
@BIG
def test_big_searches_keep_tensor_parallelism_inside_the_node(model: str, nodes: int) -> None:
    """Run the complete command in its own process."""
    done = subprocess.run(
        [sys.executable, "-m", "frontier_llm.cli.main", "plan", model, "--machine", "frontier", "--nodes", str(nodes)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "choice: TP8" in done.stdout, done.stderr


@pytest.mark.thorough
@BIG
def test_big_searches_count_what_they_leave_out(model: str, nodes: int) -> None:
    found = search(load_model(model), FRONTIER, nodes, default_global_batch(load_model(model), nodes, 8))
    assert found.legal > found.fitting > found.dominated > 0
    others = found.plans[1:]
    assert list(others) == sorted(others, key=preference)
    assert preference(found.best) <= (1 + TIE) * (1 + RESOLUTION) * min(map(preference, others))


def test_every_enumerated_layout_is_legal_to_the_runtime_and_none_is_missing() -> None:
    model = load_model("llama-tiny")
    devices = 8
    batch = 16
    layouts = enumerate_layouts(model, devices, batch, 8)
    for index in range(0, len(layouts), 3):
        one = layouts.row(index)
        config = build(
            RunConfig,
            {
                "model": model.model_dump(),
                "parallel": {
                    "tensor": one.tp,
                    "pipeline": one.pp,
                    "chunks": one.chunks,
                    "schedule": one.schedule,
                    "sequence_parallel": one.sequence_parallel,
                    "axis_order": one.axis_order,
                    **(
                        {"data_mode": "fsdp", "data_shard": one.data_shard or None}
                        if one.sharding == "weights"
                        else {"zero": SHARDING[one.sharding]}
                    ),
                },
                "batch": {"global_batch": batch, "micro_batch": one.micro_batch},
                "train": {"recompute": one.recompute},
            },
        )
        assert plan_problems(config, devices) == []
        assert layout_of(config, devices) == one
    seen = set(zip(layouts.tp.tolist(), layouts.pp.tolist(), layouts.micro_batch.tolist(), strict=True))
    expected = {
        (tp, pp, B)
        for tp in (1, 2) for pp in (1, 2, 4) for B in (1, 2, 4, 8, 16)
        if 8 % (tp * pp) == 0 and batch % (8 // (tp * pp) * B) == 0
    }  # fmt: skip
    assert seen == expected


def test_nothing_that_exceeds_memory_is_offered_and_tight_plans_are_flagged() -> None:
    found = search(load_model("gpt-175b"), FRONTIER, 128, 10240)
    for plan in found.plans:
        assert plan.peak_bytes <= FRONTIER.memory_bytes
        assert plan.tight == (plan.peak_bytes > 0.95 * FRONTIER.memory_bytes)
    roomy = search(load_model("gpt-175b"), replace(FRONTIER, memory_bytes=1e15), 128, 10240)
    assert roomy.fitting == roomy.legal >= found.fitting
    assert roomy.best.step_s <= found.best.step_s


def test_fixing_is_obeyed_and_never_faster() -> None:
    free = search(load_model("gpt-22b"), FRONTIER, 8, 512)
    fixed = search(load_model("gpt-22b"), FRONTIER, 8, 512, parse_fixed(["tensor=8", "pipeline=4", "recompute=full"]))
    for plan in fixed.plans:
        assert (plan.layout.tp, plan.layout.pp, plan.layout.recompute) == (8, 4, "full")
    assert fixed.best.step_s > free.best.step_s
    assert fixed.legal < free.legal


def test_wrong_words_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fixed(["tensr=8", "recompute=maybe", "pipeline"])
    message = str(caught.value)
    assert "did you mean 'tensor'" in message
    assert "none, selective, full" in message
    assert message.count("fix:") == 3


def test_the_breakdown_adds_up_to_the_step() -> None:
    for plan in search(load_model("gpt-175b"), FRONTIER, 64, 1024).plans:
        assert sum(breakdown(plan, FRONTIER).values()) == pytest.approx(plan.step_s, rel=1e-6)
        assert f"TP{plan.layout.tp} " in layout_words(plan)


@pytest.mark.thorough
def test_too_small_and_impossible_sizes() -> None:
    model = load_model("gpt-1t")
    assert search(model, FRONTIER, 4, 6144).plans == ()
    need = smallest_machine(model, FRONTIER)
    assert need is not None
    assert search(model, FRONTIER, need, default_global_batch(model, need, 8)).plans
    assert not search(model, FRONTIER, need // 2, default_global_batch(model, need // 2, 8)).plans
    assert search(model, FRONTIER, 383, 9600).legal == 0
    near = legal_node_counts(model, 8, 383, 9600, {})
    assert near[-1] == 384
    assert all(len(enumerate_layouts(model, 8 * nodes, 9600, 8)) for nodes in near)


def test_the_search_proposes_no_tensor_group_over_nodes() -> None:
    """12 heads are divisible by 3 and 6, but 8 devices of a node are not. On one node such groups are possible."""
    model = load_model("mpt-tiny", {"heads": 12, "hidden": 192, "ffn_hidden": 768, "vocab_multiple": 12})
    assert set(enumerate_layouts(model, 24, 24, 8).tp) == {1, 2, 4}
    assert {3, 6} <= set(enumerate_layouts(model, 6, 24, 8).tp)
    assert set(enumerate_layouts(model, 24, 24, 8, {"tp": 3}).tp) == {3}


@pytest.mark.thorough
def test_cross_node_tp_is_priced_only_on_request() -> None:
    model = load_model("gpt-1t")
    assert search(model, FRONTIER, 384, 9600).across is None
    found = search(model, FRONTIER, 384, 9600, cross_node=True)
    assert found.across is not None
    assert found.across.layout.tp > 8 >= found.best.layout.tp
    assert found.across.step_s > found.best.step_s


def test_an_emitted_run_with_a_tensor_group_over_nodes_permits_it(tmp_path: Path) -> None:
    fixed = parse_fixed(["tensor=16", "recompute=full", "micro_batch=1", "zero=1"])
    found = search(load_model("gpt-22b"), FRONTIER, 4, 256, fixed)
    path = tmp_path / "wide.yaml"
    emit(path, Request("gpt-22b", "frontier"), load_machine("frontier"), found, FRONTIER, None)
    config = load_run(str(path))
    assert config.parallel.tensor == 16 and config.parallel.cross_node_tensor
    (problem,) = plan_problems(load_run(str(path), ["parallel.cross_node_tensor=false"]), 32)
    assert problem.where == "parallel.tensor" and "a node of machine frontier has 8 devices" in problem.what


def test_ranking_memory_is_that_of_the_exact_stages() -> None:
    found = search(load_model("gpt-175b"), FRONTIER, 128, 10240)
    for plan in found.plans:
        assert float(peak_memory(plan.model, plan.layout, FRONTIER)) == pytest.approx(plan.peak_bytes, rel=0.05)


def test_the_roomier_of_two_near_equal_plans_is_chosen() -> None:
    found = search(load_model("gpt-175b"), FRONTIER, 64, 8192)
    assert not found.best.tight
    tight = [plan for plan in found.plans if plan.tight]
    assert any(plan.step_s < found.best.step_s for plan in tight)
    assert all(plan.step_s * (1 + RESOLUTION) > found.best.step_s for plan in tight)


def test_fsdp_is_shown_but_not_chosen_within_the_model_s_resolution() -> None:
    found = search(load_model("gpt-22b"), replace(FRONTIER, one_in_flight=False), 16, 8192)
    sharded = [plan for plan in found.plans if plan.layout.sharding == "weights"]
    assert sharded and found.best.layout.sharding != "weights"
    assert min(plan.step_s for plan in sharded) < found.best.step_s
    assert all(plan.step_s > found.best.step_s / (1 + RESOLUTION) for plan in sharded)


def test_with_one_communication_in_flight_fsdp_is_offered_alone() -> None:
    assert FRONTIER.one_in_flight
    model = load_model("gpt-22b")
    found = search(model, FRONTIER, 16, 8192)
    (sharded,) = (plan.layout for plan in found.plans if plan.layout.sharding == "weights")
    assert (sharded.tp, sharded.cp, sharded.pp, sharded.data_shard) == (1, 1, 1, 0)
    assert found.best.layout.sharding != "weights"  # FSDP is 1.7 % faster, but its overlap is estimated.
    # On 64 nodes FSDP is 5.4 % faster, but 48 % slower with the slow values of the constants.
    assert search(model, FRONTIER, 64, 8192).best.layout.sharding != "weights"
    assert search(model, replace(FRONTIER, slow={}), 64, 8192).best.layout.sharding == "weights"


@pytest.mark.parametrize(
    ("changes", "largest"),
    [
        ({"vocab_size": 257}, 2),
        ({"bias": False, "moe": {"experts": 8, "top_k": 2, "shared_hidden": 514}}, 2),
        ({"bias": False, "moe": {"experts": 8, "top_k": 2}, "sequence_length": 1028}, 4),
    ],
    ids=["padding", "shared expert", "routed parts"],
)
def test_every_proposed_tensor_degree_is_legal(changes: dict[str, Any], largest: int) -> None:
    shape = {"layers": 8, "hidden": 512, "heads": 8, "ffn_hidden": 2048, "vocab_size": 50257, "sequence_length": 1024}
    model = ModelConfig(**{**shape, **changes})
    layouts = enumerate_layouts(model, 8, 64, 8, {"recompute": "none", "micro_batch": 1})
    assert max(layouts.tp) == largest
    for index in range(len(layouts)):
        keys = run_keys(layouts.row(index))
        batch = {"global_batch": 64, "micro_batch": 1}
        assert plan_problems(build(RunConfig, {"model": model.model_dump(), **keys, "batch": batch}), 8) == []


def test_alternatives_have_the_precision_and_the_optimizer_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[dict[str, Any]] = []

    def recorded(*arguments: Any, **shared: Any) -> Search:
        searched.append(shared)
        return search(*arguments, **shared)

    found = recorded(load_model("gpt-22b"), FRONTIER, 4, 512, dtype="fp32", optimizer="adafactor")
    for module in (compare, steps):
        monkeypatch.setattr(module, "search", recorded)
    compare.what_if(found, FRONTIER, {}, ["zero=0"])
    steps._best_step(found, FRONTIER, {})
    assert searched == [{"dtype": "fp32", "optimizer": "adafactor"}] * 4
    assert found.best.layout.dtype == "fp32"


def test_the_default_number_of_nodes_depends_on_the_optimizer_and_on_fixed_values() -> None:
    model = load_model("llama-2-70b")
    machine = load_machine("frontier")
    assert default_nodes(model, machine, FRONTIER, {}) == 4
    assert default_nodes(model, machine, FRONTIER, {}, optimizer="adafactor") == 2
    assert default_nodes(model, machine, FRONTIER, {"sharding": "none"}) == 8
    assert default_nodes(model, machine, FRONTIER, {"tp": 5}) == 4  # no number of nodes has such a layout


def test_if_the_fastest_layout_of_a_combination_does_not_fit_one_with_less_memory_is_found() -> None:
    """By the closed form, layouts without recomputation need 70 GiB. Their real stages need 83 of the device's 80."""
    model = load_model("llama-2-13b", {"sequence_length": 5632})
    numbers = replace(rates(load_machine("h100")), node_devices=16)
    fixed = parse_fixed(["tensor=1", "pipeline=16", "schedule=zb-v", "micro_batch=1"])
    found = search(model, numbers, 1, 512, fixed)
    assert found.fitting == 3 and [plan.layout.recompute for plan in found.plans] == ["full"]


def test_a_refusal_names_more_nodes_than_the_refused_ones() -> None:
    """The closed form, which gives the number of nodes, can need less memory than the refused real stages."""
    machine = load_machine("frontier")
    refused = replace(search(load_model("llama-2-70b"), FRONTIER, 4, 128), plans=())
    with pytest.raises(LayoutError, match="use at least 8 nodes"):
        check_found(refused, machine, FRONTIER)
    with pytest.raises(LayoutError, match="even on all of its 9408 nodes") as raised:
        check_found(replace(refused, nodes=FRONTIER.nodes), machine, FRONTIER)
    assert "nodes of frontier, the smallest" not in str(raised.value)
