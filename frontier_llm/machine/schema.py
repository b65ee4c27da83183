"""Schema of a machine file: a cluster's devices, nodes, network and software stacks, with the source of each number.

`machine.load.rates` converts a `Machine` into the `Rates` with which `planner.costs` computes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from frontier_llm.blueprint.items import SoftwareOptions
from frontier_llm.config.fields import NonNegativeFloat, PositiveFloat, PositiveInt, Section
from frontier_llm.machine.env import Vendor, vendor_of_machine

Tag = Literal["measured", "published", "estimated"]  # "estimated" includes fitted values; the source names the data
_VENDORS: dict[str, Vendor] = {"gfx": "amd", "sm_": "nvidia"}  # first three letters of an architecture's name → vendor


class Number(Section):
    """A quantity with its source. The unit is in the key's name."""

    value: NonNegativeFloat
    tag: Tag
    source: Annotated[str, Field(min_length=3)]


class Sourced(Section):
    """Base class of sections with measured tables. One tag and one source apply to the complete table."""

    tag: Tag
    source: str


class GemmShapes(Sourced):
    """Measured matrix products. `product_s` returns these times for these shapes and interpolates near them."""

    mnk_us: tuple[tuple[PositiveInt, PositiveInt, PositiveInt, PositiveFloat], ...]


class Device(Section):
    """The device of one rank. On MI250X this is one of the package's two dies (a GCD), never the package."""

    name: str
    # "none": no particular GPU is expected. Ranks use the GPU that torch finds, otherwise the CPU. No check is made.
    vendor: Vendor = "none"
    # architecture whose prebuilt kernels the device runs: gfx90a, sm_80 …; None: any architecture of the vendor
    architecture: str | None = None
    peak_tflops: Number  # dense bf16/fp16
    memory_gib: Number
    memory_gbps: Number  # GB/s, peak.
    # Predicted memory up to which a plan is expected to run; None: plans may use all of memory_gib
    safe_gib: Number | None = None
    compute_units: Number  # number of SMs or CUs.
    # Standard deviation of the speed of devices of this type, as a share of the speed
    speed_variation: Number = Number(
        value=0, tag="estimated", source="not measured: it needs runs on more than one node"
    )
    flushes_fp16: bool = False  # its fp16 matrix products read and write 0 for numbers below 6.1e-5 (MI200)
    gemm_shapes: GemmShapes | None = None
    host_executes: bool = False  # True for a CPU, whose cores both dispatch operations and execute them

    @model_validator(mode="after")
    def _architecture_is_the_vendors(self) -> Device:
        if self.architecture is None:
            return self
        if not re.fullmatch(r"gfx[0-9a-f]{3,4}|sm_\d{2,3}", self.architecture):
            raise ValueError(
                f"{self.architecture!r} is not the name of an architecture: write e.g. gfx90a, gfx942, sm_80 or sm_90"
            )
        if re.fullmatch(r"sm_8[1-9]", self.architecture):
            raise ValueError(f"architecture {self.architecture} runs the kernels of sm_80: write sm_80")
        maker = vendor_of(self.architecture)
        if self.vendor not in ("none", maker):
            raise ValueError(f"architecture {self.architecture} belongs to vendor {maker}, but vendor is {self.vendor}")
        return self


class CollectiveTables(Sourced):
    """Measured median times of collectives inside a node: operation → ranks → one time per message size."""

    message_bytes: tuple[PositiveInt, ...]
    time_us: dict[Literal["all_reduce", "reduce_scatter", "all_gather"], dict[PositiveInt, tuple[PositiveFloat, ...]]]

    @model_validator(mode="after")
    def _rectangular(self) -> CollectiveTables:
        for rows in self.time_us.values():
            check_rectangle(rows, self.message_bytes, "ranks", least_rows=1)
        return self


class Contention(Sourced):
    """Mutual slowdown of a node's devices, for example CPU ranks that share caches and memory.

    Maps the number of busy devices to the time of a kernel divided by its time with all devices busy.
    """

    share: dict[PositiveInt, PositiveFloat]


