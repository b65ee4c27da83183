"""Process groups: the only caller of init_process_group and new_group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from frontier_llm.comm.axis import Axis, Mesh, single
from frontier_llm.comm.ledger import Ledger
from frontier_llm.errors import RankFailure
from frontier_llm.topology import Grid

# Messages of opposite directions between the same two ranks must not queue behind each other: RCCL runs a pair's point-to-point
# calls in order on one stream, so "send forward, then receive backward" against the mirrored order would deadlock. One communicator
# per direction makes every channel a FIFO with a single writer; the wrap-around of interleaved chunks needs its own for pp = 2.
CHANNELS = ("forward", "backward")
WRAP_CHANNELS = ("forward-wrap", "backward-wrap")


def connect(rank: int, world_size: int, address: str, port: int, backend: str, timeout_s: float) -> None:
    """Join the job's rendezvous: a TCP store at rank 0, then the default group.

    Raises RankFailure naming rank and address when the others are not there within `timeout_s`.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        raise RankFailure(
            f"rank {rank} of {world_size} could not join the rendezvous at {address}:{port} within {timeout_s:.0f} s: {error}",
            fix="check that every rank started, that the address is reachable from this node, and that the port is free",
        ) from error


def disconnect() -> None:
    """Leave the job's groups, so that no peer waits for this process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _new_group(ranks: Sequence[int], timeout_s: float) -> Any:
    """A group that only its members create: no rank does work for groups it is not in, whatever the world's size."""
    return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), use_local_synchronization=True)


def _axis(name: str, ranks: tuple[int, ...], global_rank: int, timeout_s: float, ledger: Ledger) -> Axis:
    if len(ranks) == 1:
        return single(name, global_rank, ledger)
    return Axis(name, ranks.index(global_rank), len(ranks), ranks, _new_group(ranks, timeout_s), ledger)


def build_mesh(grid: Grid, global_rank: int, chunks: int = 1, tied_embeddings: bool = False, timeout_s: float = 600.0) -> Mesh:
    """Every axis that `global_rank` belongs to. Collective over the first `grid.world_size` ranks of the default group."""
    ledger = Ledger()

    def axis(name: str, ranks: tuple[int, ...]) -> Axis:
        return _axis(name, ranks, global_rank, timeout_s, ledger)

    pipeline = grid.group("pp", global_rank)
    is_end = global_rank in (pipeline[0], pipeline[-1])
    tied = tuple(dict.fromkeys((pipeline[0], pipeline[-1]))) if tied_embeddings and is_end else (global_rank,)
    names = CHANNELS + (WRAP_CHANNELS if chunks > 1 else ()) if grid.pp > 1 else ()
    tied_axis = axis("tied", tied)
    if tied_embeddings and not is_end:
        # torch names a group by its ranks and by how many groups the process has by then, so all ranks must create equally many
        _new_group((global_rank,), timeout_s)
    return Mesh(
        tp=axis("tp", grid.group("tp", global_rank)),
        pp=axis("pp", pipeline),
        dp=axis("dp", grid.group("dp", global_rank)),
        world=axis("world", tuple(range(grid.world_size))),
        tied=tied_axis,
        channels={name: axis(f"pp.{name}", pipeline) for name in names},
        ledger=ledger,
    )
