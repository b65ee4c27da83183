"""Small values between ranks: JSON and bytes as tensors of bytes, without the pickle of torch's object collectives."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from frontier_llm.comm.axis import Axis
from frontier_llm.comm.collectives import all_gather, all_reduce_, broadcast_


def _encode(value: Any, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8).to(device)


def _decode(encoded: Tensor) -> Any:
    return json.loads(encoded.cpu().numpy().tobytes())


def all_gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """Every rank's value, in axis order, on every rank. Collective."""
    if axis.size == 1:
        return [value]
    encoded = _encode(value, device)
    lengths = all_gather(torch.tensor([encoded.numel()], dtype=torch.int64, device=device), axis).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: encoded.numel()] = encoded
    rows = all_gather(padded, axis).view(axis.size, -1)
    return [_decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def broadcast_bytes(value: bytes, axis: Axis, device: torch.device) -> bytes:
    """Rank 0's bytes on every rank; the others' are ignored. Collective."""
    if axis.size == 1:
        return value
    length = broadcast_(torch.tensor([len(value)], dtype=torch.int64, device=device), axis, 0)
    buffer = torch.zeros(max(int(length), 1), dtype=torch.uint8, device=device)
    if axis.rank == 0 and value:
        buffer.copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
    return broadcast_(buffer, axis, 0).cpu().numpy().tobytes()[: int(length)]


def broadcast_json(value: Any, axis: Axis, device: torch.device) -> Any:
    """Rank 0's value on every rank; the others' are ignored. Collective."""
    if axis.size == 1:
        return value
    return json.loads(broadcast_bytes(json.dumps(value).encode(), axis, device))


def maximum(values: list[int], axis: Axis, device: torch.device) -> list[int]:
    """Element-wise maximum over the ranks. Collective."""
    return [
        int(value)
        for value in all_reduce_(torch.tensor(values, dtype=torch.int64, device=device), axis, "max").tolist()
    ]
