"""Selection of the method that adds weight gradients on a GPU: the first one that torch has and that computes correct
sums.

torch's functions are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from frontier_llm.ops import torch_linear
from frontier_llm.ops.torch_linear import accumulate_weight_gradient_


@pytest.fixture(autouse=True)
def _ask_again() -> Iterator[None]:
    torch_linear.weight_gradient_method.cache_clear()
    yield
    torch_linear.weight_gradient_method.cache_clear()


def added() -> tuple[Tensor, Tensor]:
    """Return main_grad and its expected value, for a bf16 product that needs more digits than bf16 has."""
    generator = torch.Generator().manual_seed(1)
    grad, x = (torch.randn(64, size, generator=generator).bfloat16() for size in (3, 5))
    main_grad = torch.full((3, 5), 2.0)
    accumulate_weight_gradient_(main_grad, grad, x)
    return main_grad, 2.0 + grad.float().t() @ x.float()


def pretend_mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (a.float() @ b.float()).to(out_dtype)


def test_without_mixed_products_the_rounded_one_is_added_in_fp32() -> None:
    """The CPU build has no products with a wider output, like torch for ROCm before September 2025."""
    got, exact = added()
    assert torch_linear.weight_gradient_method(torch.bfloat16, torch.device("cpu")) == "rounded-product"
    error = ((got - exact).abs() / (exact - 2.0).abs()).max()
    assert 2.0**-14 < error < 2.0**-7


def test_an_fp32_product_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", pretend_mm)
    got, exact = added()
    torch.testing.assert_close(got, exact)


def test_a_product_that_adds_wrongly_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_what_was_there(main: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        return out.copy_(pretend_mm(a, b, out_dtype))

    monkeypatch.setattr(torch, "addmm", forgets_what_was_there)
    monkeypatch.setattr(torch, "mm", pretend_mm)
    got, exact = added()
    torch.testing.assert_close(got, exact)


def test_the_product_that_adds_itself_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def adds(main: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        calls.append(out.shape)
        return out.copy_(main + pretend_mm(a, b, out_dtype))

    monkeypatch.setattr(torch, "addmm", adds)
    got, exact = added()
    torch.testing.assert_close(got, exact)
    assert calls == [(16, 16), (3, 5)]  # the first call tests the method, the second adds the gradient


@pytest.mark.parametrize("shape", [(3, 2, 8), (0, 2, 8), (8,)])
def test_rows_of_an_odd_width_begin_at_multiples_of_sixteen(shape: tuple[int, ...]) -> None:
    """With a vocabulary of 50257, products and passes over the logits must not read one number at a time."""
    x = torch.randn(shape)
    weight = torch.randn(21, 8)
    with torch.no_grad():
        out = torch_linear.linear(x, weight, None)
        torch.testing.assert_close(out, x @ weight.t())
        assert out.stride()[-2:] == (32, 1)[-len(shape) :] and not out._is_view()
        bias = torch.randn(21)
        torch.testing.assert_close(torch_linear.linear(x, weight, bias), x @ weight.t() + bias)
    weight.requires_grad_()
    torch_linear.linear(x, weight, None).sum().backward()
    assert weight.grad is not None
