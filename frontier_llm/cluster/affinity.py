"""launch/bind_gcd.sh, written from the measured map of a MI250X node: local rank = GCD → its cores, memory and NIC.

Frontier's node diagram (OLCF user guide @2745903): each GCD hangs on one L3 region of eight cores, and each NIC on the second
GCD of a MI250X package. The first core of every region is the operating system's (low-noise mode).
"""

from __future__ import annotations

from dataclasses import dataclass

CORES_PER_REGION = 8


@dataclass(frozen=True)
class GcdPlace:
    """What is near one GCD."""

    first_core: int  # of its L3 region
    nic: str  # nearest HSN interface; the other GCD of the package reaches it over 200 GB/s

    @property
    def cores(self) -> str:
        """The seven cores that jobs may use: '49-55'."""
        return f"{self.first_core + 1}-{self.first_core + CORES_PER_REGION - 1}"

    @property
    def numa(self) -> int:
        """NUMA domain: 16 cores each."""
        return self.first_core // 16


MI250X_NODE: tuple[GcdPlace, ...] = (
    GcdPlace(48, "hsn0"),
    GcdPlace(56, "hsn0"),
    GcdPlace(16, "hsn1"),
    GcdPlace(24, "hsn1"),
    GcdPlace(0, "hsn2"),
    GcdPlace(8, "hsn2"),
    GcdPlace(32, "hsn3"),
    GcdPlace(40, "hsn3"),
)


def render_bind_script(node: tuple[GcdPlace, ...] = MI250X_NODE) -> str:
    """The script that pins a task beside the GCD of its local rank and then becomes the given command."""
    count = len(node)
    return f"""\
#!/bin/bash
# Pin this task to the cores and memory beside its GCD: local rank = GCD. Usage: bind_gcd.sh COMMAND [ARGUMENT ...]
# Rendered from frontier_llm/cluster/affinity.py by `python -m frontier_llm.cluster.sbatch`; change that and render again.
set -euo pipefail

local_rank="${{SLURM_LOCALID:-${{OMPI_COMM_WORLD_LOCAL_RANK:-${{PALS_LOCAL_RANKID:-${{LOCAL_RANK:?no launcher set a local rank}}}}}}}}"
cores=({" ".join(place.cores for place in node)})
numa=({" ".join(str(place.numa) for place in node)})
nics=({" ".join(place.nic for place in node)})

if [[ "$local_rank" -ge {count} ]]; then
    echo "bind_gcd.sh: local rank $local_rank on a node of {count} GCDs; start {count} tasks per node" >&2
    exit 2
fi
export FRONTIER_LLM_NIC="${{nics[local_rank]}}"
if command -v numactl >/dev/null; then
    exec numactl --physcpubind="${{cores[local_rank]}}" --preferred="${{numa[local_rank]}}" -- "$@"
fi
exec taskset --cpu-list "${{cores[local_rank]}}" "$@"
"""
