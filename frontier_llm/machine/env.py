"""The one file that knows RCCL, libfabric, MIOpen, HSA and framework variables: what to set on a machine, why, and who
says so.

`environment` lists what a machine needs. `resolve` combines that list with what is exported already, and names what set
each variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from frontier_llm.errors import ConfigError, suggest

Vendor = Literal["amd", "nvidia", "none"]
OLCF = "OLCF Frontier user guide (pytorch_frontier.rst, 2026)"
HPE = "HPE shs-ccl-docs, RCCL tuning guide"
LUMI = "LUMI AI guide"
NCCL = "NCCL/RCCL documentation"
TORCH = "PyTorch documentation"


@dataclass(frozen=True)
class Variable:
    """One variable of the ranks' environment."""

    name: str
    value: str
    reason: str
    source: str
    also: tuple[str, ...] = ()  # other names of the same setting: if the user has exported one, ours stays unset

    def on_rank(self, folder: str, local_rank: int) -> Variable:
        """The variable with its value for one rank. `folder`: the job's private folder on the rank's node."""
        return replace(self, value=self.value.replace(PRIVATE, folder).replace(LOCAL_RANK, str(local_rank)))

    @property
    def differs_by_rank(self) -> bool:
        """Whether the value contains the job's private folder or the local rank, which only the rank itself knows."""
        return PRIVATE in self.value or LOCAL_RANK in self.value


PRIVATE = "{private folder of the job}"  # on the node's local disk
LOCAL_RANK = "{local rank}"
THIS_FILE = "frontier_llm/machine/env.py"
EXPORTED = "exported before the start"  # by the user, or by a module that was loaded in the same shell
# Variables with these prefixes are shown with their origin even if no machine needs them.
SHOWN_PREFIXES = ("FI_", "GLOO_", "HIP_", "HSA_", "MIOPEN_", "NCCL_", "RCCL_", "ROCR_")


@dataclass(frozen=True)
class Setting:
    """One variable as the ranks get it."""

    name: str
    value: str
    origin: str  # the file that sets the variable, a module, or the user
    reason: str = ""
    machine_value: str = ""  # what the machine needs, if an exported value replaces it

    def describe(self) -> str:
        """'NCCL_NET=Socket (frontier_llm/machine/env.py: one node …)' for rank 0's log and `doctor`."""
        instead = f", instead of {self.machine_value} of {THIS_FILE}" if self.machine_value else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.name}={self.value} ({self.origin}{instead}{reason})"


def resolve(wanted: Sequence[Variable], exported: Mapping[str, str], origins: Mapping[str, str]) -> list[Setting]:
    """Every variable that the ranks get for their network and their GPUs. An exported value wins over the machine's.

    A variable of `wanted` is left out if the same setting is exported under another name (`Variable.also`).
    `origins`: what set an exported variable, if that is known; such a variable is always listed.
    """
    settings = []
    for variable in wanted:
        if variable.name in exported:
            value = exported[variable.name]
            origin = origins.get(variable.name, EXPORTED)
            is_replaced = origin != THIS_FILE and value != variable.value
            machine_value = variable.value if is_replaced else ""
            settings.append(Setting(variable.name, value, origin, variable.reason, machine_value))
        elif not any(exported.get(name) for name in variable.also):
            settings.append(Setting(variable.name, variable.value, THIS_FILE, variable.reason))
    other_names = {name for variable in wanted for name in variable.also}
    listed = {variable.name for variable in wanted}
    for name in sorted(exported.keys() - listed):
        if name in origins or name in other_names or name.startswith(SHOWN_PREFIXES):
            settings.append(Setting(name, exported[name], origins.get(name, EXPORTED)))
    return settings


RCCL_LOG = "NCCL_DEBUG_FILE"
# with sharded weights their gathers would wait behind the compute that they are to overlap
ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"

_PYTORCH = (
    Variable(
        "OMP_NUM_THREADS",
        "7",
        "the usable cores of a GCD's L3 region; the default would start 56 threads per rank",
        OLCF,
    ),
    Variable(
        ONE_QUEUE,
        "1",
        "kernels start in the order in which they are issued, so tp collectives overlap with the weight gradient",
        "Megatron-LM",
    ),
    Variable(
        "TORCH_FR_BUFFER_SIZE",
        "2000",
        "flight recorder: the last collectives of each rank, dumped when one times out",
        TORCH,
    ),
)

_NODE_LOCAL = f"{PRIVATE}/miopen-{LOCAL_RANK}"