class Waiting(Sourced):
    """Time for which ranks wait for the last rank before a collective inside a layer begins."""

    meeting_us: NonNegativeFloat  # waiting time per collective
    spread: NonNegativeFloat  # additional waiting time, as a share of the compute since the last collective.
    # Time of the collectives of sharded weights relative to the table's times; another library executes them
    sharded: NonNegativeFloat = 1.0


class Node(Section):
    """Devices and NICs of a node, and the fabric between its devices."""

    count: Number  # number of nodes of the machine
    devices: Number
    nics: Number
    nic_gbps: Number  # GB/s per NIC and direction
    fabric_gbps: dict[PositiveInt, Number]  # number of neighbouring devices → bus bandwidth of a collective, GB/s
    fabric_latency_us: Number
    fabric_hop_us: Number
    collectives: CollectiveTables | None = None
    contention: Contention | None = None
    waiting: Waiting | None = None
    links: Literal["mi250x"] | None = None  # links between devices (machine/affinity.py); None: unknown


class Network(Section):
    """The network between nodes."""

    efficiency: Number
    crowding: Number
    latency_us: Number
    hop_us: Number


class AllReduceTable(Sourced):
    """Measured median times of all-reduces over all devices of the nodes.

    Rows by node count, columns by message size.
    """

    message_bytes: tuple[PositiveInt, ...]
    time_us: dict[PositiveInt, tuple[PositiveFloat, ...]]

    @model_validator(mode="after")
    def _rectangular(self) -> AllReduceTable:
        check_rectangle(self.time_us, self.message_bytes, "nodes", least_rows=2)
        return self


def vendor_of(architecture: str) -> Vendor:
    """Return the vendor of an architecture by its name; "none" for any other text."""
    return _VENDORS.get(architecture[:3], "none")


def check_rectangle(
    time_us: Mapping[int, tuple[float, ...]],
    message_bytes: tuple[int, ...],
    rows: str,
    least_rows: int,
) -> None:
    """Raise ValueError unless a table can be interpolated.

    The rows must be complete, both axes must rise, and there must be at least two message sizes and `least_rows` rows.
    """
    short = [row for row, times in time_us.items() if len(times) != len(message_bytes)]
    if short:
        raise ValueError(f"rows for {short} {rows} do not have {len(message_bytes)} entries, one per message size")
    if list(message_bytes) != sorted(set(message_bytes)) or list(time_us) != sorted(time_us):
        raise ValueError(f"message sizes and {rows} must be in increasing order")
    if len(message_bytes) < 2 or len(time_us) < least_rows:
        raise ValueError(f"a table needs at least two message sizes and {least_rows} rows of {rows} to interpolate")


class Stack(Section, SoftwareOptions):  # type: ignore[misc]  # a Section is frozen too, which mypy does not see
    """A training software on the machine: its options, for example fused kernels, and the efficiency of its kernels."""

    description: str
    source: str  # source of the options in `SoftwareOptions`.
    # Name of another stack in this file, which has run. If a share of that stack is lower than the estimated share of
    # this stack, a plan must also be good with the lower share.
    slow_as: str = ""
    gemm_efficiency: Number
    gemm_k_half: Number
    unaligned_penalty: Number
    # rate of the experts' grouped products / rate of one product of the same size per expert
    grouped_share: Number = Number(
        value=1,
        tag="estimated",
        source="not measured: `frontier-llm calibrate` measures it if the run has experts",
    )
    # rate of the layers' matrix products in FP8 / rate in 16 bit
    linear_speedup: Number = Number(value=1, tag="estimated", source="layers' products in 16 bit")
    flash_efficiency: Number
    flash_backward: Number
    hbm_efficiency: Number
    kernel_us: Number
    launch_us: Number
    microbatch_us: Number
    step_us: Number
    dp_overlap: Number
    gather_overlap: Number
    tp_overlap: Number
    chunk_overlap: Number = Number(
        value=0,
        tag="estimated",
        source="split products of tp were never measured on this machine (bench comm)",
    )
    fabric_share: Number  # share of node.fabric_gbps that this stack's collectives reach.
    # Share of the predicted rate between nodes that this stack's collectives and messages reach
    network_share: Number = Number(value=1, tag="estimated", source="no loss of bandwidth is known")
    reserve_gib: Number
    fragmentation: Number


