#!/bin/bash
# Every task of srun runs this script, one per GCD. It opens the rank's log, binds the cores, and executes the command.
#     rank.sh COMMAND [ARGUMENT ...]
# FRONTIER_LLM_LOG_DIR  folder with one log file per rank; rank 0 also writes to the job's output
# FRONTIER_LLM_BIND     gcd: bind to the cores beside the rank's GCD (launch/bind_gcd.sh); none: keep srun's binding
set -euo pipefail

rank="${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:-${PALS_RANKID:-${PMI_RANK:?no launcher set a rank}}}}"
here="$(dirname "${BASH_SOURCE[0]}")"

# compute nodes have no internet access, unless the site has a proxy; a value of the user, also an empty one, is kept
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE-1}" TRANSFORMERS_OFFLINE="${TRANSFORMERS_OFFLINE-1}"
export WANDB_MODE="${WANDB_MODE-offline}"
export PYTHONUNBUFFERED=1
# without this, thousands of ranks would write the same .pyc files beside the sources, on the parallel file system
export PYTHONDONTWRITEBYTECODE=1
ulimit -S -c 0 # no core files, which have tens of GB each: torch's watchdog ends ranks by abort
# with this level, a failed rendezvous prints one line, without the C++ stack of every rank
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
        # Slurm's warning signal reaches every process of the step. tee must ignore the signal, otherwise rank 0 would
        # write into a broken pipe.
        exec > >(trap '' USR1 USR2 TERM INT && exec tee --append "$log") 2>&1
    else
        exec >>"$log" 2>&1
    fi
fi
# Slurm's warning signal can arrive while Python starts, which takes long if thousands of ranks read its files. A
# blocked signal stays pending until the rank has a handler.
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
