"""Records the calls at which the host of a GPU would wait for the device, while the code runs on a CPU.

The host waits if a value is read, if a shape depends on values, or if data is copied from or to pageable memory. Such a
copy ends only after all work that was queued before it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


class Waits(TorchDispatchMode):
    """Records the names of operators and calls that wait, in order. `tolist` of a copy that `cpu` has made is free."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._copies: list[Tensor] = []  # made by cpu()
        self._patches = ExitStack()

    def __enter__(self) -> Waits:
        for owner, name, waits in (
            (Tensor, "tolist", lambda args, options: not self._is_copy(args[0])),
            (Tensor, "__getitem__", lambda args, options: _has_list(args[1])),
            (Tensor, "__setitem__", lambda args, options: _has_list(args[1])),
            (Tensor, "to", _is_pageable),
            (Tensor, "cuda", _is_pageable),
            (torch, "tensor", lambda args, options: options.get("device") is not None),
            (torch, "as_tensor", lambda args, options: options.get("device") is not None),
        ):
            self._patch(owner, name, waits)
        self._patches.enter_context(patch.object(Tensor, "cpu", lambda tensor: self._cpu(tensor)))
        super().__enter__()
        return self

    def _patch(self, owner: Any, name: str, waits: Callable[[tuple[Any, ...], dict[str, Any]], bool]) -> None:
        plain = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if waits(args, options):
                self.names.append(name)
            return plain(*args, **options)

        self._patches.enter_context(patch.object(owner, name, call))

    def _cpu(self, tensor: Tensor) -> Tensor:
        self.names.append("cpu")
        self._copies.append(tensor.detach().clone())
        return self._copies[-1]

    def _is_copy(self, tensor: Tensor) -> bool:
        return any(tensor.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr() for copy in self._copies)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        kwargs = kwargs or {}
        indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
        by_mask = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype is torch.bool for index in indices
        )
        by_counts = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in OPERATORS or by_mask or by_counts:
            self.names.append(name)
        return func(*args, **kwargs)


def _has_list(key: Any) -> bool:
    """Return True if an index has a list or array, which torch copies to the device."""
    parts = key if isinstance(key, tuple) else (key,)
    return any(isinstance(part, list | np.ndarray) for part in parts)


def _is_pageable(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return True for a copy to a device that is not asynchronous. A change of the type alone copies nothing."""
    places = [*args[1:2], options.get("device")]
    names_device = any(isinstance(place, str | torch.device | Tensor) for place in places)
    return names_device and not options.get("non_blocking", False)
