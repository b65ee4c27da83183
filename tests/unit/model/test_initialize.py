"""Initial weights: the generator's published values, the distribution, and equal values on every device and in every
layout.
"""

from __future__ import annotations

import hashlib
import importlib

import pytest
import torch

from frontier_llm.comm import serial_mesh
from frontier_llm.config import load_run
from frontier_llm.data.loader import open_batches
from frontier_llm.optim import draw_masters
from frontier_llm.topology.plan import make_plan
from frontier_llm.training.build import TrainState, build_state

# The package has a function with the module's name, so a plain import would return the function.
initialize = importlib.import_module("frontier_llm.model.initialize")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),  # Random123's known answers
        (0x123456789ABCDEF, 0, None),
    ],
)
def test_words_are_those_of_philox(counter: int, key: int, words: list[int] | None) -> None:
    got = [int(word[0]) for word in initialize.philox(torch.tensor([counter]), key)]
    assert got == (words or philox_by_hand(counter, key)) and all(0 <= word < 2**32 for word in got)


def philox_by_hand(counter: int, key: int) -> list[int]:
    c = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        first = c[0] * 0xD2511F53
        second = c[2] * 0xCD9E8D57
        c = [(second >> 32) ^ c[1] ^ k[0], second & 0xFFFFFFFF, (first >> 32) ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def test_numbers_are_normal() -> None:
    x = initialize.normals(1234, torch.tensor([0]), 1 << 18)[0]
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.005 and abs((x**4).mean() - 3) < 0.06 and x.abs().max() < 6.8
    first, second = (torch.randint(0, 2**32, (1000,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    first[:2] = torch.tensor([0, 2**32 - 1])  # the largest and the smallest radius
    cosine, sine = initialize.box_muller(first, second)
    radius = (-2 * ((first.double() + 0.5) * 2.0**-32).log()).sqrt()
    angle = 2 * torch.pi * second.double() * 2.0**-32
    torch.testing.assert_close(cosine, radius * angle.cos(), rtol=0, atol=1e-9)
    torch.testing.assert_close(sine, radius * angle.sin(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_draws_the_same(device: str) -> None:
    """The expected digest was computed on a CPU, because a test machine with a GPU has no second device to compare
    with.
    """
    x = initialize.normals(0x0123456789ABCDEF, torch.tensor([0, 1 << 40, 12345], device=device), 4099).float().cpu()
    assert hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16] == "1a7fa08a057de964"


def test_a_run_has_no_place_of_its_own() -> None:
    """A value depends only on its index: ranks that draw any ranges get the same values as one rank that draws all."""
    whole = initialize.normals(7, torch.tensor([0]), 3000)[0]
    starts = torch.tensor([0, 5, 1002, 77, 2001])
    for count in (1, 2, 7, 999):
        rows = initialize.normals(7, starts, count)
        assert all(
            torch.equal(row, whole[start : start + count]) for start, row in zip(starts.tolist(), rows, strict=True)
        )


def state(draws: bool) -> TrainState:
    config = load_run(
        "bench",
        ["model=llama-tiny", "train.device=cpu", "batch.global_batch=2", "batch.micro_batch=1", "data.train=synthetic"],
    )
    batches = open_batches(config, 0, 1)
    return build_state(config, make_plan(config, 1), serial_mesh(), torch.device("cpu"), batches, draws)


def test_what_is_drawn_late_is_what_is_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = state(draws=True)
    with monkeypatch.context() as patch:
        patch.setattr(initialize, "normals", lambda *_: pytest.fail("drawn, though a checkpoint is there"))
        late = state(draws=False)
    draw_masters(late.optimizer, late.config.train.seed, torch.bfloat16)
    for (_, expected), (_, got) in zip(drawn.optimizer.weights(), late.optimizer.weights(), strict=True):
        assert torch.equal(expected, got)
    for one, other in zip(drawn.optimizer.state(), late.optimizer.state(), strict=True):
        assert all(torch.equal(one.tensors[kind], other.tensors[kind]) for kind in one.tensors)
