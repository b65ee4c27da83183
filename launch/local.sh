#!/bin/bash
# Train on this machine without Slurm: RANKS processes, on its GPUs if it has any, else on the CPU.
#     launch/local.sh RANKS CONFIG [key=value ...]
set -euo pipefail

if [[ $# -lt 2 || ! "$1" =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: launch/local.sh RANKS CONFIG [key=value ...]" >&2
    exit 2
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
ranks="$1"
shift
exec "${FRONTIER_LLM_PYTHON:-python3}" -m frontier_llm.cluster.local "$ranks" "$@"
