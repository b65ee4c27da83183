"""The runs that the parity tests compare.

`every_case` yields all legal combinations of degrees, sequence parallelism, schedule, recompute mode and family.
`pairwise` returns fewer cases that contain every legal pair of settings.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations, islice, product
from typing import Any

from frontier_llm.config import RunConfig, build
from frontier_llm.config.load import merge, parse_overrides
from tests.harness.families import ALL_FAMILIES, FAMILIES

MAX_RANKS = 8
GLOBAL_BATCH = 8
STEPS = 3

# Eight layers give one layer to each of four stages with two chunks.
# The vocabulary has 50 real rows and is padded to 64 rows. With tp 4 the last rank has two real rows. Initial weights
# are ten times the usual size, so that no gradient is small.
SHAPE: dict[str, Any] = {
    "layers": 8,
    "hidden": 32,
    "heads": 8,
    "ffn_hidden": 48,
    "vocab_size": 50,
    "vocab_multiple": 64,
    "sequence_length": 12,
    "init_std": 0.2,
}


@dataclass(frozen=True)
class Case:
    """The settings of one run. The defaults describe the run on one rank."""

    family: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    recompute: str = "none"
    micro_batch: int = 1
    zero: int = 1
    order: str = "tp-dp-pp"
    documents: bool = False
    read_only: bool = False  # some tokens are read but not trained on
    transport: str = "auto"
    overlap_gradients: bool = True
    overlap_messages: bool = True
    overlap_weights: bool = False
    bucket_elements: int = 40_000_000
    tensor_chunks: int = 1
    ranks_per_node: int | None = None  # simulated
    settings: tuple[str, ...] = ()  # key=value, as on the command line; they override all fields above

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def chunks(self) -> int:
        return 2 if self.schedule.startswith(("interleaved", "zb-v", "v-", "dualpipe")) and self.pp > 1 else 1

    def __str__(self) -> str:
        default = Case(self.family)
        extras = [
            f"{key}={value}"
            for key, value in asdict(self).items()
            if key not in ("family", "tp", "pp", "dp") and value != getattr(default, key)
        ]
        return " ".join([f"{self.family} tp{self.tp} pp{self.pp} dp{self.dp}", *extras])

    def serial(self) -> Case:
        """Return the run on one rank that must compute the same numbers."""
        same = tuple(
            setting for setting in self.settings if setting.startswith(("model.", "batch.global_batch=", "optimizer."))
        )
        return Case(self.family, documents=self.documents, read_only=self.read_only, settings=same)

    def config(self, dtype: str = "fp64") -> RunConfig:
        """Return the configuration. Gradient clipping is active and the warm-up ends within the three steps."""
        content: dict[str, Any] = {
            "model": SHAPE | ALL_FAMILIES[self.family],
            "parallel": {
                "tensor": self.tp,
                "pipeline": self.pp,
                "data": self.dp,
                "context": self.cp,
                "chunks": self.chunks,
                "schedule": self.schedule,
                "sequence_parallel": self.sequence_parallel,
                "axis_order": self.order,
                "zero": self.zero,
            },
            "batch": {"global_batch": GLOBAL_BATCH, "micro_batch": self.micro_batch},
            "optimizer": {"lr": 1e-2, "min_lr": 1e-3, "weight_decay": 0.1, "clip_norm": 0.5, "warmup_steps": 2},
            "precision": {"dtype": dtype},
            "data": {"reset_at_documents": self.documents},
            "comm": {
                "transport": self.transport,
                "overlap_gradients": self.overlap_gradients,
                "overlap_messages": self.overlap_messages,
                "overlap_weights": self.overlap_weights,
                "bucket_elements": self.bucket_elements,
                "tensor_chunks": self.tensor_chunks,
            },
            "train": {"steps": STEPS + 1, "recompute": self.recompute},
        }
        return build(RunConfig, merge(content, parse_overrides(self.settings)))

    def legal(self) -> bool:
        """Return whether the pool has enough ranks and each setting has an effect at these degrees."""
        only_tp = self.sequence_parallel or self.tensor_chunks > 1
        return (
            self.world_size <= MAX_RANKS and (self.tp > 1 or not only_tp) and (self.pp > 1 or self.schedule == "1f1b")
        )


DEGREES = [(tp, pp, dp) for tp, pp, dp in product((1, 2, 4), repeat=3) if tp * pp * dp <= MAX_RANKS]
FACTORS: dict[str, list[Any]] = {
    "degrees": DEGREES,
    "family": list(FAMILIES),
    "sequence_parallel": [False, True],
    # test_layouts.py runs the other schedules of the package.
    "schedule": ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "v-half"],
    "recompute": ["none", "selective", "full"],
    "micro_batch": [1, 2],
    "zero": [1, 0],
    "order": ["tp-dp-pp", "tp-pp-dp"],
    "documents": [False, True],
    "transport": ["auto", "torch"],
    "overlap_gradients": [True, False],
    "overlap_messages": [True, False],
    "overlap_weights": [False, True],
    "bucket_elements": [40_000_000, 3_000],
    "tensor_chunks": [1, 3],
}


def _case(choice: dict[str, Any]) -> Case:
    tp, pp, dp = choice["degrees"]
    return Case(tp=tp, pp=pp, dp=dp, **{key: value for key, value in choice.items() if key != "degrees"})


def every_case() -> Iterator[Case]:
    """Yield all combinations of degrees, sequence parallelism, schedule, recompute mode and three families.

    The other factors rotate through their values.
    """
    rotating = [
        key for key in FACTORS if key not in ("degrees", "family", "sequence_parallel", "schedule", "recompute")
    ]
    names = ("degrees", "family", "sequence_parallel", "schedule", "recompute")
    for turn, values in enumerate(
        product(FACTORS["degrees"], ("gpt", "llama", "mpt"), *(FACTORS[name] for name in names[2:]))
    ):
        rest = {key: FACTORS[key][(turn >> place) % len(FACTORS[key])] for place, key in enumerate(rotating)}
        if values[0][0] == 1:
            rest["tensor_chunks"] = 1  # only tensor-parallel products have pieces
        case = _case(dict(zip(names, values, strict=True)) | rest)
        if case.legal():
            yield case


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def _pairs(choice: dict[str, Any]) -> set[Pair]:
    return set(combinations(choice.items(), 2))


def _completions(fixed: dict[str, Any], draw: random.Random) -> Iterator[dict[str, Any]]:
    """Yield random legal choices that agree with `fixed`. Yields nothing if no such choice exists."""
    for _ in range(1000):
        choice = {name: fixed.get(name, draw.choice(values)) for name, values in FACTORS.items()}
        if _case(choice).legal():
            yield choice


@cache
def pairwise(seed: int = 0, candidates: int = 60) -> tuple[Case, ...]:
    """Return few cases that contain every pair of legal settings.

    The choice is greedy: each new case is the best of some random candidates.
    """
    draw = random.Random(seed)
    settings = [[(name, value) for value in values] for name, values in FACTORS.items()]
    everything = [pair for first, second in combinations(settings, 2) for pair in product(first, second)]
    open_pairs = dict.fromkeys(pair for pair in everything if any(_completions(dict(pair), draw)))
    chosen = []
    while open_pairs:
        target = next(iter(open_pairs))
        best = max(
            islice(_completions(dict(target), draw), candidates),
            key=lambda choice: len(open_pairs.keys() & _pairs(choice)),
        )
        for pair in _pairs(best):
            open_pairs.pop(pair, None)
        chosen.append(_case(best))
    return tuple(chosen)
