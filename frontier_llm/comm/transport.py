"""Reads from RCCL's log which network the collectives use, and raises an error if it is not Slingshot.

Without the OFI plugin RCCL silently uses TCP sockets, which are slower by a factor of 16. 1 GiB over two Frontier nodes
then takes 308 ms instead of 19 ms (measured in 2026, docs/communication.md). The patterns match the logs of NCCL 2.10
to 2.28, RCCL 2.20 and aws-ofi-nccl 1.3 to 1.21.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from frontier_llm.errors import BackendError

PROVIDER = "cxi"  # libfabric's provider for Slingshot
_NETWORK = re.compile(r"Using network (\S.*?)\s*$", re.MULTILINE)
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w;]+)")
_LIBFABRIC_VERSION = re.compile(r"NET/OFI Using Libfabric version (\S+)")
# An OFI plugin prints this if it is incompatible with the installed libfabric or its provider.
_NO_PROVIDER = "NET/OFI No eligible providers were found"
_CHANNEL = re.compile(r"via NET/(\S[^/\n]*)/\d+(\S*)")
_PLUGIN_VERSION = re.compile(r"NET/OFI (?:Initializing|Using) aws-ofi-\w+ (\S+)")


@dataclass(frozen=True)
class TransportInUse:
    """Network of one rank's collectives, from its RCCL log."""

    network: str  # 'AWS Libfabric', 'Socket', 'IB', …; '' if the log does not contain it.
    provider: str  # Provider of libfabric: 'cxi', 'efa', …; '' without the OFI plugin.
    plugin: str  # Version of the OFI plugin; '' without it.
    channels: int  # Number of RCCL's channels between nodes in the log.
    gpu_rdma_channels: int  # Number of these channels that use GPU RDMA.
    libfabric: str = ""  # Version of libfabric; '' if the log does not contain it, as for plugins before 1.9.
    accepts_no_provider: bool = False  # True if the plugin has found no provider of libfabric that it can use.

    def __str__(self) -> str:
        plugin = f" (OFI plugin {self.plugin}, provider {self.provider})" if self.provider else ""
        if self.channels:
            rdma = f", GPU RDMA on {self.gpu_rdma_channels} of {self.channels} channels between nodes"
        else:
            rdma = ""
        return f"{self.network or 'unknown network'}{plugin}{rdma}"


def read_transport(log_text: str) -> TransportInUse:
    """Parse a log written with the variables of `machine.env.rccl_log_variables`."""
    network, provider, plugin = (pattern.search(log_text) for pattern in (_NETWORK, _PROVIDER, _PLUGIN_VERSION))
    libfabric = _LIBFABRIC_VERSION.search(log_text)
    channels = _CHANNEL.findall(log_text)
    return TransportInUse(
        network=network[1] if network else "",
        provider=provider[1].split(";")[0] if provider else "",
        plugin=plugin[1].rstrip(".") if plugin else "",
        channels=len(channels),
        gpu_rdma_channels=sum("GDRDMA" in rest for _, rest in channels),
        libfabric=libfabric[1] if libfabric else "",
        accepts_no_provider=_NO_PROVIDER in log_text,
    )


def check_transport(in_use: TransportInUse, host: str) -> None:
    """Raise BackendError unless collectives between nodes use libfabric's Slingshot provider and GPU RDMA."""
    if in_use.accepts_no_provider and not in_use.provider:
        what = (
            f"the OFI plugin {in_use.plugin} accepts no provider of libfabric {in_use.libfabric or '(unknown)'}, "
            f"so RCCL uses {in_use.network or 'no network'}"
        )
        fix = (
            f"load a plugin that fits this libfabric (module load rccl-net-plugin); FI_LOG_LEVEL=info "
            f"FI_LOG_PROV={PROVIDER} shows what the plugin requests and the provider lacks"
        )
    elif in_use.network in ("Socket", "IB", ""):
        what = f"RCCL uses {in_use.network or 'a network that its log does not name'} between nodes, not libfabric"
        fix = (
            "module load rccl-net-plugin (or put aws-ofi-nccl on LD_LIBRARY_PATH); frontier-llm doctor shows what "
            "is missing"
        )
    elif in_use.provider != PROVIDER:
        what = f"the OFI plugin selected provider {in_use.provider or '(none)'!r}, not {PROVIDER!r}"
        fix = f"export FI_PROVIDER={PROVIDER}"
    elif in_use.gpu_rdma_channels < in_use.channels:
        what = (
            f"{in_use.channels - in_use.gpu_rdma_channels} of {in_use.channels} channels between nodes copy "
            f"through host memory"
        )
        fix = (
            "bind each rank to its GCD (launch/bind_gcd.sh); on Frontier, export NCCL_NET_GDR_LEVEL=PHB (on LUMI "
            "it hangs)"
        )
    else:
        return
    raise BackendError(what, fix, host)
