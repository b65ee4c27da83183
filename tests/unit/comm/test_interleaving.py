"""One half of a rank's work runs at a time, and an error of either half reaches the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from frontier_llm.comm.interleaving import Interleaving


def share(
    halves: dict[str, Callable[[Interleaving], None]], log: list[str], interleaving: Interleaving | None = None
) -> None:
    """Run both halves on `interleaving`, or on a new one. The log records each turn."""
    interleaving = interleaving or Interleaving()
    interleaving.run_both(
        list(halves), lambda name: halves[name](interleaving), lambda name: log.append(f"turn {name}")
    )


def rounds(name: str, count: int, log: list[str]) -> Callable[[Interleaving], None]:
    """Return a half that starts an operation, yields to the other half and ends the operation, `count` times."""

    def half(interleaving: Interleaving) -> None:
        for number in range(count):
            log.append(f"begin {name}{number}")
            interleaving.switch_halves()
            log.append(f"end {name}{number}")

    return half


def test_halves_take_turns_and_the_longer_one_goes_on_alone() -> None:
    log: list[str] = []
    share({"a": rounds("a", 1, log), "b": rounds("b", 3, log)}, log)
    expected = "turn a, begin a0, turn b, begin b0, turn a, end a0, turn b, end b0, begin b1, end b1, begin b2, end b2"
    assert ", ".join(log) == expected
    log.clear()
    share({"a": rounds("a", 2, log), "b": lambda interleaving: log.append("all of b")}, log)
    assert ", ".join(log) == "turn a, begin a0, turn b, all of b, turn a, end a0, begin a1, end a1"
    log.clear()
    share({"a": lambda interleaving: log.append("all of a"), "b": rounds("b", 1, log)}, log)
    assert ", ".join(log) == "turn a, all of a, turn b, begin b0, end b0"


def test_without_another_half_nobody_waits() -> None:
    Interleaving().switch_halves()


def fails(interleaving: Interleaving) -> None:
    interleaving.switch_halves()
    raise ValueError("the half that failed")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("others", [0, 1, 5])
def test_a_failure_in_one_half_ends_the_other_with_the_same_error(first: bool, others: int) -> None:
    """The other half waits for its turn or has already ended. After the error its thread is free for the next pair."""
    log: list[str] = []
    other = {"other": rounds("o", others, log)}
    interleaving = Interleaving()
    share({"a": rounds("a", 1, log), "b": rounds("b", 1, log)}, log, interleaving)
    threads = set(threading.enumerate())
    with pytest.raises(ValueError, match="the half that failed"):
        share({"bad": fails, **other} if first else {**other, "bad": fails}, log, interleaving)
    assert "end o4" not in log
    share({"a": rounds("a", 1, log), "b": rounds("c", 1, log)}, log, interleaving)
    assert log[-1] == "end c0" and not set(threading.enumerate()) - threads


def test_a_half_whose_other_failed_before_it_began_is_left_out() -> None:
    log: list[str] = []

    def at_once(interleaving: Interleaving) -> None:
        raise KeyError("at once")

    with pytest.raises(KeyError, match="at once"):
        share({"bad": at_once, "other": rounds("o", 1, log)}, log)
    assert log == ["turn bad"]


class Waiting(Function):
    """Yields to the other half in its backward, as a wait for communication does."""

    @staticmethod
    def forward(ctx: object, x: Tensor, interleaving: Interleaving) -> Tensor:
        ctx.interleaving = interleaving  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.interleaving.switch_halves()  # type: ignore[attr-defined]
        return grads[0], None


def test_an_error_reaches_through_autograd_and_the_next_pair_begins_anew() -> None:
    """A backward that is stopped in the middle leaves no state behind. A forward that runs beside a backward still
    records its autograd graph.
    """
    interleaving = Interleaving()
    x = torch.ones(2, requires_grad=True)

    def backward() -> None:
        Waiting.apply(x * 2, interleaving).sum().backward()

    def forward() -> None:
        y = x * 3
        interleaving.switch_halves()
        assert y.requires_grad and torch.is_grad_enabled()

    def fail() -> None:
        raise RuntimeError("in the forward")

    calls = {"backward": backward, "forward": forward, "fail": fail}
    with pytest.raises(RuntimeError, match="in the forward"):
        interleaving.run_both(["backward", "fail"], lambda name: calls[name](), lambda name: None)
    assert x.grad is None
    interleaving.run_both(["backward", "forward"], lambda name: calls[name](), lambda name: None)
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
