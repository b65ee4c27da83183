"""What a machine file may say. Every number carries where it comes from; `costs` computes with the `Rates` made of
it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from frontier_llm.blueprint.items import Habits
from frontier_llm.config.fields import NonNegativeFloat, PositiveFloat, PositiveInt, Section
from frontier_llm.machine.env import Vendor, vendor_of_machine

Tag = Literal["measured", "published", "estimated"]  # estimated includes fitted: the source then says on what
_VENDORS: dict[str, Vendor] = {"gfx": "amd", "sm_": "nvidia"}  # by the first three letters of an architecture's name


class Number(Section):
    """A quantity with its provenance; the unit is in the key's name."""

    value: NonNegativeFloat
    tag: Tag
    source: Annotated[str, Field(min_length=3)]


class Sourced(Section):
    """Base of measured tables, which say as a whole where they come from."""

    tag: Tag
    source: str


class GemmShapes(Sourced):
    """Measured matrix products. `product_s` returns these times for these shapes and interpolates near them."""

    mnk_us: tuple[tuple[PositiveInt, PositiveInt, PositiveInt, PositiveFloat], ...]


class Device(Section):
    """What one rank runs on. On MI250X that is one of the package's two dies (a GCD), never the package."""

    name: str
    # "none": no particular GPU is expected. Ranks use the GPU that torch sees, otherwise the CPU, and nothing is
    # checked.
    vendor: Vendor = "none"
    architecture: str | None = None  # gfx90a, sm_80 …: whose prebuilt kernels the device runs. None: any of the vendor
    peak_tflops: Number  # dense bf16/fp16
    memory_gib: Number
    memory_gbps: Number  # GB/s, peak
    compute_units: Number  # SMs or CUs
    # standard deviation of the speed of like devices, as a share of it
    speed_variation: Number = Number(value=0, tag="estimated", source="runs on more than one node have not told it")
    flushes_fp16: bool = False  # its fp16 matrix products take and give 0 for numbers below 6.1e-5 (MI200)
    gemm_shapes: GemmShapes | None = None
    host_executes: bool = False  # a CPU: the cores that dispatch operations are those that run them

    @model_validator(mode="after")
    def _architecture_is_the_vendors(self) -> Device:
        if self.architecture is None:
            return self
        if not re.fullmatch(r"gfx[0-9a-f]{3,4}|sm_\d{2,3}", self.architecture):
            raise ValueError(
                f"architecture {self.architecture!r} is not the name of one: write e.g. gfx90a, gfx942, sm_80 or sm_90"
            )
        if re.fullmatch(r"sm_8[1-9]", self.architecture):
            raise ValueError(f"architecture {self.architecture} runs the kernels of sm_80: write sm_80")
        maker = vendor_of(self.architecture)
        if self.vendor not in ("none", maker):
            raise ValueError(f"architecture {self.architecture} is one of vendor {maker}, and vendor is {self.vendor}")
        return self


class CollectiveTables(Sourced):
    """Measured medians of collectives inside a node: operation → ranks → one time per message size."""

    message_bytes: tuple[PositiveInt, ...]
    time_us: dict[Literal["all_reduce", "reduce_scatter", "all_gather"], dict[PositiveInt, tuple[PositiveFloat, ...]]]

    @model_validator(mode="after")
    def _rectangular(self) -> CollectiveTables:
        for rows in self.time_us.values():
            check_rectangle(rows, self.message_bytes, "ranks", least_rows=1)
        return self


class Contention(Sourced):
    """How devices of a node slow each other down: busy devices → time of a kernel over its time when all are busy."""

    share: dict[PositiveInt, PositiveFloat]


class Waiting(Sourced):
    """How long ranks stand at a meeting (a collective in the middle of a layer) for the last one, beyond the
    collective itself.
    """

    meeting_us: NonNegativeFloat  # each time
    spread: NonNegativeFloat  # and of the compute since the last meeting
    # collectives of sharded weights over those of the table: another library carries them
    sharded: NonNegativeFloat = 1.0


class Node(Section):
    """Devices, NICs and the fabric between devices."""

    count: Number  # nodes of the machine
    devices: Number
    nics: Number
    nic_gbps: Number  # GB/s per NIC and direction
    fabric_gbps: dict[PositiveInt, Number]  # bus bandwidth, GB/s, that collectives of so many neighbours reach
    fabric_latency_us: Number
    fabric_hop_us: Number
    collectives: CollectiveTables | None = None
    contention: Contention | None = None
    waiting: Waiting | None = None
    links: Literal["mi250x"] | None = None  # the map of direct links between devices, where machine/affinity.py has it


