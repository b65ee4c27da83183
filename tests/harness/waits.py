"""Records the calls at which the host of a GPU would wait for the device, while a step computes values on a CPU."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from frontier_llm.certificate.device_step.waits import HostWaits


class Waits(HostWaits):
    """Records the operators and functions that wait, in order. Every tensor stands for a tensor of the GPU, except the
    copies that `cpu` has made.
    """

    def __init__(self) -> None:
        super().__init__("cpu")
        self._copies: list[Tensor] = []  # tensors that cpu() has made

    @property
    def names(self) -> list[str]:
        """Names of the operators and functions, in order."""
        return [wait.name for wait in self.waits]

    def __enter__(self) -> Self:
        super().__enter__()
        self.record_calls(Tensor, "tolist", lambda args, _: not self._is_copy(args[0]))
        for name in ("to", "cuda"):
            self.record_calls(Tensor, name, _is_pageable)
        self.replace(Tensor, "cpu", lambda tensor: self._copied(tensor))
        self.record_calls(Tensor, "cpu", lambda *_: True)
        return self

    def _copied(self, tensor: Tensor) -> Tensor:
        self._copies.append(tensor.detach().clone())
        return self._copies[-1]

    def _is_copy(self, tensor: Tensor) -> bool:
        return any(tensor.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr() for copy in self._copies)


def _is_pageable(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return True for a copy to a device that is not asynchronous. A change of the type alone copies nothing."""
    places = [*args[1:2], options.get("device")]
    names_device = any(isinstance(place, str | torch.device | Tensor) for place in places)
    return names_device and not options.get("non_blocking", False)
