"""The transport check on log lines in the formats of RCCL and aws-ofi-nccl. The lines follow published logs and were
not recorded on Frontier.
"""

from __future__ import annotations

import pytest

from frontier_llm.comm.transport import TransportInUse, check_transport, read_transport
from frontier_llm.errors import BackendError

GOOD = """\
n1:101:140 [0] NCCL INFO NET/Plugin: Loaded net plugin AWS Libfabric (v8)
n1:101:140 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.19.2
n1:101:140 [0] NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)
n1:101:140 [0] NCCL INFO Using network AWS Libfabric
n1:101:140 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/AWS Libfabric/0/GDRDMA
n1:101:140 [0] NCCL INFO Channel 01/0 : 7[7] -> 8[0] [send] via NET/AWS Libfabric/1/GDRDMA/Shared
n1:101:140 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/IPC
"""
SOCKET = """\
n1:101:140 [0] NCCL INFO NET/Plugin: Could not find: librccl-net.so
n1:101:140 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.1.2.3<0> [1]hsn1:10.1.2.4<0>
n1:101:140 [0] NCCL INFO Using network Socket
n1:101:140 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/Socket/0
"""


def test_a_good_log_passes() -> None:
    found = read_transport(GOOD)
    assert found == TransportInUse("AWS Libfabric", "cxi", "1.19.2", 2, 2)
    assert str(found) == "AWS Libfabric (OFI plugin 1.19.2, provider cxi), GPU RDMA on 2 of 2 channels between nodes"
    check_transport(found, "n1")


def test_older_plugins_spell_it_differently() -> None:
    text = (
        "NCCL INFO NET/OFI Using aws-ofi-rccl 1.3.0aws\nNCCL INFO NET/OFI Selected Provider is cxi;ofi_rxm\nNCCL "
        "INFO Using network AWS Libfabric\n"
    )
    assert read_transport(text) == TransportInUse("AWS Libfabric", "cxi", "1.3.0aws", 0, 0)


# Lines of plugin 1.21: the version of libfabric, and a plugin that does not fit the provider (from a published log of a
# Slingshot system).
NEWEST = GOOD.replace("1.19.2", "1.21.1\nNCCL INFO NET/OFI Using Libfabric version 2.3")
MISFIT = """\
NCCL INFO NET/Plugin: Loaded net plugin AWS Libfabric (v11)
NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.21.1
NCCL INFO NET/OFI Using Libfabric version 2.3
NCCL INFO NET/OFI No eligible providers were found
n1:333:333 [0] int nccl_net_ofi_create_plugin(nccl_net_ofi_plugin_t**):418 NCCL WARN NET/OFI initialization failed
NCCL INFO Using network Socket
"""


def test_the_newest_plugin_names_libfabric() -> None:
    found = read_transport(NEWEST)
    assert (found.plugin, found.libfabric, found.provider) == ("1.21.1", "2.3", "cxi")
    check_transport(found, "n1")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (MISFIT, "the OFI plugin 1.21.1 accepts no provider of libfabric 2.3, so RCCL uses Socket"),
        (SOCKET, "RCCL uses Socket between nodes, not libfabric"),
        ("nothing of use", "its log does not name"),
        (GOOD.replace("provider is cxi", "provider is tcp"), "selected provider 'tcp', not 'cxi'"),
        (GOOD.replace("/1/GDRDMA/Shared", "/1/Shared"), "1 of 2 channels between nodes copy through host memory"),
    ],
)
def test_a_fall_to_something_slower_is_an_error(text: str, complaint: str) -> None:
    with pytest.raises(BackendError, match="fix:") as caught:
        check_transport(read_transport(text), "n1")
    assert complaint in str(caught.value) and "n1" in str(caught.value)
