"""Rotary embeddings with a scaled context equal the ones of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from frontier_llm.config import model_problems
from frontier_llm.config.load import load_model
from frontier_llm.model.positions import rope_table

THEIRS: dict[str, dict[str, Any]] = {
    "linear": {},
    "yarn": {"original_max_position_embeddings": 2048},
    "llama3": {"original_max_position_embeddings": 2048, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.mark.parametrize("kind", THEIRS)
def test_a_stretched_rotation_is_the_one_of_transformers(kind: str) -> None:
    utilities, transformers = (
        pytest.importorskip(name) for name in ("transformers.modeling_rope_utils", "transformers")
    )
    parameters = {"rope_type": kind, "rope_theta": 500000.0, "factor": 4.0, **THEIRS[kind]}
    config = transformers.LlamaConfig(
        hidden_size=4096, num_attention_heads=32, max_position_embeddings=8192, rope_parameters=parameters
    )
    frequencies_R, amplitude = utilities.ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    scaling = {"kind": kind, "factor": 4.0, "original_sequence_length": 2048}
    cos_SR, sin_SR = rope_table(
        load_model("llama-3-8b", {"sequence_length": 4, "rope_scaling": scaling}), torch.device("cpu"), torch.float64
    )
    torch.testing.assert_close(cos_SR[1], amplitude * frequencies_R.double().cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin_SR[1], amplitude * frequencies_R.double().sin(), rtol=0, atol=1e-6)


def test_ntk_slows_the_slowest_rotation_by_the_factor_and_the_fastest_not_at_all() -> None:
    plain, stretched = (
        rope_table(load_model("llama-3-8b", {"sequence_length": 2, **changes}), torch.device("cpu"), torch.float64)[1][
            1
        ].asin()
        for changes in ({}, {"rope_scaling": {"kind": "ntk", "factor": 4.0}})
    )
    assert stretched[0] == plain[0] and float(stretched[-1] / plain[-1]) == pytest.approx(0.25, rel=1e-9)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_what_is_relative_to_the_context_of_before_asks_for_it(kind: str) -> None:
    (problem,) = model_problems(load_model("llama-tiny", {"rope_scaling": {"kind": kind, "factor": 4.0}}))
    assert problem.where == "model.rope_scaling.original_sequence_length" and kind in problem.what
