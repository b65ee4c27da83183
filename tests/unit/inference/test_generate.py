"""Generation with and without the cache, in batches and in single rows, on layouts and on one rank, compared with
transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from frontier_llm.comm import build_mesh, serial_mesh
from frontier_llm.config import OpsConfig, load_model
from frontier_llm.errors import ConfigError
from frontier_llm.inference.generate import stream
from frontier_llm.inference.model import build_inference_model, inference_plan
from frontier_llm.inference.sampling import Sampling
from frontier_llm.interop.huggingface import HuggingFaceModel, export_huggingface
from frontier_llm.topology.grid import Grid
from tests.harness.marks import but_first
from tests.harness.pool import RankPool
from tests.unit.inference.models import NAMES, Completion, RandomWeights, generate, prompts, tiny

GREEDY = Sampling(max_new_tokens=12, temperature=0)
SAMPLED = Sampling(max_new_tokens=12, temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.2, seed=5)
LENGTHS = (3, 11, 7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_cache_changes_no_token(name: str, sampling: Sampling) -> None:
    model = tiny(name)
    with_cache = generate(model, prompts(LENGTHS), sampling)
    assert with_cache == generate(model, prompts(LENGTHS), sampling, use_cache=False)
    assert len({row.tokens for row in with_cache}) == 3
    assert all(len(set(row.tokens)) > 1 for row in with_cache)  # no row repeats a single token


def test_the_cache_knows_each_layers_window_and_caps_scores() -> None:
    model = tiny("llama-tiny", sliding_window=5, full_attention_every=2, score_softcap=0.5, score_width=4)
    with_cache = generate(model, prompts(LENGTHS), GREEDY)
    assert with_cache == generate(model, prompts(LENGTHS), GREEDY, use_cache=False)
    assert with_cache != generate(
        tiny("llama-tiny", sliding_window=5, score_softcap=0.5, score_width=4),
        prompts(LENGTHS),
        GREEDY,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_unequal_prompts_equals_each_prompt_alone(name: str) -> None:
    model = tiny(name)
    together = generate(model, prompts(LENGTHS), GREEDY)
    assert together == [generate(model, [prompt], GREEDY)[0] for prompt in prompts(LENGTHS)]


@pytest.mark.parametrize("name", but_first(NAMES))
def test_greedy_equals_transformers_on_the_exported_model(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export_huggingface(RandomWeights(load_model(name)), tmp_path / "out", torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    source = HuggingFaceModel(tmp_path / "out")
    ours = build_inference_model(
        source,
        inference_plan(source.model, 1, 1, 1),
        serial_mesh(),
        torch.device("cpu"),
        "fp32",
        OpsConfig(),
    )
    for prompt, row in zip(prompts(LENGTHS), generate(ours, prompts(LENGTHS), GREEDY), strict=True):
        tokens_1S = torch.tensor([prompt])
        mask = torch.ones_like(tokens_1S)
        expected = theirs.generate(tokens_1S, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert list(row.tokens) == expected[0, len(prompt) :].tolist()


def test_a_row_draws_the_same_in_any_batch() -> None:
    model = tiny("llama-tiny")
    together = list(zip(*stream(model, prompts(LENGTHS), SAMPLED), strict=True))
    alone = [
        tuple(tokens for (tokens,) in stream(model, [prompt], SAMPLED, first_row=row))
        for row, prompt in enumerate(prompts(LENGTHS))
    ]
    assert alone == together


def test_a_stop_token_ends_its_row_alone_and_is_not_text() -> None:
    model = tiny("llama-tiny")
    free = generate(model, prompts(LENGTHS), GREEDY)
    stop = free[1].tokens[4]
    cut = free[1].tokens.index(stop)
    stopped = generate(model, prompts(LENGTHS), Sampling(max_new_tokens=12, temperature=0, stop_tokens=(stop,)))
    assert stopped[1] == Completion(free[1].tokens[:cut], "stop")
    others = [row for row in (0, 2) if stop not in free[row].tokens]
    assert others
    assert all(stopped[row] == free[row] for row in others)


def test_rows_end_where_the_context_is_full() -> None:
    model = tiny("llama-tiny")  # context 32
    rows = generate(model, prompts((30, 4)), Sampling(max_new_tokens=50, temperature=0))
    assert [len(row.tokens) for row in rows] == [2, 28]
    assert [row.finish_reason for row in rows] == ["length", "length"]


def test_tokens_come_one_by_one() -> None:
    model = tiny("llama-tiny")
    expected = generate(model, prompts((3,)), GREEDY)[0].tokens
    flow = stream(model, prompts((3,)), GREEDY)
    assert [next(flow) for _ in range(3)] == [[token] for token in expected[:3]]


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ([[]], "contains no token"),
        ([[1] * 32], "leaves no space for new ones in a context of 32"),
        ([[1], [250]], "contains the token id 250"),
        ([], "no prompt"),
    ],
)
def test_impossible_prompts_are_named(bad: list[list[int]], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        generate(tiny("llama-tiny"), bad, GREEDY)


def _generate_on_layout(rank: int, name: str, tensor: int, pipeline: int, expert: int = 1) -> list[tuple[int, ...]]:
    config = load_model(name)
    mesh = build_mesh(
        Grid(tensor, pipeline, 1, ep=expert),
        rank,
        tied_embeddings=config.tied_embeddings,
        experts=config.moe is not None,
    )
    model = tiny(name, "fp64", mesh, tensor, pipeline, expert)
    greedy = generate(model, prompts(LENGTHS), GREEDY)
    assert greedy == generate(model, prompts(LENGTHS), GREEDY, use_cache=False)
    return [row.tokens for row in greedy + generate(model, prompts(LENGTHS), SAMPLED)]


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    but_first([("llama-tiny", 2, 2), ("gpt-tiny", 2, 1), ("mpt-tiny", 1, 2), ("mpt-tiny", 4, 1)]),
)
def test_every_layout_generates_the_same(ranks: RankPool, name: str, tensor: int, pipeline: int) -> None:
    serial = tiny(name)
    expected = [row.tokens for sampling in (GREEDY, SAMPLED) for row in generate(serial, prompts(LENGTHS), sampling)]
    assert ranks.run(tensor * pipeline, _generate_on_layout, name, tensor, pipeline) == [expected] * (tensor * pipeline)


@pytest.mark.parametrize(("tensor", "pipeline", "expert"), [(2, 2, 2), (2, 1, 1)])
def test_tensor_ranks_that_share_out_experts_generate_the_same(
    ranks: RankPool,
    tensor: int,
    pipeline: int,
    expert: int,
) -> None:
    """Neither the tokens of the prompts nor single tokens divide evenly over the ranks."""
    serial = tiny("moe-tiny")
    expected = [row.tokens for sampling in (GREEDY, SAMPLED) for row in generate(serial, prompts(LENGTHS), sampling)]
    assert ranks.run(tensor * pipeline, _generate_on_layout, "moe-tiny", tensor, pipeline, expert) == [expected] * (
        tensor * pipeline
    )


def test_experts_that_replicas_would_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 does not divide tensor 4"):
        inference_plan(load_model("moe-tiny"), 4, 1, 12, 3)
