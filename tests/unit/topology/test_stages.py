"""split_layers assigns each layer to exactly one stage. The stages take about equal time, the output head included."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.config import ModelConfig, load_model
from frontier_llm.topology.plan import head_cost_in_layers, split_layers


def model(layers: int, vocab_size: int = 1000) -> ModelConfig:
    return ModelConfig(layers=layers, hidden=64, heads=4, ffn_hidden=256, vocab_size=vocab_size, sequence_length=32)


@given(st.data(), st.integers(1, 60), st.sampled_from([100, 5_000, 200_000]))
def test_every_layer_belongs_to_one_stage(data: st.DataObject, layers: int, vocab_size: int) -> None:
    stages = split_layers(model(layers, vocab_size), data.draw(st.integers(1, layers)))
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [stage.embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.head for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert min(stage.num_layers for stage in stages) >= 1


def busiest(counts: tuple[int, ...], head: float) -> float:
    return max(*counts[:-1], counts[-1] + head) if len(counts) > 1 else counts[0] + head


@given(st.integers(1, 4), st.integers(1, 12), st.sampled_from([100, 2_000, 20_000]))
def test_no_other_split_has_a_lighter_busiest_stage(pieces: int, layers: int, vocab_size: int) -> None:
    config = model(max(layers, pieces), vocab_size)
    head = head_cost_in_layers(config)
    every = (counts for counts in product(range(1, config.layers + 1), repeat=pieces) if sum(counts) == config.layers)
    best = min(busiest(counts, head) for counts in every)
    assert busiest(tuple(stage.num_layers for stage in split_layers(config, pieces)), head) == pytest.approx(best)


def test_a_large_model_stays_even_and_a_small_one_makes_room_for_its_head() -> None:
    assert [stage.num_layers for stage in split_layers(load_model("gpt-22b"), 8)] == [6] * 8
    assert [stage.num_layers for stage in split_layers(load_model("bench-l8-h384"), 2)] == [5, 3]
    assert [stage.num_layers for stage in split_layers(model(7, 100), 4)] == [2, 2, 2, 1]


def test_given_counts_are_kept() -> None:
    assert [stage.num_layers for stage in split_layers(model(6), 3, (1, 4, 1))] == [1, 4, 1]


@pytest.mark.parametrize(("name", "published"), [("gpt-1t", 0.17), ("gpt-175b", 0.35), ("gpt-22b", 0.69)])
def test_head_cost_is_about_vocabulary_over_12_hidden(name: str, published: float) -> None:
    """The head costs V/12H layers. Attention scores make a real layer up to 3 % more expensive than 12 H^2."""
    assert head_cost_in_layers(load_model(name)) == pytest.approx(published, rel=0.04)
