"""Scores against a softmax over complete logits, one text at a time. Batches, layouts and replicas give the same
scores.
"""

from __future__ import annotations

import math

import pytest
import torch

from frontier_llm.comm import build_mesh
from frontier_llm.config import load_model
from frontier_llm.errors import ConfigError
from frontier_llm.inference.model import InferenceModel
from frontier_llm.inference.sampling import Sampling
from frontier_llm.inference.score import Likelihood, score
from frontier_llm.topology.grid import Grid
from tests.harness.marks import thorough
from tests.harness.pool import RankPool
from tests.unit.inference.models import NAMES, generate, prompts, tiny


def requests() -> list[tuple[list[int], list[int]]]:
    texts = prompts((6, 20, 9, 40, 33, 2, 14))
    return [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]


def expected(model: InferenceModel, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    text = (context + continuation)[-model.config.sequence_length - 1 :]
    with torch.inference_mode():
        x_SBH = model.hidden(torch.tensor(text[:-1])[:, None])
        assert x_SBH is not None
        table_SV = model.whole_logits(x_SBH)[:, 0].log_softmax(-1)[-len(continuation) :]
    total = sum(float(table_SV[place, token]) for place, token in enumerate(continuation))
    return total, table_SV.argmax(-1).tolist() == continuation


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_scores_equal_a_softmax_over_the_whole_vocabulary(name: str, batch_size: int) -> None:
    model = tiny(name)
    scores = score(model, requests(), batch_size)
    for (context, continuation), found in zip(requests(), scores, strict=True):
        total, greedy = expected(model, context, continuation)
        assert math.isclose(found.log_probability, total, rel_tol=1e-12)
        assert (found.greedy, found.tokens) == (greedy, len(continuation))
    # random text is never the most likely continuation; the next test covers greedy=True
    assert not any(found.greedy for found in scores)


def test_the_models_own_choice_is_greedy() -> None:
    model = tiny("llama-tiny")
    context = prompts((5,))[0]
    with torch.inference_mode():
        x_SBH = model.hidden(torch.tensor(context)[:, None])
        assert x_SBH is not None
        best = int(model.whole_logits(x_SBH)[-1, 0].argmax())
    assert score(model, [(context, [best]), (context, [(best + 1) % 250])])[0].greedy
    assert not score(model, [(context, [(best + 1) % 250])])[0].greedy


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (([], [1]), "empty context"),
        (([1], []), "empty continuation"),
        (([1], [2] * 33), "33 tokens"),
        (([250], [1]), "contains the token id 250"),
    ],
)
def test_impossible_requests_are_named(request_: tuple[list[int], list[int]], word: str) -> None:
    with pytest.raises(ConfigError, match=f"request 1: .*{word}"):
        score(tiny("llama-tiny"), [([1], [2]), request_])


def greedy_requests(model: InferenceModel) -> list[tuple[list[int], list[int]]]:
    """Return contexts with the model's greedy continuations."""
    contexts = prompts((3, 5, 7, 9, 11, 13))
    return [
        (context, list(row.tokens))
        for context, row in zip(contexts, generate(model, contexts, Sampling(2, 0.0)), strict=True)
    ]


def _score_on_layout(
    rank: int,
    name: str,
    layout: tuple[int, int, int],
    asked: list[tuple[list[int], list[int]]],
) -> list[Likelihood]:
    tensor, pipeline, data = layout
    mesh = build_mesh(Grid(tensor, pipeline, data), rank, tied_embeddings=load_model(name).tied_embeddings)
    return score(tiny(name, "fp64", mesh, tensor, pipeline), asked, 2)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama-tiny", (2, 2, 2)), thorough("gpt-tiny", (4, 1, 1)), thorough("mpt-tiny", (1, 2, 2))],
)
def test_every_layout_scores_the_same(ranks: RankPool, name: str, layout: tuple[int, int, int]) -> None:
    model = tiny(name)
    chosen = greedy_requests(model)
    # some tokens are in another rank's part of the vocabulary
    assert any(token >= 125 for _, tokens in chosen for token in tokens)
    serial = score(model, requests() + chosen, 2)
    assert [found.greedy for found in serial] == [False] * len(requests()) + [True] * len(chosen)
    for scores in ranks.run(math.prod(layout), _score_on_layout, name, layout, requests() + chosen):
        assert [(found.greedy, found.tokens) for found in scores] == [(found.greedy, found.tokens) for found in serial]
        for found, reference in zip(scores, serial, strict=True):
            assert math.isclose(found.log_probability, reference.log_probability, rel_tol=1e-12)
