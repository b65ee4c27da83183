#!/bin/bash
# Pin this task to the cores and memory beside its GCD: local rank = GCD. Usage: bind_gcd.sh COMMAND [ARGUMENT ...]
# Rendered from frontier_llm/machine/affinity.py by `python -m frontier_llm.cluster.sbatch`; change that and render
# again.
set -euo pipefail

local_rank="${SLURM_LOCALID:-${OMPI_COMM_WORLD_LOCAL_RANK:-${PALS_LOCAL_RANKID:-${LOCAL_RANK:-}}}}"
: "${local_rank:?no launcher set a local rank}"
cores=(49-55 57-63 17-23 25-31 1-7 9-15 33-39 41-47)
numa=(3 3 1 1 0 0 2 2)

if [[ "$local_rank" -ge 8 ]]; then
    echo "bind_gcd.sh: local rank $local_rank on a node of 8 GCDs; start 8 tasks per node" >&2
    exit 2
fi
if command -v numactl >/dev/null; then
    exec numactl --physcpubind="${cores[local_rank]}" --preferred="${numa[local_rank]}" -- "$@"
fi
exec taskset --cpu-list "${cores[local_rank]}" "$@"
