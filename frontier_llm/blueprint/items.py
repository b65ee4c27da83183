"""Types of work items. An item is one computation, one communication or one kept buffer of a microbatch on one rank.

The functions of `blueprint/work.py` return lists of items. An item has a phase (forward, input gradient or weight
gradient), a cause and one kind of work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from frontier_llm.blueprint.layout import Layout
from frontier_llm.config import RECOMPUTE, ModelConfig
from frontier_llm.config.fields import NonNegativeFloat

ALIGNMENT = 8  # elements (16 bytes in 16 bit): the alignment that matrix units and vector loads need
STATISTICS = 3  # numbers that the cross-entropy keeps per token: maximum, sum of exponentials and target logit

# Values of `Item.cause`. A plan's breakdown of the step time has one line for each.
PRODUCTS = "matrix products"
ATTENTION = "attention"
PASSES = "norms, activation, residual"
SENDING = "tp communication"
EXCHANGE = "cp communication"
ADDING = "adding weight gradients"  # work of every microbatch except the first, which overwrites the buffers
EMBEDDING = "embedding"
HEAD = "head"
LOSS = "cross-entropy"
SHARDS = "sharded weights and gradients"


# How this package adds a weight gradient to its fp32 buffer on a GPU (ops/torch_linear.py). "in-product": the kernel of
# the matrix product adds it. Otherwise a separate kernel adds the product's output, which is in fp32 ("fp32-product")
# or rounded to 16 bit ("rounded-product").
WeightGradients = Literal["in-product", "fp32-product", "rounded-product"]
# Bytes of memory traffic per parameter of each method, in addition to a product that writes its result in 16 bit.
# "in-product" reads 4 and writes 4, and saves the write of 2. "fp32-product" writes 4 instead of 2, then reads 4 + 4
# and writes 4. "rounded-product" reads 2 + 4 and writes 4.
ADDING_BYTES: dict[WeightGradients, float] = {"in-product": 6.0, "fp32-product": 14.0, "rounded-product": 10.0}


@dataclass(frozen=True, kw_only=True)
class SoftwareOptions:
    """Software options: how a training framework executes a step. A machine file lists them per software stack.

    The defaults describe this package.
    """

    attention: Literal["flash", "unfused"] = "flash"
    dropout: bool = False
    # True: scale, mask and softmax are one 16-bit kernel. Only for unfused attention.
    fused_softmax: bool = True
    fused: bool = True  # True: norm, bias with activation, and residual are one kernel each.
    # True: one kernel reads the 16-bit logits once in forward. False: a chain of kernels works on fp32 copies.
    fused_cross_entropy: bool = True
    # Bytes of optimizer state per parameter, master copy included. 0 = the bytes of this package's optimizer.
    optimizer_state_bytes: NonNegativeFloat = 0.0
    gradient_bytes: Literal[2, 4] = 4  # Bytes per element of a gradient that is summed over dp.
    # Bytes per parameter of additional gradient buffers. DeepSpeed's BF16_Optimizer keeps fp32 sums and also the 16-bit
    # gradients of the last microbatch.
    further_gradient_bytes: NonNegativeFloat = 0.0
    # True: with ZeRO-1, an all-reduce gives every rank all summed gradients (BF16_Optimizer). False: a reduce-scatter
    # gives each rank its shard.
    all_reduces_gradients: bool = False
    accumulate_bytes: NonNegativeFloat = 8.0  # Bytes of memory traffic per parameter to add one microbatch's gradient.
    # True: the kernel that computes a weight gradient also adds it to the buffer. The kernel takes as long as the
    # product or the addition, whichever is longer.
    adding_in_product: bool = False
    # How the installed torch adds weight gradients. A value replaces `accumulate_bytes` and `adding_in_product`, unless
    # `accumulate_bytes` is 0. None: not known.
    weight_gradients: WeightGradients | None = None
    optimizer_bytes: NonNegativeFloat = 30.0  # Bytes of memory traffic per owned parameter in the optimizer step.
    # True: pipeline messages are cut over tp even without sequence parallelism (scatter-gather).
    p2p_split: bool = False
    # Communication of experts that are split over etp ranks. False: each token row is sent to all of these ranks. True:
    # each token row is sent once over ep and gathered over tp, and a reduce-scatter sums the outputs.
    expert_rows_gathered: bool = False
    # True: FP8 has one scale per row. A separate kernel scales and converts each operand of a product, once for each
    # dim that is summed over in a product of forward or backward. False: FP8 has one scale per tensor, and
    # `linear_speedup` includes the conversions.
    scales_fp8_rows: bool = False
    # True: after each forward and each backward of a chunk, the largest absolute values of FP8 tensors are reduced over
    # tp, cp and dp (delayed scaling of Transformer Engine in Megatron-Core's blocks).
    reduces_fp8_maxima: bool = False
    # True: pipeline messages block the rank (Megatron, DeepSpeed) and do not overlap with its compute.
    blocking_messages: bool = False
    # Parameters per bucket of the gradient sum over dp. 0 = all parameters in one bucket.
    bucket_parameters: NonNegativeFloat = 0.0
    hierarchical: bool = False  # True: collectives that span nodes run in two stages if two stages are faster.


@dataclass(frozen=True, kw_only=True)
class Software(SoftwareOptions):
    """Software options, with the values that a machine's measurements or a run add to them."""

    # rate of the layers' products relative to 16 bit (FP8 arithmetic); head and attention stay in 16 bit
    linear_speedup: float = 1.0
    checkpoints_cut: bool = False  # True: activation checkpoints are cut over tp even without sequence parallelism


