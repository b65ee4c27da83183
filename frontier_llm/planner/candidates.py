"""Every legal layout of a model on a number of devices, as one Workload whose layout fields are arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from frontier_llm.config import ModelConfig
from frontier_llm.costs.workload import DTYPE_BYTES, FSDP, GPIPE, RECOMPUTE, SCHEDULES, ZERO_BUBBLE, Workload, model_numbers
from frontier_llm.errors import ConfigError, Problem, divisors, nearest, suggest
from frontier_llm.topology import AXIS_ORDERS
from frontier_llm.topology.plan import tp_limit

COLUMNS = ("tp", "pp", "dp", "chunks", "B", "m", "sp", "recompute", "zero", "dp_outer", "schedule")  # of a table of layouts
MAX_MICROBATCH = 64
MAX_CHUNKS = 8

# --fix key → the layout field it fixes
FIXABLE = {
    "tensor": "tp",
    "pipeline": "pp",
    "data": "dp",
    "chunks": "chunks",
    "micro_batch": "B",
    "sequence_parallel": "sp",
    "recompute": "recompute",
    "zero": "zero",
    "data_mode": "zero",
    "schedule": "schedule",
    "axis_order": "dp_outer",
    "gradient_wire": "gradient_bytes",
}


def tensor_degrees(model: ModelConfig, limit: int) -> list[int]:
    """tp that divides heads, key/value heads, MLP width and padded vocabulary, up to `limit` devices."""
    sizes = (model.heads, tp_limit(model), model.ffn_hidden, model.padded_vocab_size)
    return [tp for tp in divisors(tp_limit(model)) if tp <= limit and all(size % tp == 0 for size in sizes)]


def enumerate_layouts(
    model: ModelConfig, devices: int, global_batch: int, tp_max: int, fixed: Mapping[str, Any] | None = None, dtype_bytes: int = 2
) -> Workload:
    """All layouts that `topology.make_plan` accepts on `devices`, restricted to `fixed` (parsed by `parse_fixed`).

    Empty when there are none; the caller says what to change.
    """
    fixed = dict(fixed or {})
    rows: list[np.ndarray] = []
    for tp in tensor_degrees(model, tp_max):
        for pp in divisors(devices // tp) if devices % tp == 0 else []:
            if pp > model.layers:
                break
            dp = devices // (tp * pp)
            wanted = all(fixed.get(axis, degree) == degree for axis, degree in (("tp", tp), ("pp", pp), ("dp", dp)))
            if wanted and global_batch % dp == 0:
                rows.append(_options(model, tp, pp, dp, global_batch // dp, fixed))
    found = _workload(model, np.concatenate([np.zeros((0, len(COLUMNS))), *rows]), dtype_bytes)
    return replace(found, gradient_bytes=fixed.get("gradient_bytes", 0))


def _options(model: ModelConfig, tp: int, pp: int, dp: int, per_replica: int, fixed: Mapping[str, Any]) -> np.ndarray:
    """Rows of COLUMNS: everything that is left to choose for one (tp, pp, dp)."""
    microbatches = [B for B in divisors(per_replica) if B <= MAX_MICROBATCH] if per_replica <= 4096 * MAX_MICROBATCH else []
    plays: list[tuple[int, int]] = [(1, SCHEDULES.index("1f1b"))]
    if pp > 1 or fixed.get("schedule") == GPIPE:  # without a pipeline all schedules are one
        plays += [(1, GPIPE)]
    if pp > 1:
        plays += [(1, ZERO_BUBBLE)]
        most = min(model.layers // pp, MAX_CHUNKS)
        plays += [(v, SCHEDULES.index("interleaved")) for v in range(2, most + 1)]
    sequence = [0, 1] if tp > 1 and model.sequence_length % tp == 0 else [0]
    # topology.plan refuses sharded weights with a pipeline (they are gathered once per microbatch, and it needs many) or narrow gradients
    sharded = [FSDP] if pp == 1 and not fixed.get("gradient_bytes") else []
    modes = [0, 1, *sharded] if dp > 1 else [1]
    orders = [0, 1] if pp > 1 and dp > 1 else [0]
    rows = [
        (tp, pp, dp, v, B, per_replica // B, sp, recompute, zero, order, play)
        for B, (v, play), sp, recompute, zero, order in product(
            _kept(microbatches, fixed, "B"),
            [(v, play) for v, play in plays if fixed.get("chunks", v) == v and fixed.get("schedule", play) == play],
            _kept(sequence, fixed, "sp"),
            _kept(sorted(RECOMPUTE.values()), fixed, "recompute"),
            _kept(modes, fixed, "zero"),
            _kept(orders, fixed, "dp_outer") or ([0] if len(orders) == 1 else []),
        )
    ]
    return np.array(rows, dtype=float).reshape(len(rows), len(COLUMNS))


def _kept(values: list[int], fixed: Mapping[str, Any], key: str) -> list[int]:
    return [value for value in values if fixed.get(key, value) == value]


def _workload(model: ModelConfig, table: np.ndarray, dtype_bytes: int) -> Workload:
    columns = {name: table[:, index] for index, name in enumerate(COLUMNS)}
    return Workload(**model_numbers(model), **columns, dtype_bytes=dtype_bytes)


def count(w: Workload) -> int:
    """Layouts in an enumeration."""
    return len(w.tp)


def parse_fixed(words: list[str]) -> dict[str, Any]:
    """['tensor=8', 'recompute=full'] → {'tp': 8, 'recompute': 2}. Raises ConfigError for all wrong words at once."""
    fixed: dict[str, Any] = {}
    problems = []
    for word in words:
        key, separator, text = word.partition("=")
        name = key.rsplit(".", 1)[-1]  # parallel.tensor=8 is fine too
        if not separator or name not in FIXABLE:
            problems.append(Problem(word, "is not a choice that can be fixed", suggest(name, FIXABLE)))
            continue
        try:
            fixed[FIXABLE[name]] = _value(name, text)
        except (ValueError, KeyError):
            problems.append(Problem(word, f"{text!r} is not a value of {name}", f"use {_valid(name)}"))
    if problems:
        raise ConfigError(problems)
    return fixed


def _value(name: str, text: str) -> int:
    if name == "recompute":
        return RECOMPUTE[text]
    if name == "schedule":
        return SCHEDULES.index(text)
    if name == "axis_order":
        return AXIS_ORDERS.index(text)
    if name == "data_mode":
        return {"zero": 1, "fsdp": FSDP}[text]
    if name == "gradient_wire":
        return {"full": 0, "bf16": DTYPE_BYTES["bf16"]}[text]
    if name == "sequence_parallel":
        return {"true": 1, "false": 0, "1": 1, "0": 0}[text.lower()]
    value = int(text)
    if value < (0 if name == "zero" else 1):
        raise ValueError(text)
    return value


def _valid(name: str) -> str:
    choices: dict[str, Any] = {
        "recompute": list(RECOMPUTE),
        "schedule": SCHEDULES,
        "axis_order": AXIS_ORDERS,
        "sequence_parallel": ["true", "false"],
        "data_mode": ["zero", "fsdp"],
        "gradient_wire": ["full", "bf16"],
    }
    return ", ".join(choices[name]) if name in choices else "a whole number"


def legal_node_counts(model: ModelConfig, devices_per_node: int, nodes: int, global_batch: int, fixed: Mapping[str, Any]) -> list[int]:
    """The nearest node counts, below and above, that admit a layout."""

    def legal(number: int) -> bool:
        only = {**fixed, "zero": fixed.get("zero", 1), "recompute": fixed.get("recompute", 2)}
        return count(enumerate_layouts(model, number * devices_per_node, global_batch, devices_per_node, only)) > 0

    below = next((number for number in range(nodes - 1, 0, -1) if legal(number)), None)
    above = next((number for number in range(nodes + 1, 4 * nodes + 64) if legal(number)), None)
    found = [number for number in (below, above) if number]
    return nearest(nodes, found) if found else []