class Network(Section):
    """Between nodes."""

    efficiency: Number
    crowding: Number
    latency_us: Number
    hop_us: Number


class AllReduceTable(Sourced):
    """Measured all-reduce medians: rows by node count, columns by message size, with every device of a node taking
    part.
    """

    message_bytes: tuple[PositiveInt, ...]
    time_us: dict[PositiveInt, tuple[PositiveFloat, ...]]

    @model_validator(mode="after")
    def _rectangular(self) -> AllReduceTable:
        check_rectangle(self.time_us, self.message_bytes, "nodes", least_rows=2)
        return self


def vendor_of(architecture: str) -> Vendor:
    """The vendor that an architecture's name belongs to; "none" for any other text."""
    return _VENDORS.get(architecture[:3], "none")


def check_rectangle(
    time_us: Mapping[int, tuple[float, ...]],
    message_bytes: tuple[int, ...],
    rows: str,
    least_rows: int,
) -> None:
    """Raise ValueError unless a table can be interpolated: full rows, rising axes, at least two message sizes."""
    short = [row for row, times in time_us.items() if len(times) != len(message_bytes)]
    if short:
        raise ValueError(f"rows for {short} {rows} do not have {len(message_bytes)} entries, one per message size")
    if list(message_bytes) != sorted(set(message_bytes)) or list(time_us) != sorted(time_us):
        raise ValueError(f"message sizes and {rows} must rise")
    if len(message_bytes) < 2 or len(time_us) < least_rows:
        raise ValueError(f"a table needs at least two message sizes and {least_rows} rows of {rows} to interpolate")


class Stack(Section, Habits):  # type: ignore[misc]  # a Section is frozen too, which mypy does not see
    """How a training software uses the machine: what it does, such as what it fuses, and what its kernels reach."""

    description: str
    source: str  # of `Habits`
    gemm_efficiency: Number
    gemm_k_half: Number
    unaligned_penalty: Number
    # in FP8: their rate over that
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
        source="pieces of tp's products were never measured here (bench comm)",
    )
    fabric_share: Number  # of node.fabric_gbps that this stack's collectives reach
    reserve_gib: Number
    fragmentation: Number


class QueueBin(Section):
    """A scheduling bin: jobs of `nodes_from` … `nodes_to` nodes may run `max_hours`."""

    name: str
    nodes_from: PositiveInt
    nodes_to: PositiveInt
    max_hours: PositiveFloat


class Operations(Section):
    """What running a job there means."""

    device_mtbf_hours: Number  # mean time between failures that end a job, per device
    checkpoint_gbps_per_node: Number  # GB/s that one node writes to the file system
    checkpoint_gbps_total: Number  # GB/s of the whole file system
    restart_minutes: Number  # from failure to the first step again
    queue: tuple[QueueBin, ...] = ()


class InFlight(Sourced):
    """How many communications a rank may have under way at once; the source says why."""

    mode: Literal["one", "many"]


class Machine(Section):
    """A cluster."""

    name: str
    title: str
    environment: str  # the machine whose variables its ranks need (machine.env); the file's own name, or its base's
    device: Device
    node: Node
    network: Network
    allreduce: AllReduceTable | None = None
    algorithms: str | None = None  # the table in configs/algorithms that runs on this machine use (comm.algorithms)
    in_flight: InFlight = InFlight(mode="many", tag="estimated", source="no reason is known against it")
    default_stack: str
    stacks: dict[str, Stack]
    operations: Operations | None = None

    @model_validator(mode="after")
    def _default_exists(self) -> Machine:
        if self.default_stack not in self.stacks:
            raise ValueError(f"default_stack {self.default_stack!r} is not one of the stacks {sorted(self.stacks)}")
        return self

    @model_validator(mode="after")
    def _environment_is_the_vendors(self) -> Machine:
        meant = vendor_of_machine(self.environment)
        if "none" not in (meant, self.device.vendor) and meant != self.device.vendor:
            raise ValueError(
                f"device.vendor is {self.device.vendor}, and environment {self.environment} sets the variables of "
                f"{meant}: "
                "let `environment:` name a machine of the same vendor"
            )
        return self

    @property
    def devices_per_node(self) -> int:
        """GPUs of a node; on MI250X nodes its 8 GCDs."""
        return int(self.node.devices.value)