class Phase(Enum):
    """Action of a pipeline schedule in which a rank executes an item."""

    F = "forward"
    I = "input gradient"  # noqa: E741
    W = "weight gradient"


class Under(Enum):
    """Kind of work during which a collective runs, so that a part of the collective's time is hidden."""

    NOTHING = "nothing"
    PRODUCT = "the product that uses its result or computes its input"
    GRADIENT = "the product of another gradient, of about the same length"
    HEAD = "the product of the output head, which is far longer"
    ATTENTION = "attention to keys and values that have already arrived"
    SHARED = "the shared expert"
    OTHER = "the other microbatch, if the schedule runs pairs"


@dataclass(frozen=True)
class Product:
    """`batch` matrix products (m, k) x (k, n)."""

    m: int
    n: int
    k: int
    batch: int = 1
    parameter: str = ""  # name of the weight; "" = both operands are activations
    fp8: bool = False  # True: the product is computed in 8 bits if the software supports this
    aligned: bool = True  # True: the head dimension is a multiple of 8 elements
    grouped: bool = False  # True: one kernel computes the products of all experts
    added_bytes: float = 0.0  # additional memory traffic of the kernel if it adds the result to a buffer

    @property
    def flops(self) -> float:
        """Multiplications and additions, counted separately."""
        return 2.0 * self.m * self.n * self.k * self.batch

    @property
    def moved_bytes(self) -> float:
        """Bytes for reading both operands and writing the result once, in 16 bit, plus `added_bytes`."""
        return 2.0 * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n) + self.added_bytes


@dataclass(frozen=True)
class FlashCore:
    """Causal flash attention of `queries` positions to `keys` positions, for `heads` heads in `batch` sequences."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    backward: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of all queries x keys scores and of the weighted sums, as if attention were not causal.

        The recomputation inside the backward kernel is not counted.
        """
        return (8.0 if self.backward else 4.0) * self.batch * self.heads * self.queries * self.keys * self.head_dim

    @property
    def moved_bytes(self) -> float:
        """Bytes of queries, outputs, keys and values, moved once in 16 bit; in backward also of their gradients.

        Keys and values count once for every query head, even if query heads share them.
        """
        return (8.0 if self.backward else 4.0) * self.batch * self.heads * (self.queries + self.keys) * self.head_dim


@dataclass(frozen=True)
class Pass:
    """`kernels` memory-bound kernels that together read and write `moved_bytes` of HBM."""

    moved_bytes: float
    kernels: int


@dataclass(frozen=True)
class Collective:
    """One collective of this rank's group along a parallel axis.

    `size_bytes` is the complete tensor: the output of an all-gather, the input of a reduce-scatter.
    """

    axis: str
    operation: str
    size_bytes: int
    under: Under = Under.NOTHING
    # matrix product that is split into `comm.tensor_chunks` pieces together with this collective
    beside: Product | None = None
    calls: int = 1  # number of equal collectives, one after the other


@dataclass(frozen=True)
class HostWait:
    """A wait of the host for values that the device computes.

    Afterwards the device is idle until the host has launched `launches` operations.
    """

    launches: int


@dataclass(frozen=True)
class Keep:
    """Bytes held from forward to backward (phase F), or from the input gradient to the weight gradient (phase W)."""

    size_bytes: float
    modes: tuple[str, ...] = RECOMPUTE  # recomputation modes in which the bytes are held


Work = Product | FlashCore | Pass | Collective | HostWait | Keep


@dataclass(frozen=True)
class Item:
    """One computation, communication or kept buffer of a microbatch on a rank."""

    phase: Phase
    cause: str
    work: Work
    repeated_by: tuple[str, ...] = ()  # recompute modes that repeat the work before backward
    apart: bool = False  # True: executed only if the schedule computes weight gradients as separate actions

    def repeats(self, modes: Mapping[str, float]) -> float:
        """Return the mean number of repetitions of the work over the layers. `modes` maps a recompute mode to the
        fraction of layers with this mode.
        """
        return sum(share for mode, share in modes.items() if mode in self.repeated_by)


FULL = ("full",)
ANY = ("selective", "full")


def rank_tokens(model: ModelConfig, layout: Layout) -> int:
    """Return the number of tokens of a microbatch that one context-parallel rank holds."""
    return model.sequence_length // layout.cp * layout.micro_batch


def adding_method(software: SoftwareOptions, grouped: bool = False) -> tuple[bool, float]:
    """Return (True if the kernel of the matrix product adds the weight gradient, bytes of memory traffic per
    parameter).

    This package's kernel for the products of experts (`grouped`) always adds its result itself. 0 bytes means that the
    measured times of the products include the addition.
    """
    method = software.weight_gradients
    if method is None or software.accumulate_bytes == 0:
        return software.adding_in_product, software.accumulate_bytes
    if grouped:
        method = "in-product"
    return method == "in-product", ADDING_BYTES[method]


def weight_gradient(
    cause: str, product: Product, software: SoftwareOptions, further_bytes: float = 0.0
) -> Iterator[Item]:
    """Yield the matrix product of a weight gradient and its accumulation: one kernel or two, depending on the software.

    `further_bytes` of memory traffic per parameter are added to the traffic of the software's method.
    """
    in_product, bytes_each = adding_method(software, product.grouped)
    added_bytes = (bytes_each + further_bytes) * product.batch * product.m * product.n
    if in_product:
        yield Item(Phase.W, cause, replace(product, added_bytes=added_bytes))
    else:
        yield Item(Phase.W, cause, product)
        yield Item(Phase.W, ADDING, Pass(added_bytes, 0))
