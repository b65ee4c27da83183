#!/bin/bash
# What each task of srun runs, one per GCD: its own log, its cores; then it becomes the given command.
#     rank.sh COMMAND [ARGUMENT ...]
# FRONTIER_LLM_LOG_DIR  one file per rank there; rank 0 also speaks to the job's output
# FRONTIER_LLM_BIND     gcd: beside its GCD by launch/bind_gcd.sh; none: as srun has bound it
set -euo pipefail

rank="${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:-${PALS_RANKID:-${PMI_RANK:?no launcher set a rank}}}}"
here="$(dirname "${BASH_SOURCE[0]}")"

# compute nodes reach no internet, unless the site has a proxy; the value of the user wins, an empty one too
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE-1}" TRANSFORMERS_OFFLINE="${TRANSFORMERS_OFFLINE-1}"
export WANDB_MODE="${WANDB_MODE-offline}"
export PYTHONUNBUFFERED=1
# otherwise thousands of ranks would write the same .pyc files next to the sources, on the parallel file system
export PYTHONDONTWRITEBYTECODE=1
ulimit -S -c 0 # no core files of tens of GB each: a watchdog ends ranks by abort
# one line for a failed rendezvous, without the C++ frames of every rank
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"

if [[ -n "${FRONTIER_LLM_LOG_DIR:-}" ]]; then
    folder="$FRONTIER_LLM_LOG_DIR"
    if [[ "$rank" -ge 1000 ]]; then # one folder per 1,000 ranks (cluster/rank_logs.py)
        folder+="/$(printf %06d $((rank / 1000 * 1000)))"
    fi
    mkdir -p "$folder"
    log="$folder/rank_$rank.log"
    if [[ -L "$log" || ("$folder" != "$FRONTIER_LLM_LOG_DIR" && -L "$folder") ]]; then
        echo "rank.sh: $log is a link, and logs are not written through links; remove it" >&2
        exit 2
    fi
    if [[ "$rank" -eq 0 ]]; then
        # Slurm's warning reaches every process of the step; tee has to outlive it, or rank 0 would write into a broken
        # pipe
        exec > >(trap '' USR1 USR2 TERM INT && exec tee --append "$log") 2>&1
    else
        exec >>"$log" 2>&1
    fi
fi
# Slurm's warning may come while Python starts, which takes long where thousands of ranks read its files: it waits until
# the rank can hear it
held=()
if env --block-signal=USR1 true 2>/dev/null; then
    held=(env --block-signal=USR1)
fi
case "${FRONTIER_LLM_BIND:-none}" in
    gcd) exec "${held[@]}" "$here/bind_gcd.sh" "$@" ;;
    none) exec "${held[@]}" "$@" ;;
    *)
        echo "rank.sh: FRONTIER_LLM_BIND=$FRONTIER_LLM_BIND is neither gcd nor none" >&2
        exit 2
        ;;
esac
