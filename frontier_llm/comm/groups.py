"""Builds process groups and the mesh. Only this module calls init_process_group and new_group."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from frontier_llm import log
from frontier_llm.comm.algorithms import load_algorithms
from frontier_llm.comm.axis import Axis, Mesh, single
from frontier_llm.comm.group import Group, OneInFlight, TorchGroup
from frontier_llm.comm.group_memory import GroupMemory, outside_allocator_bytes
from frontier_llm.comm.hierarchical import HierarchicalGroup
from frontier_llm.comm.host_memory import share_memory
from frontier_llm.comm.interleaving import Interleaving
from frontier_llm.comm.ledger import Ledger
from frontier_llm.comm.ranges import new_ledger
from frontier_llm.comm.rendezvous import Meeting, forget_stores, join_store, limit_answer_time
from frontier_llm.comm.shm import ShmGroup
from frontier_llm.comm.warm_up import LIMIT_S, first_use, warm_up
from frontier_llm.config import CommConfig
from frontier_llm.errors import BackendError, RankFailure
from frontier_llm.files import write_replaced
from frontier_llm.schedule import Placement, round_robin
from frontier_llm.topology.grid import AXES, Grid
from frontier_llm.topology.streams import LEVELLED, nodes_of

AS_DEFAULT = CommConfig()


def connect(
    rank: int,
    world_size: int,
    meeting: Meeting,
    backend: str,
    timeout_s: float,
    agree: Callable[[dist.Store], None] | None = None,
) -> None:
    """Connect to the job's store, then create torch's default process group.

    `agree` is called between these two steps. If `agree` raises an exception, this rank ends before it waits for other
    ranks in a collective. With MPI there is no store, and `agree` is not called. MPI connects the ranks itself, and its
    launcher numbers them.

    Raises BackendError if torch was built without the back-end. Raises RankFailure with rank and address if the other
    ranks do not join within `timeout_s`.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        if backend == "mpi":
            _require(backend)
            dist.init_process_group("mpi", timeout=timeout)
            return
        store = join_store(rank, world_size, meeting, timeout_s)
        limit_answer_time()
        if agree is not None:
            agree(store)
        _require(backend)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        raise RankFailure(
            f"rank {rank} of {world_size} on {socket.gethostname()} could not join the rendezvous at "
            f"{meeting.address}:{meeting.port} "
            f"within {timeout_s:.0f} s: {error}",
            fix="check that every rank started, that the address is reachable from this node, and that the port is "
            "free",
        ) from error


def _require(backend: str) -> None:
    """Raise BackendError if torch was built without the back-end."""
    if not dist.is_backend_available(backend):
        raise BackendError(
            f"this torch was built without {backend}",
            "set comm.backend=auto, or install a torch that has it",
            "comm.backend",
        )