_ROCM = (
    Variable(
        "GPU_MAX_HW_QUEUES",
        "8",
        "a hardware queue for each communicator: with the default of 4, streams share queues, and a receive that is "
        "posted ahead holds "
        "up what its sender waits for",
        "ROCm/rocm-systems#8916, ROCm/rccl#2191",
    ),
    Variable(
        "TORCH_NCCL_HIGH_PRIORITY",
        "1",
        "streams of another priority have queues of their own: compute never waits behind them",
        TORCH,
    ),
    Variable(
        "HSA_FORCE_FINE_GRAIN_PCIE",
        "1",
        "peer-to-peer through the large BAR; without it RCCL falls back to staging in host memory",
        HPE,
    ),
    Variable(
        "MIOPEN_USER_DB_PATH",
        _NODE_LOCAL,
        "MIOpen's SQLite files break on a parallel file system ('disk I/O error')",
        OLCF,
    ),
    Variable("MIOPEN_CUSTOM_CACHE_DIR", _NODE_LOCAL, "as MIOPEN_USER_DB_PATH", OLCF),
    Variable(
        # the name that torch 2.10 and 2.13 both honour; 2.13 would take it before PYTORCH_ALLOC_CONF
        "PYTORCH_HIP_ALLOC_CONF",
        "max_split_size_mb:512",
        "bounds the allocator's fragmentation near 64 GiB",
        "LumiOpen/Megatron-LM-lumi",
        also=("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    ),
)

_SLINGSHOT = (
    Variable(
        "GLOO_SOCKET_IFNAME",
        "hsn0",
        "needed above about 300 nodes, harmless below",
        "eminorhan/frontier-torchtitan",
    ),
    Variable(
        "NCCL_SOCKET_IFNAME",
        "hsn0,hsn1,hsn2,hsn3",
        "bootstrap over the high-speed network, not the management one",
        HPE,
    ),
    Variable("NCCL_CROSS_NIC", "1", "rings may change NIC from node to node: faster on large systems", HPE),
    Variable("FI_CXI_DISABLE_HOST_REGISTER", "1", "avoids ROCm calls that deadlock RCCL", HPE),
    Variable("FI_CXI_DEFAULT_CQ_SIZE", "131072", "completion queues of large jobs overflow with the default", HPE),
    Variable("FI_CXI_DEFAULT_TX_SIZE", "2048", "room for many unexpected rendezvous messages", HPE),
    Variable("FI_CXI_RDZV_EAGER_SIZE", "0", "all messages by rendezvous", HPE),
    Variable("FI_CXI_RDZV_THRESHOLD", "0", "all messages by rendezvous", HPE),
    Variable("FI_CXI_RDZV_GET_MIN", "0", "all messages by rendezvous", HPE),
    Variable("FI_CXI_RX_MATCH_MODE", "hybrid", "software matching when the NIC's match list overflows", HPE),
)

# libfabric's default monitor of registered memory, memhooks, deadlocks on both. LUMI goes without the other two: nobody
# documents
# `--network=disable_rdzv_get` there, without which libfabric silently keeps its default protocol; and GPU RDMA is found
# without being asked for,
# where asking hung the first collective between nodes (ROCm 7.0 image, laifs-container-recipes issues 28 and 30).
_OWN = {
    "frontier": (
        Variable(
            "FI_MR_CACHE_MONITOR",
            "kdreg2",
            "memory-registration cache: Frontier's default, safe with the plugin",
            OLCF,
        ),
        Variable(
            "FI_CXI_RDZV_PROTO",
            "alt_read",
            "faster RCCL at scale; needs `--network=disable_rdzv_get` in the job",
            OLCF,
        ),
        Variable("NCCL_NET_GDR_LEVEL", "PHB", "GPU RDMA through the NIC of the same package", OLCF),
    ),
    "lumi": (
        Variable(
            "FI_MR_CACHE_MONITOR",
            "userfaultfd",
            "memory-registration cache: with the default a second communicator hung in 13 of 17 starts",
            f"{LUMI}; laifs-container-recipes issue 44",
        ),
    ),
}
_PLUGIN = Variable(
    "NCCL_NET",
    # a name that every version of the plugin answers to; "OFI", as the guides have it now, only those after 1.11
    "AWS Libfabric",
    "fail at start when the OFI plugin is missing, instead of falling back to TCP (16 x slower)",
    OLCF,
)
# LumiOpen's 1,024-node runs saw "Cassini Event Queue overflow" below this
_LARGE_CQ = Variable(
    "FI_CXI_DEFAULT_CQ_SIZE",
    "262144",
    "'Cassini Event Queue overflow' on 1,024 nodes with less",
    "LumiOpen/Megatron-LM-lumi",
)
# of each kind, by all ranks together: under half of what the job's store takes (benchmarks/comm/rendezvous.py)
STORE_CHECKS_PER_S = 20_000
_RANKS_PER_NODE = 8
_ONE_INTERFACE_NODES = 300  # above it, bootstrap over four interfaces stalls now and then
_LARGE_NODES = 512


def rccl_log_variables(rank: int) -> list[Variable]:
    """What makes RCCL say which network it uses, in a file of its own. For one rank per node."""
    reason = "rank 0 of each node reads which network RCCL uses"
    return [
        Variable("NCCL_DEBUG", "INFO", reason, NCCL),
        Variable("NCCL_DEBUG_SUBSYS", "INIT,NET", reason, NCCL),
        Variable(RCCL_LOG, f"{PRIVATE}/rccl-{rank}.log", reason, NCCL),
    ]


def flight_record_variable(run_dir: str) -> Variable:
    """Where torch's watchdog writes a rank's last collectives before it ends the process."""
    reason = "flight records go to the run, not to one file per rank in the user's home"
    return Variable("TORCH_FR_DUMP_TEMP_FILE", f"{run_dir}/logs/flight_torch_rank_", reason, TORCH)


_SLINGSHOT_MACHINES = tuple(_OWN)
_ROCM_MACHINES = (*_SLINGSHOT_MACHINES, "mi250", "mi300x")
# "eos" and "selene" are the former names of h100 and a100; files that were written then name them
_NVIDIA_MACHINES = ("a100", "h100", "h200", "eos", "selene")
MACHINES = (*_ROCM_MACHINES, *_NVIDIA_MACHINES, "local")


def vendor_of_machine(machine: str) -> Vendor:
    """Whose variables the ranks of a shipped machine get; "none" for `local` and for a machine that this file does
    not know.
    """
    if machine in _ROCM_MACHINES:
        return "amd"
    return "nvidia" if machine in _NVIDIA_MACHINES else "none"


def environment(machine: str, nodes: int, shards_weights: bool = False) -> list[Variable]:
    """The variables that every rank of a job of `nodes` nodes needs on a machine; a name appears once.
    `shards_weights`: FSDP.

    Raises ConfigError for a machine that this file does not know.
    """
    if machine not in MACHINES:
        fix = f"let the machine file say `environment:` or `base:`; {suggest(machine, MACHINES)}"
        raise ConfigError(f"no environment is known for machine {machine!r}", fix, "machine")
    if machine == "local":
        return [Variable("OMP_NUM_THREADS", "1", "ranks share the cores of one computer", TORCH)]
    chosen = {variable.name: variable for variable in _PYTORCH if not (shards_weights and variable.name == ONE_QUEUE)}
    if machine in _ROCM_MACHINES:
        chosen.update({variable.name: variable for variable in _ROCM})
    if machine in _SLINGSHOT_MACHINES:
        chosen.update({variable.name: variable for variable in _slingshot(machine, nodes)})
    return list(chosen.values())


def _slingshot(machine: str, nodes: int) -> list[Variable]:
    """Slingshot's part; one node uses no network, and RCCL must not look for a plugin there."""
    if nodes == 1:
        return [
            Variable(
                "NCCL_NET",
                "Socket",
                "one node: nothing crosses the network, and a missing plugin must not end the job",
                NCCL,
            )
        ]
    chosen = {variable.name: variable for variable in (*_SLINGSHOT, _PLUGIN, *_OWN[machine])}
    if nodes >= _ONE_INTERFACE_NODES:
        reason = f"above {_ONE_INTERFACE_NODES} nodes bootstrap over several interfaces hangs now and then"
        chosen["NCCL_SOCKET_IFNAME"] = Variable("NCCL_SOCKET_IFNAME", "hsn0", reason, "eminorhan/frontier-torchtitan")
    if machine == "lumi" or nodes >= _LARGE_NODES:
        chosen[_LARGE_CQ.name] = _LARGE_CQ
    if (period_ms := 1000 * nodes * _RANKS_PER_NODE // STORE_CHECKS_PER_S) > 1000:
        reason = (
            "each rank's watchdog asks rank 0's store once in so many milliseconds whether a peer has timed "
            "out; by default every 1000"
        )
        chosen["TORCH_NCCL_COORD_CHECK_MILSEC"] = Variable(
            "TORCH_NCCL_COORD_CHECK_MILSEC",
            str(period_ms),
            reason,
            "PyTorch source",
        )
    return list(chosen.values())
