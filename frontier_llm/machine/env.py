"""Environment variables that each machine needs for RCCL, libfabric, MIOpen, HSA and PyTorch, with reason and source.

`environment` lists the variables that a machine needs. `resolve` combines this list with the exported variables and
records the origin of each value. No other module sets these variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from frontier_llm.errors import ConfigError, suggest

Vendor = Literal["amd", "nvidia", "none"]
GPU_FILES = {"amd": "/dev/kfd", "nvidia": "/dev/nvidiactl"}  # files of the drivers; importing torch instead takes 2 s
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
    # other names of the same setting: if the user has exported one of them, this variable is not set
    also: tuple[str, ...] = ()

    def on_rank(self, folder: str, local_rank: int) -> Variable:
        """Return the variable with its value for one rank. `folder`: the job's private folder on the rank's node."""
        return replace(self, value=self.value.replace(PRIVATE, folder).replace(LOCAL_RANK, str(local_rank)))

    @property
    def differs_by_rank(self) -> bool:
        """True if the value contains the job's private folder or the local rank. Only the rank can fill these in."""
        return PRIVATE in self.value or LOCAL_RANK in self.value


PRIVATE = "{private folder of the job}"  # placeholder; the folder is on the node's local disk
LOCAL_RANK = "{local rank}"
THIS_FILE = "frontier_llm/machine/env.py"
EXPORTED = "exported before the start"  # exported by the user, or by a module that was loaded in the same shell.
AMD_DRIVER = Path("/dev/kfd")  # this file exists if the computer has an AMD GPU and its driver.
# Variables with these prefixes are shown with their origin even if no machine needs them.
SHOWN_PREFIXES = ("FI_", "GLOO_", "HIP_", "HSA_", "MIOPEN_", "NCCL_", "RCCL_", "ROCR_")


@dataclass(frozen=True)
class Setting:
    """One variable of a rank's environment, with the origin of its value."""

    name: str
    value: str
    origin: str  # the file that sets the variable, a module, or the user
    reason: str = ""
    machine_value: str = ""  # value that the machine sets, if the user's exported value replaces it

    def describe(self) -> str:
        """Return 'NCCL_NET=Socket (frontier_llm/machine/env.py: one node …)' for rank 0's log and `doctor`."""
        instead = f", instead of {self.machine_value} of {THIS_FILE}" if self.machine_value else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.name}={self.value} ({self.origin}{instead}{reason})"


