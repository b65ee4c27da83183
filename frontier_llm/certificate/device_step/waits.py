"""Records the lines at which the host of a GPU would wait for the device, without a GPU.

The host waits if a value is read, if a shape depends on values, or if data is copied from or to pageable memory. Such a
copy ends only after all work that was queued before it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from frontier_llm.certificate.axis_types.trace import innermost, stack, text_of

# Operators that copy data to the host in torch's CUDA implementation.
OPERATORS = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique",
    "unique_consecutive",
    "unique_dim",
}


class ObservedWait(NamedTuple):
    """A call at which the host waits."""

    name: str  # name of the operator or of the function
    line: str
    phase: str  # "forward", "backward", or "" outside of the microbatches


class HostWaits(TorchDispatchMode):
    """Records the operators and functions that wait, in order. Tensors on `device_type` stand for the GPU's tensors."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.waits: list[ObservedWait] = []
        self.device_type = device_type
        self.phase = ""
        self._replaced = ExitStack()

    def wait(self, name: str) -> None:
        """Record that the host waits at the current line."""
        self.waits.append(ObservedWait(name, text_of(innermost(stack())), self.phase))

    def is_on_device(self, x: Any) -> bool:
        """Return True if `x` is a tensor that stands for a tensor of the GPU."""
        return isinstance(x, Tensor) and x.device.type == self.device_type

    def __enter__(self) -> Self:
        """Also replace functions of torch that copy to the device without an operator."""
        for name in ("__getitem__", "__setitem__"):
            self.record_calls(Tensor, name, lambda args, _: self.is_on_device(args[0]) and _has_list(args[1]))
        for name in ("tensor", "as_tensor"):
            self.record_calls(torch, name, lambda _, options: self._is_named(options.get("device")))
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the functions of torch."""
        super().__exit__(kind, error, trace)
        self._replaced.close()

    def record_calls(self, owner: Any, name: str, waits: Callable[[tuple[Any, ...], dict[str, Any]], bool]) -> None:
        """Record each call of a function of torch for which `waits(args, options)` is true."""
        plain = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if waits(args, options):
                self.wait(name)
            return plain(*args, **options)

        self.replace(owner, name, call)

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a function of torch until this context ends."""
        if name in vars(owner):
            self._replaced.callback(setattr, owner, name, vars(owner)[name])
        else:  # inherited
            self._replaced.callback(delattr, owner, name)
        setattr(owner, name, function)

    def _is_named(self, device: Any) -> bool:
        return device is not None and torch.device(device).type == self.device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operator that waits, and run it."""
        if waits_for_values(func, args, kwargs or {}):
            self.wait(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def waits_for_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operator reads values of a tensor, or has a result whose shape depends on them."""
    name = func.overloadpacket.__name__
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    by_mask = name.startswith("index") and any(
        isinstance(index, Tensor) and index.dtype is torch.bool for index in indices
    )
    by_counts = name == "repeat_interleave" and kwargs.get("output_size") is None
    return name in OPERATORS or by_mask or by_counts


def _has_list(key: Any) -> bool:
    """Return True if an index has a list or array, which torch copies to the device."""
    parts = key if isinstance(key, tuple) else (key,)
    return any(isinstance(part, list | np.ndarray) for part in parts)