class QueueBin(Section):
    """A queue of the site: jobs of `nodes_from` … `nodes_to` nodes may run for `max_hours`."""

    name: str
    partition: str = ""  # Slurm's partition; '': the partition has the name of the bin.
    nodes_from: PositiveInt = 1
    nodes_to: PositiveInt
    max_hours: PositiveFloat


class Operations(Section):
    """Failure rate, checkpoint bandwidth, restart time and queue limits of the machine."""

    device_mtbf_hours: Number  # mean time between failures that end a job, per device
    checkpoint_gbps_per_node: Number  # GB/s that one node writes to the file system
    checkpoint_gbps_total: Number  # GB/s of the complete file system
    restart_minutes: Number  # time from a failure to the first step after the restart
    queue: tuple[QueueBin, ...] = ()  # the planner uses the first queue that fits the job; site files list all queues.


class InFlight(Sourced):
    """Whether a rank may have one or many communications in flight at a time. The source gives the reason."""

    mode: Literal["one", "many"]


# Architectures on which several communications in flight can hang. They use one communication in flight until a hang
# test on the machine has passed.
ONE_IN_FLIGHT = {
    "gfx90a": InFlight(
        mode="one",
        tag="published",
        source="ROCm/rccl#2191 (open): with two or three communicators in flight gfx90a hangs in 50 to 100 % of runs, "
        "in the same order on all ranks too",
    )
}


class Machine(Section):
    """A cluster."""

    name: str
    title: str
    # machine name under which machine.env lists the variables of the ranks; default: the name of the file, or of its
    # base
    environment: str
    device: Device
    node: Node
    network: Network
    allreduce: AllReduceTable | None = None
    algorithms: str | None = None  # table in configs/algorithms for runs on this machine (comm.algorithms).
    # Mode and source of comm.in_flight=auto
    in_flight: InFlight = InFlight(mode="many", tag="estimated", source="no hang is known")
    default_stack: str
    stacks: dict[str, Stack]
    operations: Operations | None = None

    @model_validator(mode="after")
    def _default_exists(self) -> Machine:
        if self.default_stack not in self.stacks:
            raise ValueError(f"default_stack {self.default_stack!r} is not one of the stacks {sorted(self.stacks)}")
        return self

    @model_validator(mode="after")
    def _slow_stacks_exist(self) -> Machine:
        for name, stack in self.stacks.items():
            if stack.slow_as not in ("", *self.stacks):
                raise ValueError(
                    f"slow_as {stack.slow_as!r} of stack {name} is not one of the stacks {sorted(self.stacks)}"
                )
        return self

    @model_validator(mode="after")
    def _environment_is_the_vendors(self) -> Machine:
        meant = vendor_of_machine(self.environment)
        if "none" not in (meant, self.device.vendor) and meant != self.device.vendor:
            raise ValueError(
                f"device.vendor is {self.device.vendor}, but environment {self.environment} sets the variables of "
                f"{meant}: "
                "set `environment:` to a machine of the same vendor"
            )
        return self

    def in_flight_on(self, architecture: str | None) -> InFlight:
        """Return the number of communications that a rank may have in flight on a device of `architecture`.

        The machine file decides. Exception: on an architecture of ONE_IN_FLIGHT, `mode: many` is valid only with the
        tag `measured`, which `bench comm --hang-test` writes.
        """
        rule = ONE_IN_FLIGHT.get(architecture or "")
        stated = self.in_flight
        if rule is None or stated.mode == "one" or stated.tag == "measured":
            return stated
        return rule

    @property
    def devices_per_node(self) -> int:
        """Number of GPUs of a node. An MI250X node has 8 (its GCDs)."""
        return int(self.node.devices.value)
