"""launch/bind_gcd.sh, written from the map of a MI250X node (machine.affinity): local rank = GCD → its cores and
memory.

The NIC of its package is RCCL's to find.
"""

from __future__ import annotations

from collections.abc import Sequence

from frontier_llm.machine.affinity import NODE, Place


def render_bind_script(node: Sequence[Place] = NODE) -> str:
    """The script that pins a task beside the GCD of its local rank and then becomes the given command."""
    count = len(node)
    return f"""\
#!/bin/bash
# Pin this task to the cores and memory beside its GCD: local rank = GCD. Usage: bind_gcd.sh COMMAND [ARGUMENT ...]
# Rendered from frontier_llm/machine/affinity.py by `python -m frontier_llm.cluster.sbatch`; change that and render
# again.
set -euo pipefail

local_rank="${{SLURM_LOCALID:-${{OMPI_COMM_WORLD_LOCAL_RANK:-${{PALS_LOCAL_RANKID:-${{LOCAL_RANK:-}}}}}}}}"
: "${{local_rank:?no launcher set a local rank}}"
cores=({" ".join(f"{place.usable_cores[0]}-{place.usable_cores[-1]}" for place in node)})
numa=({" ".join(str(place.numa) for place in node)})

if [[ "$local_rank" -ge {count} ]]; then
    echo "bind_gcd.sh: local rank $local_rank on a node of {count} GCDs; start {count} tasks per node" >&2
    exit 2
fi
if command -v numactl >/dev/null; then
    exec numactl --physcpubind="${{cores[local_rank]}}" --preferred="${{numa[local_rank]}}" -- "$@"
fi
exec taskset --cpu-list "${{cores[local_rank]}}" "$@"
"""