def disconnect() -> None:
    """Destroy the process groups and close the store's connections, so that no peer waits for this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_stores()


class _Groups:
    """Creates the process groups and axes of one mesh."""

    def __init__(self, global_rank: int, timeout_s: float, comm: CommConfig, ranks_per_node: int | None) -> None:
        self.device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        self._in_flight = OneInFlight(self.device) if comm.in_flight == "one" else None
        self._global_rank = global_rank
        self._timeout_s = timeout_s
        self._comm = comm
        self._ranks_per_node = ranks_per_node
        self._interleaving = Interleaving()
        self._algorithms = load_algorithms(comm.algorithms)
        self._timeouts_s = comm.timeouts_s.model_dump()
        self._logged: set[str] = set()
        self._made: list[tuple[str, tuple[int, ...], Group]] = []
        self.ledger = new_ledger()
        self.memory = self.ledger.memory = GroupMemory(lambda: outside_allocator_bytes(self.device))

    def axis(self, name: str, ranks: tuple[int, ...], apart: int = 0) -> Axis:
        """Create the axis over `ranks`. Collective over these ranks only.

        With `apart` > 0, tokens are sent to experts in two stages if the axis spans nodes. This requires the same
        number of ranks on each node, and the number must be a multiple of `apart`.
        """
        if len(ranks) == 1:
            return single(name, self._global_rank, self.ledger)
        rank = ranks.index(self._global_rank)
        flat = Axis(
            name,
            rank,
            len(ranks),
            ranks,
            self._group(name, rank, ranks),
            self.ledger,
            in_flight=self._in_flight,
            interleaving=self._interleaving if name.partition(".")[0] == "ep" else None,
        )
        if not apart and (name not in LEVELLED or not self._algorithms.rules):
            return flat
        node, rail = self._levels(name, ranks, apart)
        if rail.size == 1:
            return flat
        if apart:
            self._log(
                f"comm: axis {name} spans {rail.size} nodes x {node.size} ranks; each row is sent once to each node"
            )
            return replace(flat, nodes=rail.size, levels=(node, rail))
        self._log(
            f"comm: axis {name} spans {rail.size} nodes x {node.size} ranks; its algorithms come from comm.algorithms"
        )
        return replace(flat, hierarchical=HierarchicalGroup(node, rail), nodes=rail.size, algorithms=self._algorithms)

    def counted_axis(self, name: str, ranks: tuple[int, ...]) -> Axis:
        """Create an axis whose size may differ between ranks. Create a process group even for an axis of one rank.

        torch names a group by its ranks and by the number of groups that the process has created earlier. So all ranks
        must create the same number of groups.
        """
        if len(ranks) == 1:
            _new_group(ranks, self._timeout_s)
        return self.axis(name, ranks)

    def _levels(self, name: str, ranks: tuple[int, ...], multiple: int) -> tuple[Axis, Axis]:
        """Return (node axis, rail axis) of this rank for collectives in two stages.

        Both axes have one rank if two stages are impossible (`nodes_of`).
        """
        if self._ranks_per_node is None:
            return single(name, self._global_rank), single(name, self._global_rank)
        node: tuple[int, ...] = (self._global_rank,)
        rail = node
        # `nodes_of` may allow two stages for one group of an axis and not for another group of the same axis. This
        # happens if the number of ranks per node is not a multiple of the group's size.
        if nodes := nodes_of(ranks, self._ranks_per_node, multiple):
            node = next(members for members in nodes if self._global_rank in members)
            place = node.index(self._global_rank)
            rail = tuple(members[place] for members in nodes)
        return self.counted_axis(f"{name}.node", node), self.counted_axis(f"{name}.rail", rail)

    def warm_up(self) -> None:
        """Run the first collective of every group, in the same order on all ranks.

        The axis pp is left out, because training uses no collectives on it. RCCL then creates no communicator for this
        axis. Pipeline messages use the channels, which `open_channels` opens.
        """
        for name, ranks, group in self._made:
            if name.split(".")[0] != "pp":
                with self.memory.first_use(name):
                    warm_up(name, ranks, group, self.device, self._limit_s(name))

    def open_channels(self, channels: Mapping[str, Axis], placement: Placement) -> None:
        """Send the first message of every channel."""
        for channel in placement.streams:
            axis = channels[channel.value]
            limit_s = min(LIMIT_S, 0.9 * self._limit_s(axis.name))
            open_channel = partial(_open_channel, axis, placement.streams[channel], self.device)
            with self.memory.first_use(axis.name):
                first_use(limit_s, axis.name, axis.ranks, self.device, open_channel)

    def _limit_s(self, name: str) -> float:
        # axes such as dp.rail, dp.cp and pp.forward use the time-out of the axis before the dot
        return self._timeouts_s.get(name.split(".")[0]) or self._timeout_s

    def _group(self, name: str, rank: int, ranks: tuple[int, ...]) -> Group:
        group = self._new(name, rank, ranks)
        self._made.append((name, ranks, group))
        return group

    def _new(self, name: str, rank: int, ranks: tuple[int, ...]) -> Group:
        timeout_s = self._limit_s(name)
        process_group = _new_group(ranks, timeout_s)
        backend = dist.get_backend(process_group)
        if self._comm.transport == "torch" or (backend != "gloo" and self._comm.transport == "auto"):
            self._log(f"comm: {backend} through torch.distributed")
            return TorchGroup(process_group, ranks, name)
        descriptor = None
        reason = f"it uses {backend}, and only CPU ranks with gloo can share memory"
        if backend == "gloo":
            descriptor, reason = share_memory(process_group, rank, len(ranks))
        if descriptor is None:
            if self._comm.transport == "shm":
                raise BackendError(
                    f"axis {name} cannot use shared memory: {reason}",
                    "set comm.transport=auto or comm.transport=torch",
                    "comm",
                )
            self._log(f"comm: {backend} sockets for axis {name}: {reason}")
            return TorchGroup(process_group, ranks, name)
        self._log("comm: shared memory between the ranks of this host")
        return ShmGroup(name, rank, ranks, descriptor, timeout_s)

    def _log(self, message: str) -> None:
        if message not in self._logged:
            log.info(message)
        self._logged.add(message)


def _new_group(ranks: Sequence[int], timeout_s: float) -> Any:
    """Create a process group. Only the members of the group call this function.

    MPI is an exception: all ranks must create their groups at the same time, by splitting the world.
    """
    local = dist.get_backend() != "mpi"
    return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), use_local_synchronization=local)


def mesh_of(
    grid: Grid,
    global_rank: int,
    placement: Placement,
    new_axis: Callable[[str, tuple[int, ...]], Axis],
    ledger: Ledger,
    *,
    tied_embeddings: bool,
    experts: bool,
) -> Mesh:
    """Return the mesh of `global_rank`. `new_axis` creates an axis from its name and global ranks.

    All ranks create their axes in the same order.
    """
    alone = (global_rank,)
    pipeline = grid.group("pp", global_rank)
    ends = tuple(pipeline[stage] for stage in placement.ends)
    tied = new_axis("tied", ends if tied_embeddings and global_rank in ends else alone)
    axes = {name: new_axis(name, grid.group(name, global_rank)) for name in AXES}
    joint = grid.replicas
    return Mesh(
        **axes,
        replicas=axes[joint] if joint in axes else new_axis(joint, grid.group(joint, global_rank)),
        world=new_axis("world", tuple(range(grid.world_size))),
        tied=tied,
        channels={channel.value: new_axis(f"pp.{channel.value}", pipeline) for channel in placement.streams},
        ledger=ledger,
        ep=new_axis("ep", grid.experts_group(global_rank) if experts else alone),
        etp=new_axis("etp", grid.split_experts_group(global_rank) if experts else alone),
        edp=new_axis("edp", grid.replicas_group(global_rank) if experts else alone),
    )


def build_mesh(
    grid: Grid,
    global_rank: int,
    placement: Placement | None = None,
    tied_embeddings: bool = False,
    timeout_s: float = 600.0,
    comm: CommConfig = AS_DEFAULT,
    ranks_per_node: int | None = None,
    *,
    experts: bool = False,
    by_node: bool = False,
) -> Mesh:
    """Build all axes of `global_rank`, and use each group once. Collective over the first `grid.world_size` ranks.

    `placement` maps virtual stages to pipeline ranks (None: one stage per rank, in order). RCCL runs the point-to-point
    calls between two ranks in order on one stream, so messages of opposite directions could block each other. Therefore
    every channel of the placement has its own communicator. Between two ranks, only one of them sends on a channel.

    With `tied_embeddings` the first and last stage share the axis `tied`. With `experts` the mesh has the axes `ep`,
    `etp` and `edp`. With `by_node`, tokens are sent to experts in two stages if the experts span nodes.
    `timeout_s` applies to axes that have no value in `comm.timeouts_s`. `comm.algorithms` chooses the algorithm of each
    call on axes that span several nodes of `ranks_per_node` consecutive ranks.
    With `comm.in_flight: one` each communication of this rank ends before the next begins. This function treats "auto"
    like "many", because its caller replaces "auto" by the machine's value.

    Raises BackendError if `comm.transport` is 'shm' and an axis cannot use shared memory. Raises RankFailure if the
    first use of a group does not end in time.
    """
    groups = _Groups(global_rank, timeout_s, comm, ranks_per_node)
    placement = placement or round_robin(grid.pp)

    def new_axis(name: str, ranks: tuple[int, ...]) -> Axis:
        if name == "tied" and tied_embeddings:
            return groups.counted_axis(name, ranks)
        return groups.axis(name, ranks, apart=grid.etp if name == "ep" and by_node else 0)

    mesh = mesh_of(
        grid,
        global_rank,
        placement,
        new_axis,
        groups.ledger,
        tied_embeddings=tied_embeddings,
        experts=experts,
    )
    groups.warm_up()
    groups.open_channels(mesh.channels, placement)
    limit_answer_time()  # called last, so that the limit also applies to connections that RCCL's groups have opened
    return mesh


def process_group(axis: Axis, timeout_s: float) -> Any:
    """Create a torch group over an axis' ranks, for FSDP and DeepSpeed, which run their own collectives.

    Collective over the axis. All ranks must make these calls in the same order. The ledger does not count the
    communication of such a group. In a single process without a default group, a default group is created first.
    """
    # torch 2.13 warns at every call of a collective's old name. The calls are in FSDP and DeepSpeed, so this package
    # cannot change them.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if not dist.is_initialized():
        assert axis.size == 1, f"axis {axis.name} of {axis.size} ranks without a default group"
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
    return _new_group(axis.ranks, timeout_s)


def end_communication(mesh: Mesh, device: torch.device) -> None:
    """With one communication in flight, wait until all communication that this rank has queued has ended.

    FSDP and DeepSpeed use separate communicators. This function is called between communication of FSDP or DeepSpeed
    and communication of this package. On a CPU each communication ends before the next begins anyway.
    """
    if mesh.one_in_flight and device.type == "cuda":
        torch.cuda.synchronize(device)


def dump_flight_record(mesh: Mesh, folder: Path, reason: str) -> str:
    """After a failure, write this rank's last calls and torch's own record of collectives to files in `folder`.

    TORCH_FR_BUFFER_SIZE sets the size of torch's record. Returns the path, or 'nowhere' with the reason if the files
    cannot be written. No error is raised, because a full disk must not hide the failure of this rank.
    """
    path = folder / f"flight_rank{mesh.world.ranks[mesh.world.rank]:05d}.json"
    try:
        mesh.ledger.dump(path, reason)
        if dist.is_initialized():
            # torch has two recorders of collectives. On a GPU only the NCCL recorder contains the collectives.
            recorder = "_dump_nccl_trace_json" if dist.get_backend() == "nccl" else "_dump_fr_trace_json"
            if recorded := getattr(torch._C._distributed_c10d, recorder, bytes)():
                write_replaced(path.with_name(path.stem + "_torch.json"), recorded)
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # the file may be incomplete
        return f"nowhere ({error.strerror})"
    return str(path)


def _open_channel(axis: Axis, pairs: Sequence[tuple[int, int]], device: torch.device) -> None:
    """Send one byte between each pair of ranks that use a channel. Collective over the pipeline.

    RCCL creates the communicator of a pair at the first message, and the *host* then waits for the peer. In the first
    step this would take seconds, and a receive that is posted early would block. All ranks go through the pairs in the
    same order, so there is no circular wait.
    """
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    assert axis.group is not None, "an axis of one rank has no peer"
    for sender, receiver in pairs:
        if axis.rank == sender:
            axis.group.send(byte, receiver).wait()
        elif axis.rank == receiver:
            axis.group.receive(byte, sender).wait()
