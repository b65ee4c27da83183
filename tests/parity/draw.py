"""Generates random parity cases: odd shapes, uneven stages, three ranks on an axis, and random options.

`scripts/parity_full.sh --random N` runs them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from frontier_llm.errors import LayoutError
from frontier_llm.schedule import one_end
from frontier_llm.topology.plan import make_plan
from tests.harness.families import FAMILIES
from tests.parity.cases import FACTORS, MAX_RANKS, Case

DEGREES = [(tp, pp, dp) for tp in range(1, 9) for pp in range(1, 9) for dp in range(1, 9) if tp * pp * dp <= MAX_RANKS]


def random_cases(seed: int) -> Iterator[Case]:
    """Yield an endless sequence of cases. Cases that `make_plan` refuses are skipped."""
    draw = random.Random(seed)
    while True:
        case = _anything(draw)
        try:
            make_plan(case.config(), case.world_size)
        except LayoutError:
            continue
        yield case


def _anything(draw: random.Random) -> Case:
    """Return a random case. In nine of ten cases each size is a multiple of the degree that must divide it."""
    tp, pp, dp = draw.choice(DEGREES)
    choice = {
        name: draw.choice(values)
        for name, values in FACTORS.items()
        if name not in ("degrees", "bucket_elements", "micro_batch")
    }
    cut = tp if draw.random() < 0.9 else 1
    chunks = (
        draw.randint(1, 3)
        if choice["schedule"] == "interleaved" and pp > 1
        else 2
        if one_end(choice["schedule"])
        else 1
    )
    layers = pp * chunks + draw.choice((0, 0, 1, 2, 3))
    rows = draw.randint(1, 8)
    length = rows * (cut if choice["sequence_parallel"] else 1)
    multiple = cut * draw.randint(1, 8)
    micro_batch = draw.randint(1, 3)
    model = _model(draw, choice["family"], cut, layers, length, multiple)
    settings = {
        "batch.global_batch": dp * micro_batch * draw.randint(1, 7),
        "optimizer.clip_norm": draw.choice((0.0, 0.5)),
        "optimizer.weight_decay": draw.choice((0.0, 0.1)),
        # With this eps a gradient that is zero except for rounding (the key bias) changes no weight.
        "optimizer.eps": 0.000001,
        "parallel.chunks": chunks,
        **{f"model.{key}": value for key, value in model.items()},
    }
    if draw.random() < 0.5:
        bounds = [0, *sorted(draw.sample(range(1, layers), pp * chunks - 1)), layers]
        settings["parallel.stage_layers"] = [end - start for start, end in pairwise(bounds)]
    return Case(
        **{**choice, "tensor_chunks": draw.choice([n for n in range(1, rows + 1) if rows % n == 0]) if tp > 1 else 1},
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batch=micro_batch,
        bucket_elements=draw.choice((1, 200, 3000, 40_000_000)),
        settings=tuple(f"{key}={value}" for key, value in settings.items()),
    )


def _model(draw: random.Random, family: str, cut: int, layers: int, length: int, multiple: int) -> dict[str, Any]:
    kv_heads = cut * draw.randint(1, 2)
    queries = draw.randint(1, 3)
    rope = FAMILIES[family]["position"] == "rope"
    return {
        "layers": layers,
        "hidden": draw.randint(3, 40),
        "heads": kv_heads * queries,
        "kv_heads": kv_heads,
        "head_dim": draw.choice((4, 8, 12)) if rope else draw.randint(1, 9),
        "ffn_hidden": cut * draw.randint(1, 12),
        "vocab_size": draw.randint(2, 60),
        "vocab_multiple": multiple,
        "sequence_length": length,
        "tied_embeddings": str(draw.random() < 0.5).lower(),
        "bias": str(draw.random() < 0.5).lower(),
    }
