"""split_layers covers every layer exactly once, evenly, with the head weighed in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.config import ModelConfig, load_model
from frontier_llm.topology import head_cost_in_layers, split_layers


def model(layers: int, vocab_size: int = 1000) -> ModelConfig:
    return ModelConfig(layers=layers, hidden=64, heads=4, ffn_hidden=256, vocab_size=vocab_size, sequence_length=32)


@given(st.data(), st.integers(1, 60), st.sampled_from([100, 5_000, 200_000]))
def test_every_layer_belongs_to_one_stage(data: st.DataObject, layers: int, vocab_size: int) -> None:
    stages = split_layers(model(layers, vocab_size), data.draw(st.integers(1, layers)))
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [stage.embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.head for stage in stages] == [False] * (len(stages) - 1) + [True]
    sizes = [stage.num_layers for stage in stages]
    base, remainder = divmod(layers, len(stages))
    assert min(sizes) >= base >= 1
    assert remainder or set(sizes) == {base}


def test_the_remainder_avoids_the_stage_with_the_head() -> None:
    assert [stage.num_layers for stage in split_layers(model(7), 4)] == [2, 2, 2, 1]
    assert [stage.num_layers for stage in split_layers(model(5), 4)] == [2, 1, 1, 1]


def test_given_counts_are_kept() -> None:
    assert [stage.num_layers for stage in split_layers(model(6), 3, (1, 4, 1))] == [1, 4, 1]


@pytest.mark.parametrize(("name", "published"), [("gpt-1t", 0.17), ("gpt-175b", 0.35), ("gpt-22b", 0.69)])
def test_head_cost_is_about_vocabulary_over_12_hidden(name: str, published: float) -> None:
    """V/12H; attention scores make a real layer up to 3 % dearer than 12 H^2."""
    assert head_cost_in_layers(load_model(name)) == pytest.approx(published, rel=0.04)
