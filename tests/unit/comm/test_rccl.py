"""Calls to torch on ranks with GPUs. Stand-ins with the signatures of the installed torch record them, because no RCCL
runs here.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, create_autospec, patch

import pytest
import torch
import torch.distributed as dist

from frontier_llm.comm import Axis, Meeting, build_mesh, connect, dump_flight_record, group, groups
from frontier_llm.comm.group import TorchGroup
from frontier_llm.config import CommConfig
from frontier_llm.errors import BackendError
from frontier_llm.experiments.measure.links import _ping_pong
from frontier_llm.schedule import round_robin
from frontier_llm.topology.grid import Grid

RANK = 5
GPU = 3
CALLS = [
    "init_process_group",
    "new_group",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "barrier",
    "isend",
    "irecv",
    "P2POp",
    "batch_isend_irecv",
    "get_backend",
    "get_rank",
]


@pytest.fixture
def asked() -> Iterator[SimpleNamespace]:
    """Replace torch.distributed as on rank RANK of a world on RCCL. A call that the real function would not accept
    raises TypeError.
    """
    stands_in = {name: create_autospec(getattr(dist, name)) for name in CALLS}
    stands_in |= {name: create_autospec(getattr(group, name)) for name in ("_all_gather", "_reduce_scatter")}
    stands_in["get_backend"].return_value = "nccl"
    stands_in["get_rank"].return_value = RANK
    stands_in["new_group"].side_effect = lambda ranks=None, **_: f"group of {ranks}"
    stands_in["batch_isend_irecv"].return_value = [MagicMock()]
    with ExitStack() as stack:
        for name, stand_in in stands_in.items():
            stack.enter_context(patch.object(group if name.startswith("_") else dist, name, stand_in))
        stack.enter_context(patch.object(dist.distributed_c10d, "_get_default_store", dist.HashStore))
        stack.enter_context(patch.object(torch.cuda, "current_device", lambda: GPU))
        stack.enter_context(patch.object(groups, "outside_allocator_bytes", lambda device: 0))
        stands_in |= {name: stack.enter_context(patch.object(groups, name)) for name in ("first_use", "warm_up")}
        yield SimpleNamespace(**{name.lstrip("_"): stand_in for name, stand_in in stands_in.items()})


def test_no_communicator_is_made_before_it_is_used(asked: SimpleNamespace) -> None:
    """With `device_id`, torch would open the world's communicator at once, and would make every smaller communicator by
    splitting the world's.
    """
    store = dist.HashStore()
    with (
        patch.object(dist, "is_backend_available", lambda name: True),
        patch.object(groups, "join_store", lambda *_: store),
    ):
        connect(RANK, 16, Meeting("n0", 1234, 0, 8), "nccl", 30.0)
    call = inspect.signature(dist.init_process_group).bind(
        *asked.init_process_group.call_args.args, **asked.init_process_group.call_args.kwargs
    )
    assert (
        call.arguments["backend"],
        call.arguments["store"],
        call.arguments["rank"],
        call.arguments["world_size"],
    ) == (
        "nccl",
        store,
        RANK,
        16,
    )
    assert "device_id" not in call.arguments


def test_a_rank_makes_the_groups_that_it_is_in_and_no_other(asked: SimpleNamespace) -> None:
    mesh = build_mesh(
        Grid(2, 4, 2), RANK, round_robin(4, 2), tied_embeddings=True, comm=CommConfig(timeouts_s={"dp": 7.0})
    )
    made = {tuple(call.args[0]): call.kwargs for call in asked.new_group.call_args_list}
    assert all(RANK in ranks and options["use_local_synchronization"] for ranks, options in made.items())
    # this rank does not hold an end of the tied embedding
    assert set(made) == {mesh.tp.ranks, mesh.pp.ranks, mesh.dp.ranks, mesh.world.ranks, (RANK,)}
    assert (
        made[mesh.dp.ranks]["timeout"].total_seconds() == 7.0
        and made[mesh.tp.ranks]["timeout"].total_seconds() == 600.0
    )
    assert asked.new_group.call_count == 5 + len(mesh.channels) and len(mesh.channels) == 4
    assert all(
        isinstance(axis.group, TorchGroup) for axis in (mesh.tp, mesh.pp, mesh.dp, mesh.world, *mesh.channels.values())
    )
    # each group is used once at the start, on its device; pp itself has no communication in training
    assert [call.args[0] for call in asked.warm_up.call_args_list] == ["tp", "dp", "world"]
    assert [call.args[1] for call in asked.first_use.call_args_list] == [axis.name for axis in mesh.channels.values()]
    assert all(
        call.args[3] == torch.device("cuda") for call in asked.warm_up.call_args_list + asked.first_use.call_args_list
    )


def test_mpi_makes_its_groups_by_all_ranks_at_once(asked: SimpleNamespace) -> None:
    asked.get_backend.return_value = "mpi"
    build_mesh(Grid(2, 1, 4), RANK)
    assert [call.kwargs["use_local_synchronization"] for call in asked.new_group.call_args_list] == [False] * 3


def test_memory_is_not_shared_between_gpus(asked: SimpleNamespace) -> None:
    with pytest.raises(BackendError, match="axis tp cannot use shared memory: it uses nccl"):
        build_mesh(Grid(2, 1, 4), RANK, comm=CommConfig(transport="shm"))


def test_collectives_are_asked_for_as_this_torch_takes_them(asked: SimpleNamespace) -> None:
    ranks = (1, RANK, 9)
    axis_group = TorchGroup("the group", ranks, "dp")
    x = torch.zeros(6)
    axis_group.start_all_reduce_(x, "max").wait()
    axis_group.start_all_gather_into(x, x[:2]).wait()
    axis_group.start_reduce_scatter_into(x[:2], x).wait()
    axis_group.start_all_to_all_into(torch.empty(6), x).wait()
    axis_group.start_broadcast_(x, 2).wait()
    axis_group.start_barrier().wait()
    collectives = (
        asked.all_reduce,
        asked.all_gather,
        asked.reduce_scatter,
        asked.all_to_all_single,
        asked.broadcast,
        asked.barrier,
    )
    for stand_in in collectives:
        assert stand_in.call_args.kwargs["group"] == "the group" and stand_in.call_args.kwargs["async_op"] is True
        assert stand_in.return_value.wait.call_count == 1
    assert asked.broadcast.call_args.kwargs["src"] == 9, "a global rank"
    assert asked.barrier.call_args.kwargs["device_ids"] == [GPU], (
        "else torch takes the GPU of the rank's number on its node"
    )


def test_messages_go_to_global_ranks_and_an_exchange_is_one_batch(asked: SimpleNamespace) -> None:
    axis_group = TorchGroup("the group", (1, RANK, 9), "dp.rail")
    x = torch.zeros(2)
    y = torch.ones(2)
    axis_group.send(x, 2).wait()
    axis_group.receive(y, 0).wait()
    assert asked.isend.call_args.args == (x, 9) and asked.irecv.call_args.args == (y, 1)
    axis_group.exchange(x, 2, y, 0).wait()
    (operations,) = asked.batch_isend_irecv.call_args.args
    assert len(operations) == 2 and asked.isend.call_count == asked.irecv.call_count == 1, (
        "nothing goes beside the batch"
    )
    assert [call.args[2:] for call in asked.P2POp.call_args_list] == [(9, "the group"), (1, "the group")]
    asked.batch_isend_irecv.return_value[0].wait.assert_called_once()


class _PairStream:
    """Records the order of a rank's messages with one peer. RCCL has one stream for both directions, and runs the
    messages in this order.
    """

    def __init__(self) -> None:
        self.order: list[str] = []

    def send(self, x: torch.Tensor, to: int) -> Any:
        self.order.append("send")
        return group.DONE

    def receive(self, buffer: torch.Tensor, source: int) -> Any:
        self.order.append("receive")
        return group.DONE


def test_there_and_back_ends_on_one_stream_per_pair() -> None:
    ends = [_PairStream(), _PairStream()]
    for rank, end in enumerate(ends):
        _ping_pong(torch.zeros(2), Axis("world", rank, 2, (0, 1), end), 1 - rank, first=rank == 0)()  # type: ignore[arg-type]
    assert [end.order for end in ends] == [["send", "receive"], ["receive", "send"]]


def test_the_recorder_of_rccl_is_dumped_and_not_gloos(asked: SimpleNamespace, tmp_path: Path) -> None:
    mesh = build_mesh(Grid(2, 1, 4), RANK)
    c10d = torch._C._distributed_c10d
    with (
        patch.object(dist, "is_initialized", lambda: True),
        patch.object(c10d, "_dump_nccl_trace_json", lambda: b'{"entries": ["of the GPU"]}', create=True),
    ):
        path = Path(dump_flight_record(mesh, tmp_path, "timed out"))
    assert json.loads(path.read_text())["reason"] == "timed out"
    assert json.loads((tmp_path / "flight_rank00005_torch.json").read_text()) == {"entries": ["of the GPU"]}


def test_streams_and_events_are_those_of_this_torch() -> None:
    """`HierarchicalGroup` makes these calls on a device. test_hierarchical.py tests their order."""
    inspect.signature(torch.cuda.Stream.__new__).bind(torch.cuda.Stream, torch.device("cuda", 0), priority=-1)
    inspect.signature(torch.cuda.Stream.wait_stream).bind(None, None)
    inspect.signature(torch.cuda.Stream.record_event).bind(None)
    inspect.signature(torch.cuda.Event.wait).bind(None)
    inspect.signature(torch.cuda.current_stream).bind(torch.device("cuda", 0))
    inspect.signature(torch.cuda.stream).bind(None)