def resolve(wanted: Sequence[Variable], exported: Mapping[str, str], origins: Mapping[str, str]) -> list[Setting]:
    """Return the variables of the ranks' network and GPUs. An exported value replaces the machine's value.

    A variable of `wanted` is left out if the same setting is exported under another name (`Variable.also`).
    `origins` maps exported variables to their known origins. A variable with a known origin is always listed.
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
# This variable is not set for runs with sharded weights (FSDP). It limits a process to one hardware queue, in which the
# gathers of weights would wait for the compute that they should overlap.
ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"

_PYTORCH = (
    Variable(
        "OMP_NUM_THREADS",
        "7",
        "one thread for each usable core of a GCD's L3 region; the default would start 56 threads per rank",
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

CK_ATTENTION = "TORCH_ROCM_FA_PREFER_CK"  # torch's attention uses CK instead of AOTriton
QUEUES = "GPU_MAX_HW_QUEUES"
DEFAULT_QUEUES = 8  # for one communication in flight, which is safe with any number of queues.
# gfx9 GPUs have 4 pipes with 8 compute queues each (32), and the kernel driver keeps 8 of these queues for itself. More
# queues are multiplexed in software, and a queue that waits can then block the others.
MOST_QUEUES = 24

_ROCM = (
    Variable(
        QUEUES,
        str(DEFAULT_QUEUES),
        "streams share hardware queues: with one communication in flight any number of queues is safe",
        "ROCm/rocm-systems#8916",
    ),
    Variable(
        "TORCH_NCCL_HIGH_PRIORITY",
        "1",
        "older ROCm gives streams of different priority different queues; newer ROCm ignores priorities",
        "ROCm/rocm-systems#8485",
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
    Variable("MIOPEN_CUSTOM_CACHE_DIR", _NODE_LOCAL, "same reason as MIOPEN_USER_DB_PATH", OLCF),
    Variable(
        # torch 2.10 and 2.13 both read this name. torch 2.13 prefers it to PYTORCH_ALLOC_CONF.
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
        "RCCL's bootstrap uses the high-speed network, not the management network",
        HPE,
    ),
    Variable("NCCL_CROSS_NIC", "1", "rings may use another NIC on each node, which is faster on large systems", HPE),
    Variable("FI_CXI_DISABLE_HOST_REGISTER", "1", "avoids ROCm calls that deadlock RCCL", HPE),
    Variable("FI_CXI_DEFAULT_CQ_SIZE", "131072", "completion queues of large jobs overflow with the default", HPE),
    Variable("FI_CXI_DEFAULT_TX_SIZE", "2048", "room for many unexpected rendezvous messages", HPE),
    Variable("FI_CXI_RDZV_EAGER_SIZE", "0", "all messages use the rendezvous protocol", HPE),
    Variable("FI_CXI_RDZV_THRESHOLD", "0", "all messages use the rendezvous protocol", HPE),
    Variable("FI_CXI_RDZV_GET_MIN", "0", "all messages use the rendezvous protocol", HPE),
    Variable("FI_CXI_RX_MATCH_MODE", "hybrid", "software matching when the NIC's match list overflows", HPE),
)

# libfabric's default monitor of registered memory (memhooks) deadlocks on both machines.
# FI_CXI_RDZV_PROTO is not set on LUMI: the variable needs the job option `--network=disable_rdzv_get`, which LUMI does
# not document. Without this option libfabric silently keeps its default protocol.
# NCCL_NET_GDR_LEVEL is not set on LUMI: RCCL finds GPU RDMA without this variable. With the variable the first
# collective between nodes hung (ROCm 7.0 image, laifs-container-recipes issues 28 and 30).
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
    # Every version of the plugin accepts this name. "OFI", the name in the current guides, needs a version after 1.11.
    "AWS Libfabric",
    "fail at start when the OFI plugin is missing, instead of falling back to TCP (16 x slower)",
    OLCF,
)
# With smaller queues, LumiOpen's runs on 1,024 nodes reported "Cassini Event Queue overflow".
_LARGE_CQ = Variable(
    "FI_CXI_DEFAULT_CQ_SIZE",
    "262144",
    "'Cassini Event Queue overflow' on 1,024 nodes with less",
    "LumiOpen/Megatron-LM-lumi",
)
# Highest rate at which all ranks together check heartbeats in the job's store. Torch's own checks have the same limit.
# The rate is less than half the rate that the store can serve (benchmarks/comm/rendezvous.py).
STORE_CHECKS_PER_S = 20_000
_RANKS_PER_NODE = 8
_ONE_INTERFACE_NODES = 300  # from this number of nodes on, RCCL's bootstrap over four interfaces sometimes hangs
_LARGE_NODES = 512


def rccl_log_variables(rank: int) -> list[Variable]:
    """Return the variables with which RCCL logs to a file which network it uses. Set them for one rank per node."""
    reason = "rank 0 of each node reads which network RCCL uses"
    return [
        Variable("NCCL_DEBUG", "INFO", reason, NCCL),
        Variable("NCCL_DEBUG_SUBSYS", "INIT,NET", reason, NCCL),
        Variable(RCCL_LOG, f"{PRIVATE}/rccl-{rank}.log", reason, NCCL),
    ]


def flight_record_variable(run_dir: str) -> Variable:
    """Return the variable with the path to which torch's watchdog writes the flight record.

    The flight record holds a rank's last collectives. The watchdog writes it before it ends the process.
    """
    reason = "flight records go to the run, not to one file per rank in the user's home"
    return Variable("TORCH_FR_DUMP_TEMP_FILE", f"{run_dir}/logs/flight_torch_rank_", reason, TORCH)


_SLINGSHOT_MACHINES = tuple(_OWN)
_ROCM_MACHINES = (*_SLINGSHOT_MACHINES, "mi250", "mi300x")
# "eos" and "selene" are the former names of h100 and a100. Older run and machine files contain these names.
_NVIDIA_MACHINES = ("a100", "h100", "h200", "eos", "selene")
MACHINES = (*_ROCM_MACHINES, *_NVIDIA_MACHINES, "local")


def queues_variable(queues: int) -> Variable:
    """Return the variable for a run with many communications in flight, whose ranks have `queues` streams each."""
    reason = (
        "one hardware queue for each stream of a rank. Streams that share a queue wait for each other: a receive "
        "that is posted early would block the work for which its sender waits"
    )
    return Variable(QUEUES, str(queues), reason, "ROCm/rocm-systems#8916, ROCm/rccl#2191")


def vendor_of_machine(machine: str) -> Vendor:
    """Return the GPU vendor of a shipped machine; "none" for `local` and for unknown machines.

    The vendor decides which variables the ranks get.
    """
    if machine in _ROCM_MACHINES:
        return "amd"
    return "nvidia" if machine in _NVIDIA_MACHINES else "none"


def environment(machine: str, nodes: int, shards_weights: bool = False) -> list[Variable]:
    """Return the variables that every rank of a job of `nodes` nodes needs on a machine. Each name appears once.

    `shards_weights` is true for FSDP. `local` gets the variables of ROCm if this computer has an AMD GPU. Raises
    ConfigError for an unknown machine.
    """
    if machine not in MACHINES:
        fix = f"set `environment:` or `base:` in the machine file; {suggest(machine, MACHINES)}"
        raise ConfigError(f"no environment is known for machine {machine!r}", fix, "machine")
    if machine == "local":
        threads = Variable("OMP_NUM_THREADS", "1", "ranks share the cores of one computer", TORCH)
        return [threads, *_ROCM] if AMD_DRIVER.exists() else [threads]
    chosen = {variable.name: variable for variable in _PYTORCH if not (shards_weights and variable.name == ONE_QUEUE)}
    if machine in _ROCM_MACHINES:
        chosen.update({variable.name: variable for variable in _ROCM})
    if machine in _SLINGSHOT_MACHINES:
        chosen.update({variable.name: variable for variable in _slingshot(machine, nodes)})
    return list(chosen.values())


def _slingshot(machine: str, nodes: int) -> list[Variable]:
    """Return the Slingshot variables. A job on one node needs no network, so RCCL must not require its plugin."""
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
        reason = f"from {_ONE_INTERFACE_NODES} nodes, bootstrap over several interfaces sometimes hangs"
        chosen["NCCL_SOCKET_IFNAME"] = Variable("NCCL_SOCKET_IFNAME", "hsn0", reason, "eminorhan/frontier-torchtitan")
    if machine == "lumi" or nodes >= _LARGE_NODES:
        chosen[_LARGE_CQ.name] = _LARGE_CQ
    if (period_ms := 1000 * nodes * _RANKS_PER_NODE // STORE_CHECKS_PER_S) > 1000:
        reason = (
            "interval in milliseconds at which each rank's watchdog polls rank 0's store for timeouts of other ranks; "
            "the default is 1000"
        )
        chosen["TORCH_NCCL_COORD_CHECK_MILSEC"] = Variable(
            "TORCH_NCCL_COORD_CHECK_MILSEC",
            str(period_ms),
            reason,
            "PyTorch source",
        )
    return list(chosen.values())
