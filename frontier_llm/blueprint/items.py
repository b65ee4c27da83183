"""The words in which `blueprint/work.py` says what is computed, sent and kept: items of a phase and a cause, each
one kind of work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import RECOMPUTE, ModelConfig
from frontier_llm.config.fields import NonNegativeFloat

ALIGNMENT = 8  # elements: 16 bytes, what matrix units and vector loads need
STATISTICS = 3  # maximum, sum of exponentials and target logit per token

# causes: what an item is listed under in a plan's breakdown
PRODUCTS = "matrix products"
ATTENTION = "attention"
PASSES = "norms, activation, residual"
SENDING = "tp communication"
EXCHANGE = "cp communication"
ADDING = "adding weight gradients"  # every microbatch of a step but the first, which only writes
EMBEDDING = "embedding"
HEAD = "head"
LOSS = "cross-entropy"
SHARDS = "sharded weights and gradients"


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What a training software does, as a machine file's stack says it. The defaults are this package's own."""

    attention: Literal["flash", "unfused"] = "flash"
    dropout: bool = False
    fused_softmax: bool = True  # unfused attention only: scale, mask and softmax in one kernel, in 16 bit
    fused: bool = True  # norm, bias+activation, residual in one kernel each
    fused_cross_entropy: bool = True  # 16-bit logits read once forward; else a chain of kernels over fp32 copies
    gradient_bytes: Literal[2, 4] = 4  # in which the gradients are summed over dp
    accumulate_bytes: NonNegativeFloat = 8.0  # moved per parameter to add one microbatch's gradient
    optimizer_bytes: NonNegativeFloat = 30.0  # moved per owned parameter by the optimizer step
    p2p_split: bool = False  # pipeline messages are cut over tp even without sequence parallelism (scatter-gather)
    # pipeline messages occupy the rank (Megatron, DeepSpeed) instead of flowing beside its compute
    blocking_messages: bool = False
    # gradients are summed over dp in pieces of so many parameters; 0 = all at once
    bucket_parameters: NonNegativeFloat = 0.0
    hierarchical: bool = False  # collectives that span nodes may go in two stages, and do where that is faster


@dataclass(frozen=True, kw_only=True)
class Software(Habits):
    """And what is measured of it or chosen in a run, as far as it decides what is computed, sent and kept."""

    # rate of the layers' products over that in 16 bit (FP8 arithmetic); head and attention stay in 16 bit
    linear_speedup: float = 1.0
    checkpoints_cut: bool = False  # recomputation's checkpoints are cut over tp even without sequence parallelism


class Phase(Enum):
    """Which action of a schedule an item belongs to."""

    F = "forward"
    I = "input gradient"  # noqa: E741
    W = "weight gradient"


class Under(Enum):
    """What runs beside a collective, so that less of it shows."""

    NOTHING = "nothing"
    PRODUCT = "the product that it feeds or drains"
    GRADIENT = "another gradient's product, about as long"
    HEAD = "the head's product, which is far longer"
    ATTENTION = "attention to what is there already"
    SHARED = "the shared expert"
    OTHER = "the other microbatch, where the schedule plays pairs"


@dataclass(frozen=True)
class Product:
    """`batch` matrix products (m, k) x (k, n)."""

    m: int
    n: int
    k: int
    batch: int = 1
    parameter: str = ""  # of which weight; "" = of activations
    fp8: bool = False  # in 8 bits where the software does that
    aligned: bool = True

    @property
    def flops(self) -> float:
        """A multiplication and an addition each."""
        return 2.0 * self.m * self.n * self.k * self.batch

    @property
    def moved_bytes(self) -> float:
        """Operands read and result written once, in 16 bit."""
        return 2.0 * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True)
class FlashCore:
    """Causal flash attention of `queries` positions to a sequence of `keys`, for `heads` local heads of `batch`
    sequences.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    backward: bool = False

    @property
    def flops(self) -> float:
        """Of the whole rectangle of scores and its weighted sum; backward's own recomputation does not count."""
        return (8.0 if self.backward else 4.0) * self.batch * self.heads * self.queries * self.keys * self.head_dim

    @property
    def moved_bytes(self) -> float:
        """Queries, outputs, keys and values once, backward with the gradients of all of them; in 16 bit, each head
        with keys of its own.
        """
        return (8.0 if self.backward else 4.0) * self.batch * self.heads * (self.queries + self.keys) * self.head_dim


@dataclass(frozen=True)
class Pass:
    """`kernels` memory-bound kernels that together move `moved_bytes` between HBM and the device."""

    moved_bytes: float
    kernels: int


@dataclass(frozen=True)
class Collective:
    """One collective of this rank's group along an axis; bytes as the caller sees them: the whole tensor, gathered
    or not yet scattered.
    """

    axis: str
    operation: str
    size_bytes: int
    under: Under = Under.NOTHING
    beside: Product | None = None  # both go in `comm.tensor_chunks` pieces, those of one under those of the other
    calls: int = 1  # so many of this size, one after the other


@dataclass(frozen=True)
class HostWait:
    """The host waits for numbers of the device, and then the device for the host, until that has launched so many
    operations.
    """

    launches: int


@dataclass(frozen=True)
class Keep:
    """Bytes held until backward (phase F), or from the input gradient until the weight gradient (phase W)."""

    size_bytes: float
    modes: tuple[str, ...] = RECOMPUTE  # of recomputation, under which they are held


Work = Product | FlashCore | Pass | Collective | HostWait | Keep


@dataclass(frozen=True)
class Item:
    """One thing that a rank does for a microbatch."""

    phase: Phase
    cause: str
    work: Work
    repeated_by: tuple[str, ...] = ()  # recompute modes that do it once more before backward
    apart: bool = False  # only where backward is split: the schedule has its weight gradient as an action of its own

    def repeats(self, modes: Mapping[str, float]) -> float:
        """Times that an average layer does it once more, of layers with these shares of modes."""
        return sum(share for mode, share in modes.items() if mode in self.repeated_by)


FULL = ("full",)
ANY = ("selective", "full")


def rank_tokens(model: ModelConfig, layout: Layout) -> int:
    """Tokens of a microbatch that one context-parallel rank holds."""
    return model.sequence_length // layout.cp * layout.micro_batch
