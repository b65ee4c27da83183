"""Communication: process groups, the axes of the device mesh, collectives, pipeline messages and their statistics."""

from frontier_llm.comm.algorithms import AlgorithmTable, load_algorithms
from frontier_llm.comm.axis import (
    Axis,
    Mesh,
    all_gather,
    all_reduce_,
    barrier,
    broadcast_,
    reduce_scatter,
    serial_mesh,
    single,
    start_all_gather,
    start_all_gather_into,
    start_all_reduce_,
    start_all_to_all_into,
    start_all_to_all_rows,
    start_reduce_scatter,
    start_reduce_scatter_into,
)
from frontier_llm.comm.composed import (
    all_gather_json,
    broadcast_bytes,
    broadcast_json,
    maximum,
    moved,
    start_narrow_sum_,
    start_shift,
)
from frontier_llm.comm.group import DONE, Group, Pending, TorchGroup
from frontier_llm.comm.groups import (
    build_mesh,
    connect,
    disconnect,
    dump_flight_record,
    end_communication,
    process_group,
)
from frontier_llm.comm.ledger import Ledger
from frontier_llm.comm.p2p import Receive, Sends, post_receive
from frontier_llm.comm.rendezvous import Meeting
from frontier_llm.comm.straggler import Straggler, StragglerDetector, StragglerWatch

__all__ = [
    "DONE",
    "AlgorithmTable",
    "Axis",
    "Group",
    "Ledger",
    "Meeting",
    "Mesh",
    "Pending",
    "Receive",
    "Sends",
    "Straggler",
    "StragglerDetector",
    "StragglerWatch",
    "TorchGroup",
    "all_gather",
    "all_gather_json",
    "all_reduce_",
    "barrier",
    "broadcast_",
    "broadcast_bytes",
    "broadcast_json",
    "build_mesh",
    "connect",
    "disconnect",
    "dump_flight_record",
    "end_communication",
    "load_algorithms",
    "maximum",
    "moved",
    "post_receive",
    "process_group",
    "reduce_scatter",
    "serial_mesh",
    "single",
    "start_all_gather",
    "start_all_gather_into",
    "start_all_reduce_",
    "start_all_to_all_into",
    "start_all_to_all_rows",
    "start_narrow_sum_",
    "start_reduce_scatter",
    "start_reduce_scatter_into",
    "start_shift",
]
