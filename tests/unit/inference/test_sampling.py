"""Compares each sampling filter with its definition and with the filter of transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from frontier_llm.errors import ConfigError, FrontierError
from frontier_llm.inference.sampling import Sampler, Sampling, keep_likely, penalise

V = 23


def logits(seed: int, rows: int = 3) -> torch.Tensor:
    return 2 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def unseen(rows: int) -> torch.Tensor:
    return torch.zeros(rows, V, dtype=torch.bool)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 999),
    top_k=st.integers(0, V + 2),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
    penalty=st.sampled_from([1.0, 0.7, 1.8]),
)
def test_kept_probabilities_equal_transformers(
    seed: int,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
) -> None:
    warpers = pytest.importorskip("transformers.generation.logits_process")
    x_BV = logits(seed)
    context_BS = torch.randint(0, V, (3, 5), generator=torch.Generator().manual_seed(seed))
    seen_BV = unseen(3).scatter_(1, context_BS, True)
    expected_BV = warpers.RepetitionPenaltyLogitsProcessor(penalty)(context_BS, x_BV.clone())
    expected_BV = warpers.TemperatureLogitsWarper(0.6)(context_BS, expected_BV)
    if top_k:
        expected_BV = warpers.TopKLogitsWarper(top_k)(context_BS, expected_BV)
    if top_p < 1:
        expected_BV = warpers.TopPLogitsWarper(top_p)(context_BS, expected_BV)
    if min_p:
        expected_BV = warpers.MinPLogitsWarper(min_p)(context_BS, expected_BV)
    ordered_BV, order_BV = (penalise(x_BV, seen_BV, penalty) / 0.6).sort(-1, descending=True)
    if top_p < 1:  # in float32, either way of summing may keep or drop a token whose sum is this near to top_p
        more_BV = ordered_BV.double()
        more_BV[:, top_k or V :] = -torch.inf
        assume(((more_BV.softmax(-1).cumsum(-1) - top_p).abs() > V * torch.finfo(torch.float32).eps).all())
    kept_BV = keep_likely(ordered_BV, top_k, top_p, min_p, ordered_BV.logsumexp(-1, keepdim=True))
    kept_BV = torch.zeros_like(kept_BV).scatter_(1, order_BV, kept_BV / kept_BV.sum(-1, keepdim=True))
    assert torch.allclose(kept_BV, expected_BV.softmax(-1), atol=1e-6)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 999),
    levels=st.sampled_from([3, 12, 10_000]),  # few levels give many equal logits, which are ordered by id
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
)
def test_ordering_a_few_candidates_draws_what_ordering_all_does(
    seed: int,
    levels: int,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    x_BV = (logits(seed, rows=16) * levels).round() / levels
    sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        drawn = []
        for candidates in (V, 1, 5):
            patch.setattr("frontier_llm.inference.sampling.CANDIDATES", candidates)
            drawn.append(Sampler(sampling, range(16)).choose(x_BV, unseen(16)).tolist())
    assert drawn[0] == drawn[1] == drawn[2]


def test_draws_follow_the_distribution() -> None:
    x_BV = logits(1, rows=1).expand(4000, V)
    drawn = Sampler(Sampling(seed=3), range(4000)).choose(x_BV, unseen(4000))
    observed = torch.bincount(drawn, minlength=V) / 4000
    assert (observed - x_BV[0].softmax(-1)).abs().max() < 0.03


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), top_k=st.integers(1, 4), top_p=st.floats(0.1, 1.0))
def test_only_kept_tokens_are_drawn(seed: int, top_k: int, top_p: float) -> None:
    x_BV = logits(seed, rows=8)
    drawn = Sampler(Sampling(seed=seed, top_k=top_k, top_p=top_p), range(8)).choose(x_BV, unseen(8))
    assert all(token in x_BV[row].topk(top_k).indices for row, token in enumerate(drawn.tolist()))


def test_a_row_draws_the_same_whatever_its_neighbours() -> None:
    x_BV = logits(5, rows=4)
    together = Sampler(Sampling(seed=7), range(4)).choose(x_BV, unseen(4))
    alone = Sampler(Sampling(seed=7), [2]).choose(x_BV[2:3], unseen(1))
    assert together[2] == alone[0]
    others = {tuple(Sampler(Sampling(seed=seed), range(4)).choose(x_BV, unseen(4)).tolist()) for seed in range(20)}
    assert len(others) > 10


def test_temperature_zero_is_greedy_and_low_temperature_nearly() -> None:
    x_BV = logits(9)
    assert torch.equal(Sampler(Sampling(temperature=0), range(3)).choose(x_BV, unseen(3)), x_BV.argmax(-1))
    assert torch.equal(Sampler(Sampling(temperature=1e-4), range(3)).choose(x_BV, unseen(3)), x_BV.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(temperature: float) -> None:
    x_BV = logits(2)
    x_BV[1, 3] = torch.nan
    with pytest.raises(FrontierError, match="logits are not finite"):
        Sampler(Sampling(temperature=temperature), range(3)).choose(x_BV, unseen(3))
    with pytest.raises(ConfigError, match="1e-40 is not 0"):
        Sampling(temperature=1e-40)


def test_the_penalty_can_change_the_greedy_choice() -> None:
    x_BV = torch.zeros(1, V)
    x_BV[0, 4], x_BV[0, 5] = 2.0, 1.5
    seen_BV = unseen(1)
    seen_BV[0, 4] = True
    assert Sampler(Sampling(temperature=0, repetition_penalty=1.5), [0]).choose(x_BV, seen_BV).item() == 5


def test_all_impossible_settings_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(max_new_tokens=0, temperature=-1, top_k=-2, top_p=0, min_p=1, repetition_penalty=0)
    for word in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        assert word in str(caught.value)
